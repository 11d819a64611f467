"""Progress where there is no terminal: a line every few seconds, so that a log shows how far a command is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

EVERY_S: Final = 5.0
_LOOK_EVERY_S: Final = 1.0


class ProgressLines:
    """Follows the stages of a command and writes a line now and then, with `write`."""

    def __init__(self, write: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._began = self._told_at = clock()
        self._name, self._done, self._total = "starting", 0, None  # type: str, int, int | None
        self._one_at_a_time = threading.Lock()

    def stage(self, name: str, done: int, total: int | None) -> None:
        """A new stage begins; `done` of its `total` things were done before."""
        self._name, self._done, self._total = name, done, total
        self.tell_when_due()

    def advance(self, num: int, total: int | None) -> None:
        """So many more things are done; `total` where it has changed."""
        self._done += num
        self._total = self._total if total is None else total
        self.tell_when_due()

    def tell_when_due(self) -> None:
        """Write a line if the last one is old."""
        with self._one_at_a_time:
            now = self._clock()
            if now - self._told_at < EVERY_S:
                return
            self._told_at = now
            of = "" if self._total is None else f" of {self._total}"
            done = f": {self._done}{of}" if self._done or self._total is not None else ""
            self._write(f"{self._name}{done}, after {now - self._began:.0f} s")

    @contextmanager
    def told_also_while_nothing_happens(self, look_every_s: float = _LOOK_EVERY_S) -> Iterator[None]:
        """While the block runs, a thread writes the lines that are due: a model may load for a minute."""
        has_ended = threading.Event()

        def look() -> None:
            while not has_ended.wait(look_every_s):
                self.tell_when_due()

        looking = threading.Thread(target=look, name="progress-lines", daemon=True)
        looking.start()
        try:
            yield
        finally:
            has_ended.set()
            looking.join()
