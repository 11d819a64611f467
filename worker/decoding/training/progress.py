"""The stages of a run, reported as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alphaloop.commands import AdvanceEvent, NoteEvent, StageEvent, Tell


class Stages:
    """Reports one stage after the other."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    @contextmanager
    def show(self, name: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
        """A stage of `total` things, `done` of them by an earlier run; call what it yields with how many more."""
        began = time.monotonic()
        count = done
        self._tell(StageEvent(name=name, total=total, done=done))

        def advance(num: int = 1, note: str = "") -> None:
            nonlocal count
            count += num
            self._tell(AdvanceEvent(num=num, note=note))

        yield advance
        kept = f", {done} of them by an earlier run" if done else ""
        self._tell(NoteEvent(text=f"{name}: {count} of {total}{kept}, {time.monotonic() - began:.0f} s"))
