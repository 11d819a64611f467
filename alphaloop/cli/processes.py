"""`alphaloop worker` and `alphaloop scheduler`: replace the command by that process.

The command line imports neither, because both load libraries that the other commands do not need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NoReturn

import typer

from alphaloop.cli.children import child_command, child_environment
from alphaloop.cli.options import connected_settings, global_options

WORKER_EXAMPLE: Final = "KAFKA_BOOTSTRAP_SERVERS=kafka:9092 DATABASE_URL=postgresql://… alphaloop worker"
SCHEDULER_EXAMPLE: Final = "alphaloop scheduler once"


class SchedulerMode(StrEnum):
    """How long the scheduler stays."""

    RUN = "run"
    ONCE = "once"


def worker(
    context: typer.Context,
    seed: int | None = typer.Option(None, help="Seed of exploration; random if not given."),
) -> None:
    """Decode jobs until SIGTERM, which lets running jobs finish."""
    _become(context, "worker", [] if seed is None else ["--seed", str(seed)])


def scheduler(
    context: typer.Context,
    mode: SchedulerMode = typer.Argument(
        SchedulerMode.RUN, help="run: stay and measure at every interval. once: one run now, then end."
    ),
) -> None:
    """Measure acceptance again, test for drift and report."""
    _become(context, "scheduler", [mode.value])


def _become(context: typer.Context, module: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by one of our modules."""
    environment = child_environment(global_options(context), connected_settings(context))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, child_command(module, arguments), environment)  # noqa: S606 - our own interpreter, no shell
