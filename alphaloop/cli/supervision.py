"""What `alphaloop up` does when one of its processes or servers ends by itself: it starts it again, within bounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from alphaloop.errors import StartFailed
from alphaloop.liveness import ExitCode

#: So many new starts within WINDOW_S; one more end is an error that a person has to see to.
MOST_STARTS: Final = 5
WINDOW_S: Final = 600.0
#: Before the first new start; each further one within WINDOW_S waits twice as long.
FIRST_WAIT_S: Final = 1.0


class Child(Protocol):
    """What is needed of alphaloop.embedded.process.ChildProcess and alphaloop.embedded.stack.StackServer."""

    name: str

    def start(self) -> None: ...
    def ended_with(self) -> int | None: ...
    def failed(self, what: str, *, hint: str | None = None) -> StartFailed: ...


class Supervised:
    """A child that is started again when it ends. `tell` shows the user what happens; `then` runs after a new start."""

    def __init__(
        self,
        child: Child,
        tell: Callable[[str], None],
        *,
        then: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._child = child
        self._tell, self._then = tell, then
        self._clock = clock
        self._starts: deque[float] = deque()  # of the new starts within WINDOW_S, when
        self._due: float | None = None

    def look(self) -> None:
        """Start the child again when it has ended and its wait is over. Raises StartFailed after too many starts.

        A new start that fails counts as an end.
        """
        if self._due is None:
            if (code := self._child.ended_with()) is not None:
                self._plan(f"ended with code {code}{_meaning(code)}")
        elif self._clock() >= self._due:
            self._due = None
            self._starts.append(self._clock())
            try:
                self._child.start()
            except StartFailed as error:
                self._plan(f"could not be started again: {error.message}")
            else:
                self._then()

    def _plan(self, why: str) -> None:
        now = self._clock()
        while self._starts and now - self._starts[0] > WINDOW_S:
            self._starts.popleft()
        if len(self._starts) >= MOST_STARTS:
            raise self._child.failed(f"{why}, after {MOST_STARTS} new starts within {WINDOW_S / 60:g} minutes")
        wait_s = FIRST_WAIT_S * 2 ** len(self._starts)
        self._due = now + wait_s
        self._tell(f"{_named(self._child.name)} {why}; starting it again in {wait_s:g} s")


def _named(name: str) -> str:
    """A child's name in a sentence: only servers have names of their own."""
    return name if name[0].isupper() else f"the {name}"


def _meaning(code: int) -> str:
    """What an exit code says, in brackets; empty for codes of other programs."""
    if code > 128:
        return f" (killed by signal {code - 128})"
    return f" ({ExitCode(code).meaning})" if code in set(ExitCode) else ""
