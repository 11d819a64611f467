"""From deliveries to claimed jobs: read, put in order, claimed ahead of need, suspects alone, each counted once."""

from __future__ import annotations

import random
from datetime import timedelta
from types import SimpleNamespace

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.engine import PreparedJob, Sampling
from alphaloop.messages import Job
from alphaloop.store.jobs import Claim, ClaimState
from tests.fakes import FakeEngine
from tests.fixtures.publishing import NOW
from tests.fixtures.turning import Feeding
from worker.publishing import RecordedGroup
from worker.running import SUSPECT_DELAY_S


def num_held_bytes(one: Feeding) -> int:
    """Of the jobs whose claim another worker holds."""
    return sum(job.num_bytes for _, job in one.feed._held)


def test_what_is_no_job_is_refused_and_a_tripping_tokenizer_stops_nobody() -> None:
    class Tripping(FakeEngine):
        def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
            if job.job_id == "trips":
                raise ZeroDivisionError("quoting the prompt")
            return super().prepare(job, sampling)

    one = Feeding(engine=Tripping())
    one.send("bad", value=b"not JSON", offset=1)
    one.send("trips", offset=2)
    one.send("good", offset=3)
    one.feed.turn()
    told = [(refused.delivery.record.offset, refused.reason.code, refused.reason.message) for refused in one.refused]
    assert [(offset, code) for offset, code, _ in told] == [(1, "malformed_message"), (2, "malformed_message")]
    assert told[1][2] == "could not be read: ZeroDivisionError"
    assert [claimed.job_id for claimed in one.start(9)] == ["good"]


def test_a_job_that_postgres_does_not_take_is_refused_and_stops_no_other() -> None:
    one = Feeding(num_ahead=9)
    one.table.untakable = {"b"}
    one.send("a", "b", "c")
    one.feed.turn()
    assert [dead.reason.code for dead in one.refused] == ["malformed_message"]
    assert [claimed.job_id for claimed in one.start(9)] == ["a", "c"]
    assert one.feed.num_waiting == 0


def test_what_was_recorded_is_answered_what_conflicts_refused_and_what_ended_recorded() -> None:
    one = Feeding(num_ahead=9)
    states = {
        "recorded": Claim("recorded", ClaimState.ENDED, 1, outcome=b"the bytes"),
        "conflict": Claim("conflict", ClaimState.CONFLICT, 1),
        "cancelled": Claim("cancelled", ClaimState.CANCELLED, 1),
        "exhausted": Claim("exhausted", ClaimState.EXHAUSTED, 4, num_crashes=3),
    }
    one.table.found = states
    one.send(*states, "fresh")
    one.feed.turn()
    groups = [group for group in one.published() if isinstance(group, RecordedGroup) and group.is_repeated]
    again = [(message.key, message.value) for group in groups for message in group.messages]
    refused = [told.reason.code for told in one.refused]
    assert (again, refused) == ([(b"recorded", b"the bytes")], ["job_conflict"])
    assert [(e.claimed.job_id, e.outcome.status) for e in one.ended] == [
        ("cancelled", "cancelled"),
        ("exhausted", "failed"),
    ]
    assert [one.leases.holds(job_id) for job_id in ("cancelled", "exhausted", "fresh")] == [True] * 3
    fresh = one.start(9)
    assert [claimed.job_id for claimed in fresh] == ["fresh"]
    one.end(fresh)
    assert +one.feed._taken == {}, "what needs no decoding holds no place"


def test_a_job_that_another_worker_holds_is_asked_for_again_when_its_lease_is_over() -> None:
    one = Feeding()
    one.table.found = {"held": Claim("held", ClaimState.HELD, 1, held_for_s=12.0)}
    one.send("held")
    one.feed.turn()
    one.now = 11.9
    one.feed.turn()
    assert one.table.calls == [["held"]]
    assert one.feed.num_waiting == 1
    one.table.found = {"held": Claim("held", ClaimState.CLAIMED, 2)}
    one.now = 12.0
    one.feed.turn()
    assert one.table.calls == [["held"], ["held"]]
    assert [(claimed.job_id, claimed.attempt) for claimed in one.start(9)] == [("held", 2)]


@pytest.mark.parametrize("is_in_one_claim", [True, False])
def test_a_job_that_comes_twice_is_not_claimed_again_while_it_is_ours(is_in_one_claim: bool) -> None:
    """Claimed again by its owner it would get a second attempt, which fences the first one while that is decoded."""
    one = Feeding(num_ahead=4)
    one.send("a")
    if not is_in_one_claim:
        one.feed.turn()
    one.send("a")
    for _ in range(4):
        one.feed.turn()
        one.now += 1
    assert one.table.calls == [["a"]]
    started = one.start(9)
    assert len(started) == 1
    one.feed.turn()
    assert one.table.calls == [["a"]]
    one.table.found = {"a": Claim("a", ClaimState.ENDED, 1, outcome=b"the bytes")}
    one.end(started)
    one.feed.turn()
    assert one.table.calls == [["a"], ["a"]]
    assert [isinstance(one, RecordedGroup) and one.is_repeated for one in one.published()] == [True]
    assert one.feed.num_waiting == 0


