"""Topics that no message reaches now: said once, shown in metrics, and made again where that is allowed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from alphaloop.errors import BrokerError, FatalBrokerError

log = logging.getLogger(__name__)


class UnavailableTopics:
    """Called from the threads that send; asked from any."""

    def __init__(self, create: Callable[[str], None], show: Callable[[str, bool], None]) -> None:
        self._create = create
        self._show = show
        self._failed: dict[str, str] = {}
        self._lock = threading.Lock()

    def ensure(self, topic: str) -> BrokerError | None:
        """Create the topic if it is missing; the error if it stays unavailable."""
        try:
            self._create(topic)
        except FatalBrokerError:
            raise
        except BrokerError as error:
            return error
        return None

    def failed(self, topic: str, error: BrokerError) -> None:
        """No message reached the topic. Says so at its first failure in a row."""
        with self._lock:
            is_new = topic not in self._failed
            self._failed[topic] = error.message
        if is_new:
            self._show(topic, True)
            told = {"action": "topic_unavailable", "topic": topic, "hint": error.hint or ""}
            log.error("no message reaches the topic %s: %s; trying again", topic, error.message, extra=told)

    def works(self, topic: str) -> None:
        """A message reached the topic."""
        with self._lock:
            was_away = self._failed.pop(topic, None) is not None
        if was_away:
            self._show(topic, False)
            log.warning("the topic %s works again", topic, extra={"action": "topic_available", "topic": topic})

    def reason(self, topic: str) -> str | None:
        """Why no message reaches the topic; None if messages reach it."""
        with self._lock:
            return self._failed.get(topic)
