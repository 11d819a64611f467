"""Whether one endpoint may be sent requests: up, doubted until a test has passed, down, or retired.

    up ──a failure that may be the server's──▶ doubted ──test passed──▶ up, at the limit it had
    up, doubted ──away──▶ down ──test passed──▶ up, with a slow start
    any ──another model or other settings──▶ retired, until the worker starts again

One test at a time. That of a doubted endpoint is due at once, those of one that is down after 1 s, 2 s, 4 s … 30 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Final, Literal

State = Literal["up", "doubted", "down", "retired"]

_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 30.0


class Circuit:
    """The health of one endpoint. One thread uses it; times are seconds on the clock."""

    def __init__(self, *, clock: Callable[[], float], rng: Random) -> None:
        self._clock, self._rng = clock, rng
        self.state: State = "up"
        self.reason: str | None = None  #: why it is not up
        self.since_s = clock()  #: when the state began
        self.well_s: float | None = None  #: when the server last finished a request or passed a test
        self.up_again_s: float | None = None  #: when it last came back from being down
        self.test_began_s = -math.inf  #: the last test
        self._is_tested = self._is_asked_for = False
        self._num_failed_tests = 0
        self._test_s = 0.0

    @property
    def test_due_s(self) -> float | None:
        """When the next test is due; None where none is."""
        is_due = self.state in ("doubted", "down") or (self.state == "up" and self._is_asked_for)
        return self._test_s if is_due and not self._is_tested else None

    @property
    def is_test_coming(self) -> bool:
        """Whether a test of an endpoint that is not down is under way or due."""
        return self.state == "doubted" or (self.state == "up" and (self._is_asked_for or self._is_tested))

    def is_test_due(self) -> bool:
        """Whether a test shall begin now."""
        return self.test_due_s is not None and self.test_due_s <= self._clock()

    def ask_for_test(self) -> None:
        """Let an endpoint that is not down be tested at once, or again after the test that is under way."""
        if self.state in ("up", "doubted") and not self._is_asked_for:
            self._is_asked_for, self._test_s = True, self._clock()

    def test_begins(self) -> None:
        """A test is under way until `passed`, `test_failed` or `retire`."""
        self._is_tested, self._is_asked_for = True, False
        self.test_began_s = self._clock()

    def worked(self) -> None:
        """The server finished a request. A doubt stays until the test, which is newer."""
        self.well_s = self._clock()

    def doubt(self, reason: str) -> None:
        """Something failed that may be the server's fault."""
        if self.state == "up":
            self._become("doubted", reason)
            self._test_s = self._clock()

    def down(self, reason: str) -> bool:
        """The server is away. Whether that is news; a test that is under way goes on."""
        if self.state not in ("up", "doubted"):
            return False
        self._become("down", reason)
        self._is_asked_for = False
        self._num_failed_tests = 0
        self._next_test()
        return True

    def test_failed(self, reason: str) -> bool:
        """A test failed: the server is away, or still is. Whether that is news."""
        self._is_tested = False
        if self.state != "down":
            return self.down(reason)
        self.reason = reason
        self._num_failed_tests += 1
        self._next_test()
        return False

    def passed(self) -> bool:
        """A test passed. Whether the endpoint was down, so that it starts slowly."""
        self._is_tested = False
        if self.state == "retired":
            return False
        self.well_s = self._clock()
        was_down = self.state == "down"
        if was_down:
            self.up_again_s = self.well_s
        if self.state != "up":
            self._become("up", None)
        return was_down

    def retire(self, reason: str) -> None:
        """Another server stands there now: nothing goes there until the worker starts again."""
        self._is_tested = False
        if self.state != "retired":
            self._become("retired", reason)

    def _next_test(self) -> None:
        wait_s = min(_FIRST_WAIT_S * 2 ** min(self._num_failed_tests, 10), _LONGEST_WAIT_S)
        self._test_s = self._clock() + wait_s * self._rng.uniform(0.5, 1.0)

    def _become(self, state: State, reason: str | None) -> None:
        self.state, self.reason, self.since_s = state, reason, self._clock()
