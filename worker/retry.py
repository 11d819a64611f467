"""How long the worker waits: for a server that is away, and for room in a queue between two threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from alphaloop.errors import (
    BrokerUnavailable,
    ContentStoreUnavailable,
    DeliveryFailed,
    StoreUnavailable,
    TopicUnavailable,
)
from alphaloop.liveness import beat

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_AWAY: Final = (StoreUnavailable, BrokerUnavailable, DeliveryFailed, TopicUnavailable, ContentStoreUnavailable)
FIRST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 10.0


class Retry:
    """Repeats a call that failed because a server is away, until it works or the worker is told to hurry.

    `died` is set when a thread has ended by itself: then nobody waits any more for room that this thread would make.
    """

    def __init__(
        self,
        hurry: threading.Event,
        died: threading.Event | None = None,
        *,
        pause: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hurry = hurry
        self._died = died
        self._pause, self._clock = pause, clock

    def is_hurried(self) -> bool:
        """Whether the worker is told to hurry."""
        return self._hurry.is_set()

    def gives_up(self) -> bool:
        """Whether to stop waiting for room in a queue."""
        return self._hurry.is_set() or (self._died is not None and self._died.is_set())

    def wait(self, seconds: float) -> None:
        """Wait so long, unless the worker is told to hurry."""
        self._hurry.wait(seconds)

    def until_done(self, what: str, act: Callable[[], Answer]) -> Answer:
        """The answer of `act`; its last error of a server or topic that is away once in a hurry."""
        return self._repeat(what, act, self._hurry.wait, self._hurry.is_set)

    def for_a_while(self, what: str, act: Callable[[], Answer], limit_s: float) -> Answer:
        """The same, but also in a hurry, and only until `limit_s` seconds have passed."""
        until = self._clock() + limit_s
        return self._repeat(what, act, self._pause, lambda: self._clock() >= until)

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
