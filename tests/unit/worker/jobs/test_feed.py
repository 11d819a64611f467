"""From deliveries to claimed jobs: read, put in order, claimed ahead of need, and each accounted for once."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pytest

from alphaloop.errors import BrokerError, StoreUnavailable, StoreValueRefused
from alphaloop.messages import Job
from alphaloop.store.jobs import Claim, ClaimRequest, ClaimState
from tests.fakes import FakeEngine
from tests.fixtures.claimed import NOW, FinishedDeliveries, delivery, validation
from worker.engine import PreparedJob, Sampling
from worker.intake.buffer import Room
from worker.intake.polling import Delivery
from worker.jobs.admission import AdmissionQueue
from worker.jobs.ahead import AHEAD_S
from worker.jobs.claiming import ClaimedJob, Claiming
from worker.jobs.feed import JobFeed
from worker.jobs.leases import LeaseKeeper
from worker.jobs.letters import DeadMessage
from worker.jobs.publications import AnswerAgain, Publication, PublishingQueue
from worker.jobs.recording import EndedJob
from worker.retry import Retry

SUSPECT_DELAY_S = 5.0


class Buffer(FinishedDeliveries):
    """An intake that hands out what the test puts in; partitions are revoked by changing the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[Delivery] = deque()
        self.failure: Exception | None = None
        self.assignment_number = 1
        self.epoch = 1
        self.num_wakes = 0

    def take(self, limit: int, timeout_s: float, *, max_bytes: int, high: Room) -> list[Delivery]:
        if self.failure:
            raise self.failure
        taken: list[Delivery] = []
        while self.waiting and len(taken) < limit and max_bytes > 0:
            taken.append(self.waiting.popleft())
            max_bytes -= taken[-1].num_bytes
        return taken

    def is_current(self, one: Delivery) -> bool:
        return one.epoch == self.epoch

    def revoke(self) -> None:
        self.epoch, self.assignment_number = self.epoch + 1, self.assignment_number + 1

    def wake(self) -> None:
        self.num_wakes += 1


class ClaimTable:
    """Claims as JobStore gives them: `found` says what is known of a job, everything else is claimed."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.released: list[dict[str, int]] = []
        self.found: dict[str, Claim] = {}
        self.errors: list[Exception] = []
        self.untakable: set[str] = set()  #: jobs with a field that no column holds

    def claim(
        self, requests: Sequence[ClaimRequest], *, owner: str, lease_s: float, max_attempts: int, alone: bool
    ) -> list[Claim]:
        if self.errors:
            raise self.errors.pop(0)
        if self.untakable & {request.job_id for request in requests}:
            raise StoreValueRefused("too long")
        self.calls.append([request.job_id for request in requests])
        claimed = ClaimState.CLAIMED
        answers = [self.found.get(r.job_id, Claim(r.job_id, claimed, attempt=1)) for r in requests]
        return [
            replace(one, state=ClaimState.SUSPECT) if one.state is claimed and one.num_crashes and not alone else one
            for one in answers
        ]

    def release(self, attempts: Mapping[str, int], *, owner: str) -> set[str]:
        if self.errors:
            raise self.errors.pop(0)
        self.released.append(dict(attempts))
        return set(attempts)

    def renew(self, attempts: Mapping[str, int], *, owner: str, lease_s: float) -> set[str]:
        return set(attempts)

    def cancelled(self, job_ids: Collection[str]) -> set[str]:
        return set()


class Ended:
    """The recorder's side that the feed sees."""

    def __init__(self) -> None:
        self.ended: list[EndedJob] = []

    def put(self, ended: Sequence[EndedJob]) -> None:
        self.ended += ended


class RefusedMessages:
    """The thread of dead letters, which publishes nothing here."""

    def __init__(self) -> None:
        self.taken: list[DeadMessage] = []

    def put(self, *refused: DeadMessage) -> None:
        self.taken += refused


