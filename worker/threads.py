"""The threads of a worker beside its loop: started, watched and ended together; and how all share the interpreter."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from alphaloop.liveness import Liveness, Pulse
from worker.background import BackgroundThread
from worker.intake.polling import Intake

if TYPE_CHECKING:
    from worker.tracing import Tracing

#: New objects, less those that went, between two searches of the young ones: a few hundred jobs' worth.
NUM_NEW_OBJECTS: Final = 50_000
#: Searches of one generation between two of the next older one; Python's own numbers.
_SEARCHES: Final = (10, 10)
#: With 1 ms the worker takes a quarter more processor time for a short job than with 5, with 20 some 7 % less; with 100
#: it is as fast as with 20.
TURN_S: Final = 0.02
#: A thread beside the engine that does not move for so long hangs: the process ends, and other workers take its jobs.
MAX_SILENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Threads:
    """Every thread of a worker but the loop's, and the pulses that tell whether each still moves."""

    neighbours: tuple[BackgroundThread, ...]  #: that work on jobs, in the order of a job's way
    keepers: tuple[BackgroundThread, ...]  #: that end last: of leases, and of what other processes change
    intakes: tuple[Intake, ...]
    tracing: Tracing | None  #: None where no traces are made
    liveness: Liveness  #: of every thread, and of the loop's steps
    loop_pulse: Pulse

    def __post_init__(self) -> None:
        for thread in self._all():
            self.liveness.watch(thread.pulse, MAX_SILENCE_S)

    def start(self) -> None:
        """Start every thread; consuming begins."""
        started: tuple[BackgroundThread | Intake, ...] = (*self.keepers, *self.intakes, *self.neighbours)
        for one in started:
            one.start()

    def unhealthy(self) -> str | None:
        """Which thread ended by itself, or hangs, in words; None while all is well. Any thread may ask."""
        for thread in self._all():
            if thread.failure is not None:
                return f"the thread {thread.name} ended: {thread.failure.message}"
        return self.liveness.hung()

    def check(self) -> None:
        """Raise the exception that ended a thread; that of an intake comes out of the feed."""
        for thread in (*self.neighbours, *self.keepers):
            thread.check()

    def end(self, name: str, timeout_s: float) -> None:
        """End the thread of this name after its turn in hand."""
        for thread in self._all():
            if thread.name == name:
                thread.end(timeout_s)

    def end_neighbours(self, timeout_s: float = 10.0) -> None:
        """End the neighbours after their turn in hand."""
        _end(self.neighbours, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End all: commit what is finished, leave the group."""
        self.end_neighbours(timeout_s)
        for intake in self.intakes:
            intake.stop_taking()
        _end([intake.thread for intake in self.intakes], timeout_s)
        _end(self.keepers, timeout_s)
        if self.tracing is not None:
            self.tracing.close()

    def _all(self) -> tuple[BackgroundThread, ...]:
        return (*self.neighbours, *(intake.thread for intake in self.intakes), *self.keepers)


def _end(threads: Sequence[BackgroundThread], timeout_s: float) -> None:
    """All are asked to end before one is waited for, because each idle one takes a while to look."""
    for seconds in (0.0, timeout_s):
        for thread in threads:
            thread.end(seconds)


def set_up_interpreter() -> None:
    """Search for cycles of objects seldom, and let a thread keep the interpreter for longer.

    The objects of a job form no cycles, so they go when the last reference to them goes. Only rare objects form cycles,
    such as exceptions with their frames. Python searches after every 700 new objects unless told otherwise, and so
    looks at all jobs that wait and run again and again: a fifth of the processor time of a worker with short jobs. What
    there is now is never searched again, because models, kernels and modules stay with the process; a full search that
    looks at those takes .3 s.

    A thread that computes gives the interpreter to a waiting one after 5 ms unless told otherwise. Each change costs
    both threads what the processor's caches hold of their data. The neighbours of the loop wait for servers most of the
    time, so their turns end by themselves, nearly always within a few milliseconds; only with a backlog of short jobs
    they do not.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NUM_NEW_OBJECTS, *_SEARCHES)
    sys.setswitchinterval(TURN_S)
