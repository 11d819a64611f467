"""Retries while a database or broker is away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from alphaloop.errors import BrokerUnavailable, DeliveryFailed, StoreUnavailable
from alphaloop.liveness import beat

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

FIRST_WAIT_S: Final = 0.2
LONGEST_WAIT_S: Final = 10.0


class Retry:
    """Repeats a call that failed because a server is away, until it works or the worker is told to hurry."""

    def __init__(self, hurry: threading.Event) -> None:
        self._hurry = hurry

    def until_done(self, what: str, act: Callable[[], Answer]) -> Answer:
        """The answer of `act`; its last StoreUnavailable, BrokerUnavailable or DeliveryFailed once in a hurry."""
        wait_s = FIRST_WAIT_S
        while True:
            beat()  # a server that is away may be away for long
            try:
                answer = act()
            except (StoreUnavailable, BrokerUnavailable, DeliveryFailed) as error:
                if self._hurry.is_set():
                    raise
                if wait_s == FIRST_WAIT_S:
                    log.warning("%s: %s; trying again", what, error.message, extra={"action": "server_away"})
                self._hurry.wait(wait_s)
                wait_s = min(wait_s * 2, LONGEST_WAIT_S)
            else:
                if wait_s > FIRST_WAIT_S:
                    log.info("%s: works again", what, extra={"action": "server_back"})
                return answer
