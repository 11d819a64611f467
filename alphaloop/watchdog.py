"""Ends a process that hangs, because nobody else does: a container's health check alone restarts nothing."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, NoReturn

from alphaloop.exit_codes import ExitCode
from alphaloop.liveness import Liveness

log = logging.getLogger(__name__)

TICK_S: Final = 1.0
#: Between the fault and the end: a health check sees it, and what was only slow can still go on.
GRACE_S: Final = 15.0
#: Ticks that come so much too late mean that the whole process was suspended.
_SUSPENDED_S: Final = 5.0
#: How long the last orders before the end may take.
_LAST_ORDERS_S: Final = 5.0


class Watchdog:
    """Looks at the pulses each second, from a thread of its own.

    If something hangs for GRACE_S after it was found, every thread's stack goes to standard error and the process ends
    with ExitCode.HUNG. `last_orders` is called before, for a few seconds at most. With `backstop_s` the C library ends
    the process, with code 1, when this thread itself gets no turn for so long because a call holds the interpreter.
    """

    def __init__(
        self,
        liveness: Liveness,
        *,
        last_orders: Callable[[], object] = lambda: None,
        end: Callable[[], object] | None = None,
        backstop_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._liveness = liveness
        self._last_orders = last_orders
        self._end = end or _exit
        self._backstop_s = backstop_s
        self._clock = clock
        self._looked_at = clock()
        self._hung_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._looked_at = self._clock()
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * TICK_S)
        if self._backstop_s is not None:
            faulthandler.cancel_dump_traceback_later()

    def look(self) -> None:
        """One look; ends the process when something has hung for too long."""
        now = self._clock()
        if now - self._looked_at > TICK_S + _SUSPENDED_S:
            self._liveness.excuse()
        self._looked_at = now
        found = self._liveness.hung()
        if found is None:
            self._hung_since = None
        elif self._hung_since is None:
            self._hung_since = now
            log.error("%s; ending in %.0f s", found, GRACE_S, extra={"action": "hung"})
        elif now - self._hung_since >= GRACE_S:
            log.critical("%s: ending", found, extra={"action": "hung_ending"})
            self._give_last_orders()
            self._end()

    def _give_last_orders(self) -> None:
        """In another thread, because they may meet the same hanging call."""
        thread = threading.Thread(target=self._last_orders, name="last-orders", daemon=True)
        thread.start()
        thread.join(_LAST_ORDERS_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._backstop_s is not None:
                faulthandler.dump_traceback_later(self._backstop_s, exit=True)
            self.look()
            self._stop.wait(TICK_S)


def _exit() -> NoReturn:
    """Stacks show where it hangs, and no values: neither prompts nor secrets. No clean-up, because that would wait."""
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(ExitCode.HUNG)
