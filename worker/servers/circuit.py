"""Whether one endpoint may be sent requests: up, doubted until a test has passed, down, or retired.

    up ──a failure that may be the server's──▶ doubted ──test passed──▶ up, at the limit it had
    up, doubted ──away──▶ down ──test passed──▶ up, with a slow start
    any ──another model or other settings──▶ retired, until a person looks

One test at a time. That of a doubted endpoint is due at once, those of one that is down after 1 s, 2 s, 4 s … 30 s.
"""

from __future__ import annotations

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
        self.num_deaths = 0  #: times that it went down because nothing answered any more
        self._is_tested = False
        self._num_failed_tests = 0
        self._test_s = 0.0

    @property
    def test_due_s(self) -> float | None:
        """When the next test is due; None where none is."""
        return self._test_s if self.state in ("doubted", "down") and not self._is_tested else None

    def is_test_due(self) -> bool:
        """Whether a test shall begin now."""
        return self.test_due_s is not None and self.test_due_s <= self._clock()

    def test_begins(self) -> None:
        """A test is under way until `passed`, `test_failed` or `retire`."""
        self._is_tested = True

    def worked(self) -> None:
        """The server finished a request. A doubt stays until the test, which is newer."""
        self.well_s = self._clock()

    def doubt(self, reason: str) -> None:
        """Something failed that may be the server's fault."""
        if self.state == "up":
            self._become("doubted", reason)
            self._test_s = self._clock()

    def down(self, reason: str, *, is_death: bool) -> None:
        """The server is away. A test that is under way goes on."""
        if self.state in ("up", "doubted"):
            self._become("down", reason)
            self._num_failed_tests = 0
            self.num_deaths += is_death
            self._next_test()

    def test_failed(self, reason: str, *, is_death: bool) -> None:
        """A test failed: the server is away, or still is."""
        self._is_tested = False
        if self.state == "down":
            self.reason = reason
            self._num_failed_tests += 1
            self._next_test()
        else:
            self.down(reason, is_death=is_death)

    def passed(self) -> bool:
        """A test passed. Whether the endpoint was down, so that it starts slowly."""
        self._is_tested = False
        if self.state == "retired":
            return False
        self.well_s = self._clock()
        was_down = self.state == "down"
        if self.state != "up":
            self._become("up", None)
        return was_down

    def retire(self, reason: str) -> None:
        """Another server stands there now: nothing goes there until a person has looked."""
        self._is_tested = False
        if self.state != "retired":
            self._become("retired", reason)

    def _next_test(self) -> None:
        wait_s = min(_FIRST_WAIT_S * 2 ** min(self._num_failed_tests, 10), _LONGEST_WAIT_S)
        self._test_s = self._clock() + wait_s * self._rng.uniform(0.5, 1.0)

    def _become(self, state: State, reason: str | None) -> None:
        self.state, self.reason, self.since_s = state, reason, self._clock()