class Feeding:
    """A feed with everything around it, driven by hand."""

    def __init__(
        self,
        *,
        num_ahead: int = 2,
        max_waiting: int = 100,
        max_bytes: int = 1 << 20,
        engine: FakeEngine | None = None,
        most_slack_s: float = 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self.intake, self.table, self.recorder = Buffer(), ClaimTable(), Ended()
        self.now, self.hurry = 0.0, InstantEvent()
        self.leases = LeaseKeeper(self.table, owner="w", lease_s=30)
        self.refused = RefusedMessages()
        self.publishing = PublishingQueue(max_items=100, max_bytes=1 << 20, is_hurried=lambda: False)
        self.feed = JobFeed(
            self.intake,  # type: ignore[arg-type]
            validation(engine),
            AdmissionQueue(measured_batch=4, read_s=lambda num_tokens: num_tokens / 100, most_slack_s=most_slack_s),
            Claiming(self.table, owner="w", lease_s=30, max_attempts=3),  # type: ignore[arg-type]
            self.leases,
            self.publishing,
            self.refused,  # type: ignore[arg-type]
            self.recorder,  # type: ignore[arg-type]
            retry=Retry(self.hurry),
            is_ending=lambda: True,
            num_ahead=num_ahead,
            max_waiting=max_waiting,
            max_waiting_bytes=max_bytes,
            clock=lambda: self.now,
            now=lambda: NOW,
            rng=rng or random.Random(20261123),
            suspect_delay_s=SUSPECT_DELAY_S,
        )

    def send(self, *job_ids: str, **given: object) -> None:
        for job_id in job_ids:
            self.intake.waiting.append(delivery(job_id, **given))  # type: ignore[arg-type]

    def start(self, number: int = 1) -> list[ClaimedJob]:
        """What the loop does when slots become free."""
        taken = self.feed.ready.take(number, 0.0)
        self.feed.started()
        return taken

    def end(self, claimed: Sequence[ClaimedJob]) -> None:
        """What the loop and the recorder do when jobs have ended."""
        self.leases.let_go(one.job_id for one in claimed)
        self.feed.ended([one.ready.lane for one in claimed])

    def published(self) -> list[Publication]:
        return self.publishing.take(0.0)

    def decode_all(self) -> list[str]:
        """Turn until nothing more comes; the jobs in the order in which the loop gets them."""
        order: list[str] = []
        while True:
            self.feed.turn()
            taken = self.start()
            if not taken:
                return order
            order += [one.job_id for one in taken]
            self.end(taken)


class InstantEvent(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


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


def test_claims_wait_until_half_of_those_ahead_are_used_up() -> None:
    one = Feeding(num_ahead=4)
    one.send(*"abcdefgh")
    claimed = []
    for _ in range(4):
        one.feed.turn()
        claimed.append(one.table.calls[-1])
        assert len(one.feed.ready.take(1, 0.0)) == 1
        one.feed.started()
        one.now += AHEAD_S + 0.01
    assert claimed == [["a", "b", "c", "d"], ["a", "b", "c", "d"], ["e", "f"], ["e", "f"]]


def test_jobs_that_start_quickly_are_claimed_further_ahead() -> None:
    """Claims of two jobs each would take a transaction for every two jobs."""
    one = Feeding(num_ahead=2, max_waiting=1000)
    one.send(*(f"job-{number:03d}" for number in range(100)))
    sizes = []
    for _ in range(6):
        one.feed.turn()
        sizes.append(len(one.table.calls[-1]))
        one.feed.ready.take_all()
        one.now += AHEAD_S / 4
    assert sizes == [2, 2, 4, 8, 16, 30]


def test_the_loop_gets_jobs_by_priority_and_then_by_arrival() -> None:
    one = Feeding(num_ahead=1)
    one.feed.turn()
    one.send("low", priority=0)
    one.send("first", "second", priority=5)
    assert one.decode_all() == ["first", "second", "low"]


def test_a_job_whose_prompt_begins_like_a_running_jobs_goes_first() -> None:
    one = Feeding(num_ahead=1, most_slack_s=10.0)
    texts = {"a": "red " * 70, "b": "blue " * 70}
    for job_id, text in (("a1", "a"), ("b1", "b"), ("b2", "b"), ("a2", "a")):
        one.send(job_id, prompt=texts[text] + job_id)
    order = []
    for _ in range(4):
        one.feed.turn()
        order += [started.job_id for started in one.start()]
    assert order == ["a1", "a2", "b1", "b2"]


def test_every_job_reaches_the_loop_once_and_the_books_are_empty_afterwards() -> None:
    one = Feeding(num_ahead=3)
    names = [f"job-{number}" for number in range(20)]
    one.send(*names)
    assert sorted(one.decode_all()) == sorted(names)
    assert (one.feed.num_waiting, one.feed.waiting()) == (0, {})
    assert +one.feed._line._taken == {}


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
    told = [
        (refused.delivery.record.offset, refused.reason.code, refused.reason.message) for refused in one.refused.taken
    ]
    assert [(offset, code) for offset, code, _ in told] == [(1, "malformed_message"), (2, "malformed_message")]
    assert told[1][2] == "could not be read: ZeroDivisionError"
    assert [claimed.job_id for claimed in one.start(9)] == ["good"]


def test_a_dead_consumer_ends_the_thread() -> None:
    one = Feeding()
    one.intake.failure = BrokerError("no permission")
    with pytest.raises(BrokerError):
        one.feed.turn()


def test_a_job_that_postgres_does_not_take_is_refused_and_stops_no_other() -> None:
    one = Feeding(num_ahead=9)
    one.table.untakable = {"b"}
    one.send("a", "b", "c")
    one.feed.turn()
    assert [dead.reason.code for dead in one.refused.taken] == ["malformed_message"]
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
    again = [(p.job_id, p.outcome) for p in one.published() if isinstance(p, AnswerAgain)]
    refused = [told.reason.code for told in one.refused.taken]
    assert (again, refused) == ([("recorded", b"the bytes")], ["job_conflict"])
    assert [(e.claimed.job_id, e.outcome.status) for e in one.recorder.ended] == [
        ("cancelled", "cancelled"),
        ("exhausted", "failed"),
    ]
    assert [one.leases.holds(job_id) for job_id in ("cancelled", "exhausted", "fresh")] == [True] * 3
    fresh = one.start(9)
    assert [claimed.job_id for claimed in fresh] == ["fresh"]
    one.end(fresh)
    assert +one.feed._line._taken == {}, "what needs no decoding holds no place"


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
    assert [type(publication) for publication in one.published()] == [AnswerAgain]
    assert one.feed.num_waiting == 0


def test_jobs_of_a_revoked_partition_are_the_other_workers_unless_claimed() -> None:
    one = Feeding(num_ahead=1)
    one.table.found = {"held": Claim("held", ClaimState.HELD, 1, held_for_s=5.0)}
    one.send("held")
    one.feed.turn()
    one.send("claimed", "waiting")
    one.feed.turn()
    assert one.feed.num_waiting == 3
    one.intake.revoke()
    one.feed.turn()
    assert one.feed.num_waiting == 1
    one.now = 100.0
    assert one.decode_all() == ["claimed"]
    assert one.table.calls == [["held"], ["claimed"]]


def test_a_database_that_is_away_is_waited_for() -> None:
    one = Feeding()
    one.table.errors = [StoreUnavailable(), StoreUnavailable()]
    one.send("a")
    one.feed.turn()
    assert one.table.calls == [["a"]]
    one.hurry.set()
    one.table.errors = [StoreUnavailable()]
    one.send("b")
    with pytest.raises(StoreUnavailable):
        one.feed.turn()


@pytest.mark.parametrize("bounds", [{"max_waiting": 3}, {"max_bytes": 3000}], ids=["count", "bytes"])
def test_what_waits_unclaimed_is_bounded_in_count_and_in_bytes(bounds: dict[str, int]) -> None:
    one = Feeding(num_ahead=1, **bounds)
    one.table.found = {"held": Claim("held", ClaimState.HELD, 1, held_for_s=5.0)}
    one.send("held")
    one.send(*(f"job-{number}" for number in range(50)))
    most, most_bytes = 0, 0
    for _ in range(10):
        one.feed.turn()
        most = max(most, one.feed.num_waiting - len(one.feed.ready))
        most_bytes = max(most_bytes, one.feed._line._queue.num_bytes + one.feed._held.num_bytes)
    assert most == 3
    if "max_bytes" in bounds:
        size = one.feed._held.num_bytes
        assert bounds["max_bytes"] < most_bytes <= bounds["max_bytes"] + size, "one job past the bound, and no more"
    one.now = 100.0
    one.table.found = {}
    assert len(one.decode_all()) == 51


def test_jobs_are_claimed_between_prompts_that_take_long_to_read() -> None:
    class Slow(FakeEngine):
        def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
            one.now += 3.0
            return super().prepare(job, sampling)

    one = Feeding(num_ahead=2, engine=Slow())
    one.send("a", "b", "c")
    one.feed.turn()
    assert [claimed.job_id for claimed in one.start(9)] == ["a"], "the device does not wait for the other prompts"
    assert one.feed.num_waiting == 2
    assert one.decode_all() == ["b", "c"]


def test_unread_messages_of_a_revoked_partition_are_the_other_workers() -> None:
    class Slow(FakeEngine):
        def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
            one.now += 3.0
            return super().prepare(job, sampling)

    one = Feeding(num_ahead=1, engine=Slow())
    one.send("a", "b", "c")
    one.feed.turn()
    one.intake.revoke()
    one.feed.turn()
    assert one.feed.num_waiting == len(one.feed.ready) == 1


def test_tasks_share_the_device_by_its_time_and_not_by_who_came_first() -> None:
    one = Feeding(num_ahead=1)
    one.send(*(f"code-{number}" for number in range(30)))
    one.feed.turn()
    one.send(*(f"sql-{number}" for number in range(10)), task="sql")
    order: list[str] = []
    for _ in range(20):
        one.feed.turn()
        (job,) = one.start()
        order.append(job.ready.lane.task)
        one.feed.charge({job.ready.lane.task: 1.0})
        one.end([job])
    assert 8 <= order.count("sql") <= 10, "a backlog of one task keeps no other waiting"
    assert "sql" in order[:5]


def test_a_job_of_low_priority_is_served_against_an_endless_stream_of_a_higher_one() -> None:
    one = Feeding(num_ahead=1)
    one.send("low", priority=0)
    order: list[str] = []
    while "low" not in order:
        assert len(order) < 100, "it starves"
        one.send(f"high-{len(order)}", f"high-too-{len(order)}", priority=1)
        one.feed.turn()
        started = one.start()
        order += [job.job_id for job in started]
        one.end(started)
        one.now += 1.0
    # 10 s of waiting are worth one step: it goes before what came 10 s after it, and twice as many come as are served.
    assert 10 <= len(order) <= 25


def test_the_scrape_may_ask_for_what_waits_while_the_feed_turns() -> None:
    """The metrics are read from another thread; no task may come or go under its count."""
    one = Feeding(num_ahead=1)
    failures: list[Exception] = []
    is_over = threading.Event()

    def scrape() -> None:
        try:
            while not is_over.is_set():
                assert one.feed.num_waiting >= 0
                assert one.feed.waiting() is not None
        except Exception as error:
            failures.append(error)

    scraper = threading.Thread(target=scrape)
    scraper.start()
    for number in range(300):
        one.send(f"a{number}", task="code")
        one.send(f"b{number}", task="sql")
        one.feed.turn()
        one.end(one.start(9))
    is_over.set()
    scraper.join(10)
    assert failures == []


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
