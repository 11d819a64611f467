"""A wrong clock for one worker process: every module of ours then sees another time of day.

Only time of day is wrong, as on a machine without NTP; monotonic clocks, Kafka's and Postgres's go on as they are.
"""

from __future__ import annotations

import sys
import time
from datetime import datetime, timedelta, tzinfo
from typing import Any

_OURS = ("alphaloop", "worker")


class _AnyDatetime(type):
    """isinstance() of the skewed class says yes to plain times, which are what everything else makes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, datetime)


def skew_clock(skew: timedelta) -> None:
    """Replace the clock of every module of ours that is loaded; call it when all are."""

    class Skewed(datetime, metaclass=_AnyDatetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + skew

    real_time = time.time
    time.time = lambda: real_time() + skew.total_seconds()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in _OURS and getattr(module, "datetime", None) is datetime:
            module.datetime = Skewed  # type: ignore[attr-defined]
