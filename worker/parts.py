"""Everything a worker is made of, as the loop sees it; worker/assembly.py puts the real parts together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from alphaloop.store.jobs import JobStore
from alphaloop.store.outbox import Outbox
from alphaloop.store.outcomes import OutcomeStore
from worker.batching import Batcher
from worker.claiming import Claiming
from worker.costs import LiveCosts
from worker.deciding import Decider
from worker.engine import Engine
from worker.intake import Intake
from worker.leases import LeaseKeeper
from worker.metrics import WorkerMetrics
from worker.publish import Publisher
from worker.remembered import Remembered
from worker.validation import ReadyJob, Validation
from worker.watch import Watch


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
    remembered: Remembered
    watch: Watch
    costs: LiveCosts
    leases: LeaseKeeper
    recorder: OutcomeStore
    jobs: JobStore
    outbox: Outbox
    relay_after_s: float  #: recorded results that are unpublished for so long are published by whoever sees them
    publisher: Publisher
    metrics: WorkerMetrics
    max_waiting: int
    stop: threading.Event  #: take nothing new, finish the batch in hand
    hurry: threading.Event  #: give the batch in hand back between two steps
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
