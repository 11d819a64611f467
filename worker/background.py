"""Threads beside the loop, queues between them, what waits for a server, and writes that may be lost.

Every part of the worker that waits for Kafka, Postgres or a broker turns in a `BackgroundThread`, so that the loop
never waits for them. What one thread hands to another goes through a `BoundedQueue`, so that a slow thread holds up the
one before it and does not fill the memory. `BackgroundWrites` is for what no job depends on: measured costs, changes of
a choice, slices of the experiment, what decisions were taken from. Outcomes of jobs take another way
(worker/recording.py). `Retry` is how all of them wait for a server that is away. `Threads` starts, watches and ends the
threads of a worker together, and `set_up_interpreter` says how all of them share the interpreter.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

from alphaloop.errors import (
    AlphaloopError,
    BrokerUnavailable,
    ContentStoreUnavailable,
    DeliveryFailed,
    StoreError,
    StoreUnavailable,
    TopicUnavailable,
    WorkerThreadDied,
    reason_of,
)
from alphaloop.liveness import Liveness, Pulse, beat

if TYPE_CHECKING:
    from worker.intake.polling import Intake
    from worker.tracing import Tracing

log = logging.getLogger(__name__)

Item = TypeVar("Item")

#: Takes a write and what to call it in the log.
Write: TypeAlias = Callable[[str, Callable[[], object]], object]

_MOST_WRITES: Final = 1000
_IDLE_WAIT_S: Final = 0.2
_ROOM_WAIT_S: Final = 0.1


@dataclass(eq=False)
class BackgroundThread:
    """Calls `turn` in a thread of its own until `end` is called.

    `turn` returns within about a second, because it waits for its work with a timeout. An exception ends the thread;
    `check` raises it in the caller's thread, and `on_failure` wakes threads that wait for this one's work. However it
    ends, `at_end` is its last call.

    The thread waits `every_s` seconds before each turn.
    """

    name: str
    turn: Callable[[], object]
    _: KW_ONLY
    every_s: float = 0.0
    on_failure: Callable[[], None] = lambda: None
    at_end: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.pulse = Pulse(f"the thread {self.name}")
        self.failure: AlphaloopError | None = None  #: the exception that ended the thread
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self.pulse.around(self._run), name=self.name, daemon=True)

    def start(self) -> None:
        """Begin to turn."""
        self._thread.start()

    @property
    def is_ending(self) -> bool:
        """Whether the turn in hand is the last one."""
        return self._is_ending.is_set()

    def check(self) -> None:
        """Raise the exception that ended the thread."""
        if self.failure is not None:
            raise self.failure

    def end(self, timeout_s: float) -> bool:
        """Let the turn in hand be the last one; whether the thread ended within `timeout_s`."""
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_ending.wait(self.every_s):
                self.pulse.beat()
                self.turn()
        except Exception as error:
            if isinstance(error, AlphaloopError):
                self.failure = error
            else:
                log.exception("the thread %s ended", self.name, extra={"action": "thread_died"})
                self.failure = WorkerThreadDied(f"the thread {self.name} ended: {reason_of(error)}")
            self.on_failure()
        finally:
            self.at_end()


@dataclass(eq=False)
class BoundedQueue(Generic[Item]):
    """First in, first out, bounded in count and in bytes: a full queue makes its producer wait, until it gives up.

    An item larger than `max_bytes` is added only while the queue is empty. A producer that must not wait gives up at
    once, and asks `num_free` before it fetches more.
    """

    _: KW_ONLY
    max_items: int
    max_bytes: int
    num_bytes_of: Callable[[Item], int]
    give_up: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._items: deque[Item] = deque()
        self._num_bytes = 0
        self._num_in_hand = 0
        self._changed = threading.Condition()
        self._is_woken = False
        self._is_open = True

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        """Bytes of the items that wait."""
        return self._num_bytes

    @property
    def num_unsettled(self) -> int:
        """Items that wait, and those of the last `take`, which count as settled at the next `take`."""
        with self._changed:
            return len(self._items) + self._num_in_hand

    @property
    def num_free(self) -> int:
        """Items for which there is room; 0 where the bytes are used up."""
        with self._changed:
            is_full = bool(self._items) and self._num_bytes >= self.max_bytes
            return 0 if is_full else max(0, self.max_items - len(self._items))

    @property
    def is_half_free(self) -> bool:
        """Whether at most half of the items and of the bytes are used."""
        return len(self._items) <= self.max_items // 2 and self._num_bytes <= self.max_bytes // 2

    def num_fitting(self, most_bytes: int) -> int:
        """How many more items of at most `most_bytes` bytes each surely fit."""
        room_bytes = self.max_bytes - self._num_bytes
        return max(0, min(self.max_items - len(self._items), room_bytes // most_bytes))

    def put(self, items: Iterable[Item]) -> None:
        """Add items in their order, waiting for room; the rest is added at once when the producer gives up.

        The taking thread is woken when no more fit or all are added, so that items put together can be taken together.
        """
        with self._changed:
            if not self._is_open:
                return
            num_added = 0
            for item in items:
                num_bytes = self.num_bytes_of(item)
                while not self._fits(num_bytes) and not self.give_up():
                    if num_added:
                        self._changed.notify_all()
                    beat()
                    self._changed.wait(_ROOM_WAIT_S)
                self._items.append(item)
                self._num_bytes += num_bytes
                num_added += 1
            if num_added:
                self._changed.notify_all()

    def take(self, limit: int, timeout_s: float, *, max_bytes: int | None = None) -> list[Item]:
        """Up to `limit` items, as far as `max_bytes` allow, one at least; waits up to `timeout_s` for the first."""
        with self._changed:
            self._num_in_hand = 0
            self._changed.wait_for(lambda: (self._items and limit > 0) or self._is_woken, timeout_s)
            self._is_woken = False
            taken: list[Item] = []
            num_bytes = 0
            while self._items and len(taken) < limit:
                size = self.num_bytes_of(self._items[0])
                if taken and max_bytes is not None and num_bytes + size > max_bytes:
                    break
                num_bytes += size
                taken.append(self._items.popleft())
            self._num_bytes -= num_bytes
            self._num_in_hand = len(taken)
            if taken:
                self._changed.notify_all()
            return taken

    def take_all(self) -> list[Item]:
        """Everything that waits."""
        with self._changed:
            return self.take(len(self._items), 0.0)

    def put_back(self, items: Iterable[Item]) -> None:
        """Return items that were just taken to the front, in their order, whatever room there is."""
        returned = list(items)
        with self._changed:
            self._items.extendleft(reversed(returned))
            self._num_bytes += sum(map(self.num_bytes_of, returned))

    def drop(self, unwanted: Callable[[Item], bool]) -> None:
        """Forget the waiting items for which `unwanted` holds."""
        with self._changed:
            self._items = deque(item for item in self._items if not unwanted(item))
            self._num_bytes = sum(map(self.num_bytes_of, self._items))
            self._changed.notify_all()

    def close(self) -> None:
        """Forget everything, and keep nothing that is put from now on."""
        with self._changed:
            self._is_open = False
            self._items.clear()
            self._num_bytes = 0
            self._changed.notify_all()

    def wake(self) -> None:
        """Let the next or waiting `take` return although nothing may have come."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        if not self._items:
            return True
        return len(self._items) < self.max_items and self._num_bytes + num_bytes <= self.max_bytes


