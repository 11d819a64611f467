"""A thread beside the loop. An exception in it ends the worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from alphaloop.errors import AlphaloopError, WorkerThreadDied, reason_of
from alphaloop.liveness import Pulse

log = logging.getLogger(__name__)


class Neighbour:
    """Calls `turn` again and again until it is told to end.

    `turn` returns within about a second, because it waits for its work with a timeout. An exception ends the thread;
    `check` raises it in the caller's thread, and `on_failure` wakes threads that wait for this one's work.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], object],
        *,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.pulse = Pulse(f"the thread {name}")
        self._turn = turn
        self._on_failure = on_failure
        self._failure: AlphaloopError | None = None
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self.pulse.around(self._run), name=name, daemon=True)

    def start(self) -> None:
        """Begin to turn."""
        self._thread.start()

    @property
    def failure(self) -> AlphaloopError | None:
        """The exception that ended the thread."""
        return self._failure

    def check(self) -> None:
        """Raise the exception that ended the thread."""
        if self._failure is not None:
            raise self._failure

    def end(self, timeout_s: float) -> bool:
        """Let the turn in hand be the last one; whether the thread ended within `timeout_s`."""
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_ending.is_set():
                self.pulse.beat()
                self._turn()
        except AlphaloopError as error:
            self._fail(error)
        except Exception as error:
            log.exception("the thread %s ended", self.name, extra={"action": "thread_died"})
            self._fail(WorkerThreadDied(f"the thread {self.name} ended: {reason_of(error)}"))

    def _fail(self, error: AlphaloopError) -> None:
        self._failure = error
        self._on_failure()
