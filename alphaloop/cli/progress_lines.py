"""Progress where there is no terminal: a line every few seconds, so that a log shows how far a command is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 5.0


class ProgressLines:
    """Follows the stages of a command and writes a line now and then, with `write`."""

    def __init__(self, write: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._began = self._told_at = clock()
        self._name, self._done, self._total = "starting", 0, None  # type: str, int, int | None

    def stage(self, name: str, done: int, total: int | None) -> None:
        """A new stage begins; `done` of its `total` things were done before."""
        self._name, self._done, self._total = name, done, total
        self._tell_when_due()

    def advance(self, num: int, total: int | None) -> None:
        """So many more things are done; `total` where it has changed."""
        self._done += num
        self._total = self._total if total is None else total
        self._tell_when_due()

    def _tell_when_due(self) -> None:
        now = self._clock()
        if now - self._told_at < EVERY_S:
            return
        self._told_at = now
        of = "" if self._total is None else f" of {self._total}"
        done = f": {self._done}{of}" if self._done or self._total is not None else ""
        self._write(f"{self._name}{done}, after {now - self._began:.0f} s")
