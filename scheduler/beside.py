"""What a leader does again and again beside its runs: notify, and foresee. Each has a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from alphaloop.errors import AlphaloopError, reason_of

log = logging.getLogger(__name__)

_LONGEST_STOP_S: Final = 10.0


class Beside:
    """Calls an action again and again, so that a slow one delays no run. No failure ends it."""

    def __init__(
        self,
        name: str,
        action: Callable[[], object],
        pause_s: float,
        *,
        first: Callable[[], object] | None = None,
        pause_over_work: float = 0.0,
    ) -> None:
        """`first` is called once by `start`. A pause is `pause_over_work` times the action's own time at least."""
        self._name, self._action, self._first = name, action, first
        self._pause_s, self._pause_over_work = pause_s, pause_over_work
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        if self._first is not None:
            self._try(self._first)
        self._thread.start()

    def stop(self, *, wait: bool) -> None:
        """Begin no more actions; with `wait`, wait some seconds for the one under way."""
        self._stop.set()
        if wait:
            self._thread.join(_LONGEST_STOP_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self._try(self._action)
            self._stop.wait(max(self._pause_s, self._pause_over_work * (time.monotonic() - began)))

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            code = error.code if isinstance(error, AlphaloopError) else type(error).__name__
            log.warning("%s", reason_of(error), extra={"action": f"{self._name}_failed", "code": code})
