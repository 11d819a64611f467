"""What `alphaloop up` does when its worker or scheduler ends by itself: it starts that process again, within bounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from alphaloop.errors import StartFailed
from alphaloop.exit_codes import ExitCode

#: So many new starts within WINDOW_S; one more end is an error that a person has to see to.
MOST_STARTS: Final = 5
WINDOW_S: Final = 600.0
#: Before the first new start; each further one within WINDOW_S waits twice as long.
FIRST_WAIT_S: Final = 1.0


class Child(Protocol):
    """What is needed of alphaloop.embedded.process.ChildProcess."""

    name: str

    def start(self) -> None: ...
    def ended_with(self) -> int | None: ...
    def failed(self, what: str, *, hint: str | None = None) -> StartFailed: ...


class Supervised:
    """A child that is started again when it ends. `tell` shows the user what happens."""

    def __init__(
        self, child: Child, tell: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._child = child
        self._tell = tell
        self._clock = clock
        self._starts: deque[float] = deque()  # of the new starts within WINDOW_S, when
        self._due: float | None = None

    def look(self) -> None:
        """Start the child again when it has ended and its wait is over. Raises StartFailed after too many starts."""
        now = self._clock()
        if self._due is not None:
            if now >= self._due:
                self._due = None
                self._starts.append(now)
                self._child.start()
            return
        code = self._child.ended_with()
        if code is None:
            return
        while self._starts and now - self._starts[0] > WINDOW_S:
            self._starts.popleft()
        why = f"ended with code {code}{_meaning(code)}"
        if len(self._starts) >= MOST_STARTS:
            raise self._child.failed(f"{why}, after {MOST_STARTS} new starts within {WINDOW_S / 60:g} minutes")
        wait_s = FIRST_WAIT_S * 2 ** len(self._starts)
        self._due = now + wait_s
        self._tell(f"the {self._child.name} {why}; starting it again in {wait_s:g} s")


def _meaning(code: int) -> str:
    """What an exit code says, in brackets; empty for codes of other programs."""
    if code > 128:
        return f" (killed by signal {code - 128})"
    return f" ({ExitCode(code).meaning})" if code in set(ExitCode) else ""