@pytest.mark.parametrize("bounds", [{"max_waiting": 3}, {"max_bytes": 3000}], ids=["count", "bytes"])
def test_what_waits_unclaimed_is_bounded_in_count_and_in_bytes(bounds: dict[str, int]) -> None:
    one = Feeding(num_ahead=1, **bounds)
    one.table.found = {"held": Claim("held", ClaimState.HELD, 1, held_for_s=5.0)}
    names = ["held", *(f"job-{number}" for number in range(50))]
    one.send(*names)
    most, most_bytes = 0, 0
    for _ in range(10):
        one.feed.turn()
        most = max(most, one.feed.num_waiting - len(one.feed.ready))
        most_bytes = max(most_bytes, one.queue.load(is_high=False)[1] + num_held_bytes(one))
    assert most == 3
    if "max_bytes" in bounds:
        size = num_held_bytes(one)
        assert bounds["max_bytes"] < most_bytes <= bounds["max_bytes"] + size, "one job past the bound, and no more"
    one.now = 100.0
    one.table.found = {}
    assert sorted(one.decode_all()) == sorted(names), "every job reaches the loop once"
    assert (one.feed.num_waiting, +one.feed._taken) == (0, {})


def test_jobs_are_claimed_ahead_no_further_than_asked() -> None:
    one = Feeding(num_ahead=2)
    one.send(*"abcde")
    one.feed.turn()
    one.feed.turn()
    assert one.table.calls == [["a", "b"]]
    assert (len(one.feed.ready), one.feed.num_waiting) == (2, 5)
    assert [one.leases.holds(job_id) for job_id in "abc"] == [True, True, False]
    (started,) = one.start()
    one.feed.turn()
    assert (started.job_id, one.table.calls[1:]) == ("a", [["c"]])
    assert one.intake.num_wakes >= 1


def test_a_job_whose_prompt_begins_like_a_running_jobs_goes_first() -> None:
    one = Feeding(num_ahead=1)
    texts = {"a": "red " * 70, "b": "blue " * 70}
    for job_id, text in (("a1", "a"), ("b1", "b"), ("b2", "b"), ("a2", "a")):
        one.send(job_id, prompt=texts[text] + job_id)
    order = []
    for _ in range(4):
        one.feed.turn()
        order += [started.job_id for started in one.start()]
    assert order == ["a1", "a2", "b1", "b2"]


def test_jobs_are_claimed_between_prompts_that_take_long_to_read() -> None:
    class Slow(FakeEngine):
        def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
            one.now += 3.0
            return super().prepare(job, sampling)

    one = Feeding(num_ahead=2, engine=Slow())
    one.send("a", "b", "c")
    one.feed.turn()
    assert [claimed.job_id for claimed in one.start(9)] == ["a"], "the device does not wait for the other prompts"
    assert len(one.feed._unread[False]) == 2
    assert one.decode_all() == ["b", "c"]


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
    feeding.feed.set_aside({"a": suspect.ready.line})
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


def test_a_segment_that_fills_every_buffer_keeps_no_other_out() -> None:
    """Another's job starts after what was claimed already, and as if nothing else of the first one waited."""
    one = Feeding(num_ahead=1, max_waiting=8)
    one.send(*(f"batch-{number}" for number in range(300)), segment="batch")
    one.send(*(f"gold-{number}" for number in range(5)), segment="gold")
    order = one.decode_all()
    assert len(order) == 305
    assert [name for name in order if name.startswith("batch")] == [f"batch-{number}" for number in range(300)]
    assert max(order.index(f"gold-{number}") for number in range(5)) <= 8 + 2 * 5


def test_jobs_without_a_deadline_that_fill_every_buffer_keep_no_near_deadline_unread() -> None:
    one = Feeding(num_ahead=1, max_waiting=8)
    one.send(*(f"plain-{number}" for number in range(300)))
    one.send(*(f"near-{number}" for number in range(5)), deadline=(NOW + timedelta(seconds=600)).isoformat())
    order = one.decode_all()
    assert len(order) == 305
    assert max(order.index(f"near-{number}") for number in range(5)) <= 8 + 2 * 5


def test_what_waits_unread_is_bounded_in_bytes_and_leaves_with_its_partition() -> None:
    one = Feeding(num_ahead=1, max_waiting=3, max_bytes=20_000)
    one.send(*(f"job-{number}" for number in range(50)))
    for _ in range(5):
        one.feed.turn()
    assert 0 < len(one.feed._unread[False]) < 25
    assert one.intake.waiting
    one.intake.waiting.clear()
    one.intake.revoke()
    one.feed.turn()
    assert len(one.feed._unread[False]) == 0
    assert one.queue.load(is_high=False) == (0, 0)


