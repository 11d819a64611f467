"""`alphaloop worker` and `alphaloop scheduler`: become that process.

The command line imports neither (both load what a laptop without a model does not need), so it replaces itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NoReturn

import typer

from alphaloop.cli.options import GlobalOptions, connected_settings, global_options
from alphaloop.settings import Settings

WORKER_EXAMPLE: Final = "KAFKA_BOOTSTRAP_SERVERS=kafka:9092 DATABASE_URL=postgresql://… alphaloop worker"
SCHEDULER_EXAMPLE: Final = "alphaloop scheduler once"


class SchedulerMode(StrEnum):
    """How long the scheduler stays."""

    RUN = "run"
    ONCE = "once"


def worker(context: typer.Context) -> None:
    """Decode jobs until told to stop. SIGTERM finishes the running batch first."""
    _become(context, "worker", [])


def scheduler(
    context: typer.Context,
    mode: SchedulerMode = typer.Argument(
        SchedulerMode.RUN, help="run: stay and measure at every interval. once: one run now, then end."
    ),
) -> None:
    """Re-measure acceptance, look for drift and report."""
    _become(context, "scheduler", [mode.value])


def child_environment(options: GlobalOptions, settings: Settings) -> dict[str, str]:
    """The environment in which a child reads the same settings and finds the same broker and database.

    Addresses travel in the environment, not in arguments: arguments are visible to everyone on the machine.
    """
    environment = options.environment()
    environment["ALPHALOOP_DATA_DIR"] = str(settings.data_dir)
    if settings.kafka.bootstrap_servers is not None:
        environment["KAFKA_BOOTSTRAP_SERVERS"] = settings.kafka.bootstrap_servers
    if settings.postgres.url is not None:
        environment["DATABASE_URL"] = settings.postgres.url.get_secret_value()
    return environment


def _become(context: typer.Context, module: str, arguments: Sequence[str]) -> NoReturn:
    options = global_options(context)
    settings = connected_settings(context)
    command = [sys.executable, "-m", module, *options.arguments(), *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, child_environment(options, settings))  # noqa: S606 - our own interpreter, no shell
