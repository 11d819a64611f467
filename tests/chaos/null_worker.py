"""A worker process with the null engine: `python -m worker`, whose engine is ours.

    CHAOS_ROUND_S=0.05 CHAOS_CLOCK_SKEW_S=3600 python -m tests.chaos.null_worker

Everything else is the shipped process: its settings, threads, signals, health and exit codes.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

from tests.chaos.echo_engine import EchoEngine
from tests.chaos.skewed_clock import skew_clock

ROUND_S = "CHAOS_ROUND_S"
CLOCK_SKEW_S = "CHAOS_CLOCK_SKEW_S"


def run() -> int:
    """Run the worker; its exit code."""
    loading: Any = ModuleType("worker.decoding.load")
    loading.load_engine = _load_engine
    sys.modules[loading.__name__] = loading
    from worker.__main__ import main

    if skew_s := float(os.environ.get(CLOCK_SKEW_S, "0")):
        skew_clock(timedelta(seconds=skew_s))
    return main()


def _load_engine(models: object, *, num_slots: int) -> EchoEngine:
    return EchoEngine(num_slots, round_s=float(os.environ.get(ROUND_S, "0")))


if __name__ == "__main__":
    sys.exit(run())