class BackgroundWrites:
    """Calls that wait for their turn. While the database is away, the oldest wait and new ones are dropped.

    A write that Postgres refuses is logged and lost. `pause` waits for these seconds between two tries.
    """

    def __init__(self, pause: Callable[[float], object]) -> None:
        self._pause = pause
        self._queue: BoundedQueue[tuple[str, Callable[[], object]]] = BoundedQueue(
            max_items=_MOST_WRITES, max_bytes=_MOST_WRITES, num_bytes_of=lambda write: 1
        )

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, what: str, write: Callable[[], object]) -> None:
        """Have `write` called soon; `what` names it in the log. Dropped with a warning where too many wait."""
        if not self._queue.num_free:
            log.warning("%s: not written, too many writes wait", what, extra={"action": "background_write_dropped"})
            return
        self._queue.put([(what, write)])

    def turn(self, timeout_s: float = _IDLE_WAIT_S) -> None:
        """Do the waiting writes in order. A write that fails because the database is away is repeated next turn."""
        waiting = self._queue.take(_MOST_WRITES, timeout_s)
        for number, (what, write) in enumerate(waiting):
            beat()
            try:
                write()
            except StoreUnavailable as error:
                log.warning("%s: not written yet: %s", what, error.message, extra={"action": "background_write_waits"})
                self._queue.put_back(waiting[number:])
                self._pause(timeout_s)
                return
            except StoreError as error:
                log.warning("%s: not written: %s", what, error.message, extra={"action": "background_write_failed"})


