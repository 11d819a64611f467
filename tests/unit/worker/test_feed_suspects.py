"""Jobs with which a worker died: claimed when this worker has no other claim, in no order, and each after a while."""

from __future__ import annotations

import random

from alphaloop.store.jobs import Claim, ClaimState
from tests.fixtures.turning import SUSPECT_DELAY_S, Feeding


def test_a_job_with_which_a_worker_died_is_claimed_when_this_worker_has_no_other_claim() -> None:
    feeding = Feeding(num_ahead=4)
    for name in ("b", "d"):
        feeding.table.found[name] = Claim(name, ClaimState.CLAIMED, attempt=2, num_crashes=1)
    feeding.send(*"abcde")
    feeding.feed.turn()
    assert feeding.table.calls == [["a", "b", "c", "d"]]
    assert (feeding.leases.num_held, feeding.feed.num_waiting) == (2, 5)
    first = feeding.start(2)
    assert [one.job_id for one in first] == ["a", "c"]
    feeding.feed.turn()
    assert len(feeding.table.calls) == 1, "others run"
    order: list[list[str]] = []
    running = list(first)
    while running:
        feeding.end(running)
        feeding.feed.turn()
        running = feeding.start(4)
        feeding.feed.turn()
        order += [[one.job_id for one in running]]
    assert sorted(order[:2]) == [["b"], ["d"]], "one by one, and nobody beside them"
    assert order[2:] == [["e"], []]
    assert feeding.table.calls[1:] == order[:3]
    assert feeding.feed.num_waiting == 0


def test_suspects_leave_with_their_partition() -> None:
    feeding = Feeding(num_ahead=4)
    feeding.table.found["a"] = Claim("a", ClaimState.CLAIMED, attempt=2, num_crashes=1)
    feeding.send("a", "b")
    feeding.feed.turn()
    assert feeding.feed.num_waiting == 2
    feeding.intake.revoke()
    feeding.end(feeding.start())
    feeding.feed.turn()
    assert (feeding.feed.num_waiting, feeding.table.calls) == (0, [["a", "b"]])


def test_a_suspect_that_is_claimed_alone_stays_claimed_and_keeps_others_out() -> None:
    feeding = Feeding(num_ahead=4)
    feeding.table.found["a"] = Claim("a", ClaimState.CLAIMED, attempt=2, num_crashes=1)
    feeding.send("a")
    feeding.feed.turn()
    feeding.feed.turn()
    running = feeding.start()
    feeding.send("b")
    feeding.feed.turn()
    assert (feeding.table.calls, feeding.table.released) == ([["a"], ["a"]], [])
    feeding.end(running)
    feeding.feed.turn()
    assert feeding.table.calls == [["a"], ["a"], ["b"]]


def test_no_suspect_always_comes_first() -> None:
    """Workers that are killed from outside every few seconds would die with the same job again and again."""
    first = set()
    for seed in range(20):
        feeding = Feeding(num_ahead=4, rng=random.Random(seed))
        for name in "abcd":
            feeding.table.found[name] = Claim(name, ClaimState.CLAIMED, attempt=2, num_crashes=1)
        feeding.send(*"abcd")
        feeding.feed.turn()
        feeding.feed.turn()
        first.add(feeding.start()[0].job_id)
    assert first == set("abcd")


def test_a_suspect_with_which_a_worker_died_alone_waits_until_this_worker_has_lived_longer_each_time() -> None:
    """Meanwhile others run: a worker that is killed soon after its start takes no attempt of such a job."""
    feeding = Feeding(num_ahead=4)
    for name, num_crashes in (("once", 1), ("twice", 2), ("thrice", 3)):
        feeding.table.found[name] = Claim(name, ClaimState.CLAIMED, attempt=2, num_crashes=num_crashes)
    feeding.send("once", "twice", "thrice", "good")
    started_at: dict[str, float] = {}
    for second in range(30):
        feeding.now = float(second)
        for _ in range(3):
            feeding.feed.turn()
            running = feeding.start(4)
            started_at |= {one.job_id: feeding.now for one in running}
            feeding.end(running)
    assert started_at == {"good": 0.0, "once": 0.0, "twice": SUSPECT_DELAY_S, "thrice": 2 * SUSPECT_DELAY_S}
    assert feeding.feed.num_waiting == 0


def test_a_suspect_that_waits_for_a_server_that_is_away_keeps_nobody_out() -> None:
    feeding = Feeding(num_ahead=4)
    feeding.table.found["a"] = Claim("a", ClaimState.CLAIMED, attempt=2, num_crashes=1)
    feeding.send("a", "b")
    feeding.feed.turn()
    (other,) = feeding.start()
    feeding.end([other])
    feeding.feed.turn()
    (suspect,) = feeding.start()
    feeding.send("c")
    feeding.feed.turn()
    assert [suspect.job_id, *(one.job_id for one in feeding.start())] == ["a"]
    feeding.feed.set_aside({"a": suspect.ready.lane})
    feeding.feed.turn()
    assert [one.job_id for one in feeding.start()] == ["c"]


def test_jobs_whose_claims_were_given_back_wait_in_line_again() -> None:
    feeding = Feeding(num_ahead=4)
    feeding.send("a", "b")
    feeding.feed.turn()
    given_back = feeding.start(2)
    feeding.feed.put_back([one.ready for one in given_back])
    feeding.end(given_back)
    feeding.feed.turn()
    assert [one.job_id for one in feeding.start(2)] == ["a", "b"]
