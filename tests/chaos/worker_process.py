"""A process of a run: `python -m worker`, with the null engine if CHAOS_ROUND_S is set; or `python -m scheduler run`.

    CHAOS_ROUND_S=0.05 CHAOS_FAILURES=/tmp/failures CHAOS_CLOCK_SKEW_S=3600 python -m tests.chaos.worker_process
    python -m tests.chaos.worker_process scheduler

Everything else is the shipped process: its settings, threads, signals, health and exit codes. The process ends at once
when its standard input does, so that none outlives a run that was killed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.chaos.echo_engine import EchoEngine

ROUND_S = "CHAOS_ROUND_S"
FAILURES = "CHAOS_FAILURES"  #: a folder, for the null engine
CLOCK_SKEW_S = "CHAOS_CLOCK_SKEW_S"
TOPIC_CHECK_S = 5.0
_OURS = ("alphaloop", "engine", "worker")


class _AnyDatetime(type):
    """isinstance() of the skewed class says yes to plain times, which are what everything else makes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, datetime)


def skew_clock(skew: timedelta) -> None:
    """Replace the clock of every module of ours that is loaded; call it when all are.

    Only time of day is wrong, as on a machine without NTP; monotonic clocks, Kafka's and Postgres's go on as they are.
    """

    class Skewed(datetime, metaclass=_AnyDatetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + skew

    real_time = time.time
    time.time = lambda: real_time() + skew.total_seconds()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in _OURS and getattr(module, "datetime", None) is datetime:
            module.datetime = Skewed  # type: ignore[attr-defined]


def end_with_input() -> None:
    """From now on."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="input", daemon=True).start()


def run() -> int:
    """Run the worker; its exit code."""
    if ROUND_S in os.environ:
        loading: Any = ModuleType("engine.own")
        loading.load_engine = _load_engine
        sys.modules[loading.__name__] = loading
    from worker.__main__ import main
    from worker.intake.polling import TopicWatch

    # A phase is shorter than what a worker takes to notice by itself that a topic was made anew.
    TopicWatch.__init__.__kwdefaults__["every_s"] = TOPIC_CHECK_S
    if skew_s := float(os.environ.get(CLOCK_SKEW_S, "0")):
        skew_clock(timedelta(seconds=skew_s))
    return main()


def _load_engine(models: object, *, num_slots: int) -> EchoEngine:
    return EchoEngine(num_slots, round_s=float(os.environ[ROUND_S]), failures=Path(os.environ[FAILURES]))


if __name__ == "__main__":
    end_with_input()
    if sys.argv[1:2] == ["scheduler"]:
        from scheduler import __main__ as program
        from scheduler import leadership

        # A phase is short: one that takes over does so sooner than 30 s after the other was killed.
        vars(leadership)["CHECK_S"], vars(program)["LEASE_S"] = 1.0, 6.0
        sys.exit(program.main(["run"]))
    sys.exit(run())