Answer = TypeVar("Answer")

_AWAY: Final = (StoreUnavailable, BrokerUnavailable, DeliveryFailed, TopicUnavailable, ContentStoreUnavailable)
FIRST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 10.0


@dataclass(eq=False)
class Retry:
    """Repeats a call that failed because a server is away, until it works or the worker is in a hurry.

    `died` is set when a thread has ended by itself: then no producer waits any more for room in its queue.
    """

    hurry: threading.Event
    died: threading.Event | None = None

    def gives_up(self) -> bool:
        """Whether to stop waiting for room in a queue."""
        return self.hurry.is_set() or (self.died is not None and self.died.is_set())

    def until_done(self, what: str, act: Callable[[], Answer]) -> Answer:
        """The answer of `act`; its last error of a server or topic that is away once in a hurry."""
        return self._repeat(what, act, self.hurry.wait, self.hurry.is_set)

    def for_a_while(self, what: str, act: Callable[[], Answer], limit_s: float) -> Answer:
        """The same, but also in a hurry, and only until `limit_s` seconds have passed."""
        until = time.monotonic() + limit_s
        return self._repeat(what, act, time.sleep, lambda: time.monotonic() >= until)

    def _repeat(
        self, what: str, act: Callable[[], Answer], pause: Callable[[float], object], gives_up: Callable[[], bool]
    ) -> Answer:
        wait_s = FIRST_WAIT_S
        while True:
            beat()  # a server that is away may be away for long
            try:
                answer = act()
            except _AWAY as error:
                if gives_up():
                    raise
                if wait_s == FIRST_WAIT_S:
                    log.warning("%s: %s; trying again", what, error.message, extra={"action": "server_away"})
                pause(wait_s)
                wait_s = min(wait_s * 2, LONGEST_WAIT_S)
            else:
                if wait_s > FIRST_WAIT_S:
                    log.info("%s: works again", what, extra={"action": "server_back"})
                return answer


#: New objects, less those that went, between two searches of the young ones: a few hundred jobs' worth.
NUM_NEW_OBJECTS: Final = 50_000
#: Searches of one generation between two of the next older one; Python's own numbers.
_SEARCHES: Final = (10, 10)
#: With 1 ms the worker takes a quarter more processor time for a short job than with 5, with 20 some 7 % less; with 100
#: it is as fast as with 20.
TURN_S: Final = 0.02
#: A thread beside the engine that does not move for this long hangs: the process ends, and other workers take its jobs.
MAX_SILENCE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Threads:
    """Every thread of a worker but the loop's, and the pulses that show whether each still moves."""

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
        for thread in started:
            thread.start()

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
    such as exceptions with their frames. Python searches after every 700 new objects by default, and so
    looks at all jobs that wait and run again and again: a fifth of the processor time of a worker with short jobs. What
    there is now is never searched again, because models, kernels and modules stay with the process; a full search that
    looks at those takes .3 s.

    A thread that computes gives the interpreter to a waiting one after 5 ms by default. Each change costs
    both threads what the processor's caches hold of their data. The neighbours of the loop wait for servers most of the
    time, so their turns end by themselves, nearly always within a few milliseconds; only with a backlog of short jobs
    they do not.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NUM_NEW_OBJECTS, *_SEARCHES)
    sys.setswitchinterval(TURN_S)
