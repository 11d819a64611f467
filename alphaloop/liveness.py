"""Whether the threads of a process still move. A thread that hangs raises nothing, so only its silence shows.

A thread beats each time that it begins a turn, and while it waits for something that may rightly take long: room in a
queue, a server that is away. So silence means that one call does not return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_of_thread = threading.local()


class Pulse:
    """When something last moved: a thread, or the steps of an engine."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock
        self._beat_at: float | None = None

    @property
    def silence_s(self) -> float:
        """Seconds since the last beat; 0 while it is not expected to beat."""
        beat_at = self._beat_at
        return 0.0 if beat_at is None else self._clock() - beat_at

    def beat(self) -> None:
        """It moves."""
        self._beat_at = self._clock()

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Expect beats during this block. `beat` of this thread means this pulse."""
        before = getattr(_of_thread, "pulse", None)
        _of_thread.pulse = self
        self.beat()
        try:
            yield
        finally:
            self.rest()
            _of_thread.pulse = before

    def around(self, run: Callable[[], None]) -> Callable[[], None]:
        """`run` of a thread, with beats expected as long as it runs."""

        def run_watched() -> None:
            with self.expected():
                run()

        return run_watched

    def rest(self) -> None:
        """Expect no beat until the next one."""
        self._beat_at = None

    def excuse(self) -> None:
        """Forget the silence up to now."""
        if self._beat_at is not None:
            self.beat()


def beat() -> None:
    """The calling thread moves, or waits for something that may take long. Nothing happens in an unwatched thread."""
    pulse: Pulse | None = getattr(_of_thread, "pulse", None)
    if pulse is not None:
        pulse.beat()


class Liveness:
    """The pulses of a process, each with the longest silence that is still right."""

    def __init__(self) -> None:
        self._limits_s: dict[Pulse, float] = {}

    def watch(self, pulse: Pulse, limit_s: float) -> Pulse:
        """From now on a silence of more than `limit_s` of this pulse is a fault. Returns the pulse."""
        self._limits_s[pulse] = limit_s
        return pulse

    @property
    def pulses(self) -> tuple[Pulse, ...]:
        """All that are watched."""
        return tuple(self._limits_s)

    def hung(self) -> str | None:
        """What does not move any more, in words; None while all is well."""
        for pulse, limit_s in self._limits_s.items():
            if (silence_s := pulse.silence_s) > limit_s:
                return f"{pulse.name} has not moved for {silence_s:.0f} s, expected at most {limit_s:g} s"
        return None

    def excuse(self) -> None:
        """Forget every silence up to now, because the whole process was suspended."""
        for pulse in self._limits_s:
            pulse.excuse()