def test_the_job_with_the_least_slack_is_claimed_first_and_one_past_its_deadline_ends_at_once() -> None:
    one = Feeding(num_ahead=1)
    for job_id, after_s in (("plain", None), ("far", 9000.0), ("near", 60.0), ("over", -1.0)):
        deadline = {} if after_s is None else {"deadline": (NOW + timedelta(seconds=after_s)).isoformat()}
        one.send(job_id, **deadline)
    one.feed.turn()
    assert [(job.claimed.job_id, job.outcome.status) for job in one.ended] == [("over", "expired")]
    order = []
    for _ in range(4):
        one.feed.turn()
        order += [started.job_id for started in one.start()]
    assert order == ["near", "far", "plain"]


def test_jobs_that_are_over_make_no_others_be_claimed_ahead() -> None:
    """Each turn ends some, within a moment. Those that can start are claimed no earlier for it."""
    one = Feeding(num_ahead=1)
    over = {"deadline": (NOW - timedelta(seconds=1)).isoformat()}
    one.send(*(f"over-{number}" for number in range(50)), **over)
    one.send(*(f"job-{number}" for number in range(50)))
    for _ in range(60):
        one.feed.turn()
    assert (len(one.ended), len(one.feed.ready)) == (50, 1)
    assert +one.feed._taken == {claimed.ready.line: 1 for claimed in one.start()}


def test_what_is_over_and_read_again_keeps_no_other_from_the_device() -> None:
    """After a restart a worker reads jobs again that ended long ago, of which most had deadlines."""
    one = Feeding(num_ahead=1)
    over = [f"over-{number}" for number in range(90)]
    one.table.found = {name: Claim(name, ClaimState.ENDED, 1, outcome=b"{}") for name in over}
    one.send(*over, deadline=(NOW - timedelta(seconds=1)).isoformat())
    one.send("fresh")
    one.feed.turn()
    assert [claimed.job_id for claimed in one.start()] == ["fresh"]
    groups = [group for group in one.published() if isinstance(group, RecordedGroup)]
    assert sum(len(group.messages) for group in groups) == 90


def test_what_a_job_takes_is_that_of_its_task_and_of_its_own_limit() -> None:
    one = Feeding(num_ahead=8)
    for task, token_s in (("code", 1.0), ("sql", 10.0)):
        one.feed.service.ended(task, num_tokens=100, wall_s=100 * token_s, ahead_s=0.0)
    within = {"deadline": (NOW + timedelta(seconds=50)).isoformat()}
    one.send("slow", task="sql", max_tokens=8, **within)
    one.send("short", task="sql", max_tokens=4, **within)
    one.send("long", task="code", max_tokens=80, **within)
    one.send("fast", task="code", max_tokens=40, **within)
    one.feed.turn()
    order = [claimed.job_id for claimed in one.start(9)]
    assert len(order) == 4
    assert order.index("short") < order.index("slow"), "the other one takes 80 s of 50"
    assert order.index("fast") < order.index("long")


def test_the_wait_after_a_claim_is_counted_from_the_jobs_own_claim() -> None:
    one = Feeding(num_ahead=1)
    one.send("first", "second")
    started = []
    for one.now in (100.0, 200.0):
        one.feed.turn()
        started += one.start()
    one.now = 204.0
    counts = AcceptanceCounts(100, 100, 0)
    one.feed.served([(started[1], SimpleNamespace(counts=counts, wall_s=1.0))])  # type: ignore[list-item]
    assert one.feed.service.expected_s("code", 100) == pytest.approx(3.0 + 1.0)


def test_what_a_job_takes_is_learned_from_the_texts_that_ended() -> None:
    """From its claim: what was claimed ahead waits for its start."""
    one = Feeding(num_ahead=1)
    one.now = 5.0
    one.send("first")
    one.feed.turn()
    (claimed,) = one.start()
    one.now = 19.0
    counts = AcceptanceCounts(100, 100, 0)
    one.feed.served([(claimed, SimpleNamespace(counts=counts, wall_s=10.0))])  # type: ignore[list-item]
    one.end([claimed])
    # 100 tokens took 10 s, after 4 s of waiting; these jobs write up to 8 tokens.
    assert one.feed.service.expected_s("code", 8) == pytest.approx(4.0 + 0.8)
    for job_id, within_s in (("lost", 4.7), ("can", 4.9)):
        one.send(job_id, deadline=(NOW + timedelta(seconds=within_s)).isoformat())
    one.feed.turn()
    assert [started.job_id for started in one.start()] == ["can"]


def test_fewer_jobs_are_claimed_ahead_while_they_are_long() -> None:
    """What is claimed is not overtaken any more."""
    one = Feeding(num_ahead=8)
    for _ in range(2):
        one.feed.service.ended("code", num_tokens=100, wall_s=60.0, ahead_s=0.0)
    one.send(*(f"job-{number}" for number in range(20)))
    one.feed.turn()
    assert len(one.feed.ready) == 5, "four slots are free, and one job starts soon"
    running = one.start(4)
    one.now += 1.0
    one.feed.turn()
    assert len(one.feed.ready) == 1
    one.end(running[:1])
    one.start(1)
    one.now += 1.0
    one.feed.turn()
    assert len(one.feed.ready) == 1
