"""Everything a worker is made of, as the loop sees it; worker/assembly.py puts the real parts together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from alphaloop.store.outbox import OutboxMessage
from alphaloop.store.outcomes import Outcome
from worker.batching import Batcher
from worker.claiming import Claiming
from worker.deciding import Decider
from worker.engine import Engine
from worker.intake import Intake
from worker.leases import LeaseKeeper
from worker.metrics import WorkerMetrics
from worker.publish import Publisher
from worker.validation import ReadyJob, Validation


class Recorder(Protocol):
    """What is needed of alphaloop.store.outcomes.OutcomeStore."""

    def record(self, outcomes: Sequence[Outcome], *, owner: str) -> list[OutboxMessage]: ...


class ClaimRelease(Protocol):
    """What is needed of alphaloop.store.jobs.JobStore."""

    def release(self, attempts: Mapping[str, int], *, owner: str) -> set[str]: ...
    def request_cancel(self, job_id: str) -> None: ...


class UnpublishedResults(Protocol):
    """What is needed of alphaloop.store.outbox.Outbox."""

    def delete(self, ids: Sequence[int]) -> None: ...
    def relay(self, publish: Callable[[Sequence[OutboxMessage]], None], *, older_than_s: float, limit: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts, and the two events that end the loop."""

    owner: str
    group: str
    engine: Engine
    intake: Intake
    validation: Validation
    batcher: Batcher[ReadyJob]
    claiming: Claiming
    decider: Decider
    leases: LeaseKeeper
    recorder: Recorder
    jobs: ClaimRelease
    outbox: UnpublishedResults
    relay_after_s: float  #: recorded results that are unpublished for so long are published by whoever sees them
    publisher: Publisher
    metrics: WorkerMetrics
    max_waiting: int
    stop: threading.Event  #: take nothing new, finish the batch in hand
    hurry: threading.Event  #: give the batch in hand back between two steps
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
