"""The stages of a run on the screen: a bar each where there is a terminal, one line each in any case."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from alphaloop.cli.screen import note, progress


class Stages:
    """Shows one stage after the other."""

    @contextmanager
    def show(self, name: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
        """A stage of `total` things, `done` of them by an earlier run; call what it yields with how many more."""
        began = time.monotonic()
        count = done
        with progress() as bar:
            shown = bar.add_task(name, total=total, completed=done, note="")

            def advance(num: int = 1, told: str = "") -> None:
                nonlocal count
                count += num
                bar.update(shown, completed=count, note=told)

            yield advance
        kept = f", {done} of them by an earlier run" if done else ""
        note(f"{name}: {count} of {total}{kept}, {time.monotonic() - began:.0f} s")
