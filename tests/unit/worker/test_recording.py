"""Group commit: what waits shares one transaction, and only what won its record counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.engine import Generation, TokenDelta
from alphaloop.errors import StoreError, StoreUnavailable, StoreValueRefused
from alphaloop.messages import Failure, Status
from alphaloop.store.outcomes import OutboxMessage, Outcome
from tests.fakes import FakeEngine
from tests.fixtures.publishing import (
    NOW,
    VANILLA,
    FinishedDeliveries,
    InstantEvent,
    claimed_job,
    ended_job,
    publishing_queue,
)
from tests.fixtures.turning import ClaimTable
from worker import recording
from worker.background import Retry
from worker.claims import ClaimedJob, LeaseKeeper
from worker.metrics import WorkerMetrics
from worker.publishing import Publication, RecordedGroup
from worker.recording import GATHER_S, MOST_HELD_S, EndedJob, Recorder

WAIT_S = 60.0


class Ledger:
    """Records as OutcomeStore does: an outcome wins where its attempt is the one that holds the claim."""

    def __init__(self) -> None:
        self.transactions: list[list[str]] = []
        self.attempts: dict[str, int] = {}  #: jobs whose claim is at another attempt than the first
        self.errors: list[Exception] = []
        self.untakable: set[str] = set()  #: jobs whose decoded outcome no column holds
        self.untakable_scores: set[str] = set()  #: jobs with evidence that no column holds
        self.before_record: Callable[[], None] = lambda: None
        self._recorded: set[str] = set()

    def record(self, outcomes: Sequence[Outcome]) -> list[OutboxMessage]:
        self.before_record()
        if self.errors:
            raise self.errors.pop(0)
        if any(one.job_id in self.untakable and one.status != "failed" for one in outcomes):
            raise StoreValueRefused("a character that no text may hold")
        if any(one.job_id in self.untakable_scores and one.shadows for one in outcomes):
            raise StoreValueRefused("a number out of range")
        self.transactions.append([outcome.job_id for outcome in outcomes])
        won = []
        for outcome in outcomes:
            held = self.attempts.get(outcome.job_id, 1)
            if outcome.attempt == held and outcome.job_id not in self._recorded:
                self._recorded.add(outcome.job_id)
                key = outcome.job_id.encode()
                won.append(OutboxMessage(len(self._recorded), outcome.topic, key, outcome.result, {}))
        return won


class Recording:
    """A recorder with everything around it. Its pauses pass at once."""

    def __init__(self) -> None:
        self.store, self.hurry, self.now = Ledger(), InstantEvent(), 100.0
        self.leases = LeaseKeeper(ClaimTable(), owner="w", lease_s=30)  # type: ignore[arg-type]
        self.publishing = publishing_queue(self.hurry.is_set)
        self.metrics = WorkerMetrics()
        self.intake = FinishedDeliveries()
        self.recorder = Recorder(
            self.store.record,
            self.intake,  # type: ignore[arg-type]
            self.leases,
            self.publishing,
            self.metrics,
            retry=Retry(self.hurry),
            max_bytes=1 << 20,
            now=lambda: NOW,
            clock=lambda: self.now + sum(self.hurry.waits),
        )

    def record(self, *jobs: EndedJob) -> int:
        self.recorder.put(jobs)
        return self.recorder.turn(0.0)

    def published(self) -> list[Publication]:
        return self.publishing.take_all()


def ended(*job_ids: str, num_bytes: int = 0) -> list[EndedJob]:
    return [ended_job(claimed_job(job_id, offset=int(job_id[1:])), num_bytes=num_bytes) for job_id in job_ids]


def test_jobs_that_end_together_gather_and_one_after_a_lone_job_does_not_wait() -> None:
    one = Recording()
    for number in (1, 2):
        one.record(*ended(f"j{number}"))
        one.now += 0.005
    assert one.hurry.waits == []
    one.record(*ended("j3", "j4"))
    one.now += 0.005
    one.record(*ended("j5"))
    assert one.hurry.waits == [pytest.approx(GATHER_S - 0.005)]
    one.record(*ended("j6"))
    assert len(one.hurry.waits) == 1, "j5 was recorded alone"
    one.record(*ended("j7", "j8"))
    one.now += 1
    one.record(*ended("j9"))
    assert len(one.hurry.waits) == 1
    assert one.store.transactions == [["j1"], ["j2"], ["j3", "j4"], ["j5"], ["j6"], ["j7", "j8"], ["j9"]]


def test_what_waits_shares_one_transaction_and_goes_on_as_one_publication() -> None:
    one = Recording()
    one.leases.hold({"j1": 1, "j2": 1, "j3": 1})
    one.recorder.put(ended("j1"))
    assert one.record(*ended("j2")) == 2
    assert one.store.transactions == [["j1", "j2"]]
    (recorded,) = one.published()
    assert [message.key for message in recorded.messages] == [b"j1", b"j2"]
    assert [delivery.record.offset for delivery in recorded.deliveries] == [1, 2]
    assert (one.leases.holds("j1"), one.leases.holds("j3")) == (False, True)
    assert [outcome.job_id for outcome in one.recorder.take_recorded()] == ["j1", "j2"]
    assert one.recorder.take_recorded() == []
    assert one.recorder.turn(0.0) == 0


def test_the_outcome_of_a_stream_is_recorded_once_its_chunks_are_settled_and_others_do_not_wait() -> None:
    one = Recording()
    claimed = claimed_job("j1", stream=True)
    chunk = claimed.stream.add(TokenDelta("j", "word ", 0), created=0, model="target")
    one.recorder.put([ended_job(claimed)])
    assert one.record(*ended("j2")) == 1
    assert one.store.transactions == [["j2"]]
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(one.recorder.turn, WAIT_S)
        assert turn.result(WAIT_S / 2) == 0, "the recorder looks at what it holds before the idle wait is over"
    assert len(one.recorder) == 1, "a drain waits for it"
    chunk.settle(is_acknowledged=True)
    assert one.recorder.turn(0.0) == 1
    assert one.recorder.turn(0.0) == 0
    assert (one.store.transactions, len(one.recorder)) == ([["j2"], ["j1"]], 0)
    assert unacknowledged(one) == {"j1": None, "j2": None}


@pytest.mark.parametrize("is_hurried", [True, False])
def test_the_outcome_of_a_stream_that_is_never_settled_is_recorded_too(is_hurried: bool) -> None:
    one = Recording()
    claimed = claimed_job("j1", stream=True)
    for _ in range(3):
        chunk = claimed.stream.add(TokenDelta("j", "word ", 0), created=0, model="target")
    chunk.settle(is_acknowledged=True)
    one.recorder.put([cancelled(claimed)])
    assert (one.recorder.turn(0.0), one.store.transactions) == (0, [])
    if is_hurried:
        one.hurry.set()
    else:
        one.now += MOST_HELD_S
    assert (one.recorder.turn(0.0), one.store.transactions) == (1, [["j1"]])
    assert unacknowledged(one) == {"j1": 2}, "the result tells, so that the final chunk has the whole text"


def unacknowledged(one: Recording) -> dict[str, int | None]:
    """What the published results tell of chunks that may be missing, by job."""
    published = [recorded for recorded in one.published() if isinstance(recorded, RecordedGroup)]
    messages = [message for recorded in published for message in recorded.messages]
    return {
        (message.key or b"").decode(): json.loads(message.value).get("num_unacknowledged_chunks")
        for message in messages
    }


def cancelled(claimed: ClaimedJob) -> EndedJob:
    """The job with a real result."""
    return recording.ended(claimed, Status.CANCELLED, Failure(code="c", message="told"), now=NOW)


def test_a_group_is_bounded_in_count_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_AT_ONCE", 3)
    monkeypatch.setattr(recording, "MOST_BYTES_AT_ONCE", 1000)
    one = Recording()
    one.recorder.put(ended("j1", "j2", "j3", "j4"))
    one.recorder.put(ended("j5", "j6", num_bytes=950))
    while one.recorder.turn(0.0):
        pass
    assert one.store.transactions == [["j1", "j2", "j3"], ["j4"], ["j5"], ["j6"]]


def test_an_outcome_whose_claim_was_lost_is_dropped_and_its_delivery_still_finished() -> None:
    one = Recording()
    one.store.attempts = {"j2": 2}
    assert one.record(*ended("j1", "j2")) == 1
    (recorded,) = one.published()
    assert [message.key for message in recorded.messages] == [b"j1"]
    assert [delivery.record.offset for delivery in recorded.deliveries] == [1, 2]
    assert [outcome.job_id for outcome in one.recorder.take_recorded()] == ["j1"]
    assert one.metrics.registry.get_sample_value("alphaloop_outcomes_fenced_total") == 1.0


def test_of_two_attempts_of_one_job_in_a_group_one_counts() -> None:
    one = Recording()
    one.store.attempts = {"j1": 2}
    assert one.record(*(ended_job(claimed_job("j1", attempt=attempt)) for attempt in (1, 2))) == 1
    assert [outcome.attempt for outcome in one.recorder.take_recorded()] == [2]
    assert one.metrics.registry.get_sample_value("alphaloop_outcomes_fenced_total") == 1.0


def test_a_database_that_is_away_is_waited_for_with_the_leases_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.background.FIRST_WAIT_S", 0.0)
    one = Recording()
    one.leases.hold({"j1": 1})
    held_while_away = []
    one.store.before_record = lambda: held_while_away.append(one.leases.holds("j1"))
    one.store.errors = [StoreUnavailable(), StoreUnavailable()]
    assert one.record(*ended("j1")) == 1
    assert held_while_away == [True, True, True]
    assert len(one.published()) == 1


def test_an_outcome_that_postgres_does_not_take_becomes_a_failure_and_stops_no_other() -> None:
    one = Recording()
    one.store.untakable = {"j2"}
    assert one.record(*ended("j1", "j2", "j3")) == 3
    assert one.store.transactions == [["j1"], ["j2"], ["j3"]]
    (recorded,) = one.published()
    results = {(message.key or b"").decode(): json.loads(message.value) for message in recorded.messages}
    assert results["j2"]["error"]["code"] == "outcome_refused"
    assert [delivery.record.offset for delivery in recorded.deliveries] == [1, 2, 3]
    assert one.metrics.registry.get_sample_value("alphaloop_outcomes_fenced_total") == 0.0


def test_what_postgres_does_not_take_of_scores_costs_the_score_and_not_the_job() -> None:
    one = Recording()
    one.store.untakable_scores = {"j2"}
    waiting = ended("j1", "j2", "j3")
    scored: Any = (object(),)
    assert one.record(*(replace(job, outcome=replace(job.outcome, shadows=scored)) for job in waiting)) == 3
    (recorded,) = one.published()
    assert [message.value for message in recorded.messages] == [job.outcome.result for job in waiting]
    recorded_shadows = {outcome.job_id: outcome.shadows for outcome in one.recorder.take_recorded()}
    assert recorded_shadows == {"j1": scored, "j2": (), "j3": scored}


@pytest.mark.parametrize(("error", "is_hurried"), [(StoreUnavailable(), True), (StoreError("refused"), False)])
def test_what_cannot_be_recorded_ends_the_thread_and_publishes_nothing(error: StoreError, is_hurried: bool) -> None:
    one = Recording()
    one.leases.hold({"j1": 1})
    if is_hurried:
        one.hurry.set()
    one.store.errors = [error]
    with pytest.raises(type(error)):
        one.record(*ended("j1"))
    assert one.published() == []
    assert one.recorder.take_recorded() == []
    assert one.leases.holds("j1")


def test_what_is_held_is_bounded_in_count_and_in_bytes_and_the_oldest_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "MOST_HELD", 3)
    monkeypatch.setattr(recording, "MOST_HELD_BYTES", 1000)

    def recorded(*sizes: int) -> list[str]:
        """What is recorded at once of jobs with results of these sizes, none of whose streams are settled."""
        one = Recording()
        claims = [claimed_job(f"j{number}", stream=True) for number in range(len(sizes))]
        for claimed in claims:
            claimed.stream.add(TokenDelta("j", "word ", 0), created=0, model="target")
        jobs = [cancelled(claimed) for claimed in claims]
        padded = [(job, job.outcome.result.ljust(size)) for job, size in zip(jobs, sizes, strict=True)]
        one.record(*(replace(job, outcome=replace(job.outcome, result=result)) for job, result in padded))
        assert len(one.recorder) >= len(sizes), "what is in hand is not recorded yet"
        return [job_id for group in one.store.transactions for job_id in group]

    assert recorded(300, 300, 300) == []
    assert recorded(300, 300, 300, 300) == ["j0"]
    assert recorded(500, 500, 500) == ["j0"]
    assert recorded(2000) == [], "one is held whatever its size"


def test_a_run_says_how_many_texts_its_job_has() -> None:
    job = claimed_job("j1", value=b'{"job_id": "j1", "body": {"prompt": "a", "n": 3, "temperature": 1}}')
    made = Generation("j1", "", (), "length", 4, AcceptanceCounts(9, 9), 0.1, 1.0, 1.0, 3)
    outcome = recording.succeeded(job, made, VANILLA, FakeEngine().identity, queue_s=0.0, now=NOW)
    assert outcome.run is not None
    assert outcome.run.num_texts == 3
