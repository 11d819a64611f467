"""Everything a worker is made of, as the loop sees it; worker/assembly.py puts the real components together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from alphaloop.errors import WorkerThreadDied
from alphaloop.liveness import Liveness, Pulse
from worker.background import BackgroundThread, BackgroundWrites
from worker.claims import Claiming, LeaseKeeper
from worker.costs.known import KnownCosts
from worker.deciding.decider import Decider
from worker.deciding.evidence_cache import EvidenceCache
from worker.deciding.watch import Watch
from worker.engine import Engine
from worker.feed import JobFeed
from worker.intake.control import ControlReader
from worker.intake.polling import Intake
from worker.intake.validation import Validation
from worker.jobs.forwarding import Forwarder
from worker.jobs.publications import PublishingQueue
from worker.jobs.publishing import Publisher
from worker.jobs.recording import Recorder
from worker.jobs.retries import JobRetries
from worker.jobs.steering import Steering, TaskSlice
from worker.jobs.unavailable_topics import UnavailableTopics
from worker.metrics import WorkerMetrics
from worker.presence import Presence
from worker.retry import Retry
from worker.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Components:
    """The components, their threads, and the two events that end the loop."""

    owner: str
    engine: Engine
    intake: Intake
    control_intake: Intake
    validation: Validation
    feed: JobFeed
    claiming: Claiming
    decider: Decider
    evidence_cache: EvidenceCache
    watch: Watch
    costs: KnownCosts
    leases: LeaseKeeper
    steering: Steering
    presence: Presence
    recorder: Recorder
    publishing: PublishingQueue
    publisher: Publisher
    topics: UnavailableTopics
    forwarder: Forwarder
    control_reader: ControlReader
    metrics: WorkerMetrics
    retry: Retry
    background: BackgroundWrites
    store_slices: Callable[[Sequence[TaskSlice]], None]
    store_decisions: Callable[[], None]
    retries: JobRetries
    feed_thread: BackgroundThread
    retries_thread: BackgroundThread
    recording_thread: BackgroundThread
    publishing_thread: BackgroundThread
    forwarding_thread: BackgroundThread
    control_thread: BackgroundThread
    background_thread: BackgroundThread
    stop: threading.Event  #: take nothing new, finish what runs
    hurry: threading.Event  #: give back what runs, between two rounds
    liveness: Liveness  #: of every thread, and of the loop's steps
    loop_pulse: Pulse
    tracing: Tracing | None  #: None where no traces are made
    drain_s: float  #: most time for what is left to do at the end
    now: Callable[[], datetime]  #: the time of day by the database
    clock: Callable[[], float] = time.monotonic

    @property
    def neighbours(self) -> tuple[BackgroundThread, ...]:
        """The threads beside the loop, in the order of a job's way."""
        return (
            self.control_thread,
            self.feed_thread,
            self.retries_thread,
            self.recording_thread,
            self.publishing_thread,
            self.forwarding_thread,
            self.background_thread,
        )

    @property
    def num_unpublished(self) -> int:
        """Outcomes and messages that the neighbours still have in hand."""
        return len(self.retries) + len(self.recorder) + len(self.publishing) + len(self.forwarder)

    def start(self) -> None:
        """Start every thread; consuming begins."""
        self.leases.start()
        self.watch.start()
        self.intake.start()
        self.control_intake.start()
        for neighbour in self.neighbours:
            neighbour.start()

    @property
    def thread_pulses(self) -> tuple[Pulse, ...]:
        """Of every thread beside the loop."""
        neighbours = [neighbour.pulse for neighbour in self.neighbours]
        return (*neighbours, self.intake.pulse, self.control_intake.pulse, self.leases.pulse, self.watch.pulse)

    def died(self) -> str | None:
        """Which thread ended by itself, in words; None while all live."""
        for neighbour in self.neighbours:
            if neighbour.failure is not None:
                return f"the thread {neighbour.name} ended: {neighbour.failure.message}"
        for intake in (self.intake, self.control_intake):
            if intake.failure is not None:
                return f"a polling thread ended: {intake.failure.message}"
        for name, thread in (("leases", self.leases), ("watch", self.watch)):
            if thread.has_died:
                return f"the thread {name} ended"
        return None

    def check(self) -> None:
        """Raise the exception that ended a thread."""
        for neighbour in self.neighbours:
            neighbour.check()
        for name, thread in (("leases", self.leases), ("watch", self.watch)):
            if thread.has_died:
                raise WorkerThreadDied(f"the thread {name} ended")

    def end_neighbours(self, timeout_s: float = 10.0) -> None:
        """End the threads beside the loop after their turn in hand."""
        for neighbour in self.neighbours:
            neighbour.end(timeout_s)

    def close(self, timeout_s: float) -> None:
        """End everything: commit what is finished, leave the group. May be called at any time.

        Whatever a thread still waits for, room or a server, it gives up.
        """
        self.stop.set()
        self.hurry.set()
        self.end_neighbours(timeout_s)
        for intake in (self.control_intake, self.intake):
            intake.stop_taking()
            intake.close(timeout_s)
        self.forwarder.close()
        self.leases.close()
        self.watch.close()
        if self.tracing is not None:
            self.tracing.close()
