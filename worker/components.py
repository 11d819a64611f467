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
from worker.costs.live import LiveCosts
from worker.deciding.decider import Decider
from worker.deciding.evidence_cache import EvidenceCache
from worker.deciding.watch import Watch
from worker.engine import Engine
from worker.intake.polling import Intake
from worker.intake.validation import ReadyJob, Validation
from worker.jobs.batching import Batcher
from worker.jobs.claiming import Claiming
from worker.jobs.leases import LeaseKeeper
from worker.jobs.publishing import Publisher
from worker.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class Components:
    """The parts, and the two events that end the loop."""

    owner: str
    group: str
    engine: Engine
    intake: Intake
    validation: Validation
    batcher: Batcher[ReadyJob]
    claiming: Claiming
    decider: Decider
    evidence_cache: EvidenceCache
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
