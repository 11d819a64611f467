"""`alphaloop demo`: jobs of real text on this machine, from Kafka to the report."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final

import typer

from alphaloop.cli.kafka_install import fetch_kafka
from alphaloop.cli.options import DATA_DIR, GlobalOptions, global_options
from alphaloop.cli.screen import err, note, out
from alphaloop.demo.flow import Demo
from alphaloop.embedded.install import find_kafka_home
from alphaloop.errors import AlphaloopError, InstallFailed
from alphaloop.settings import Settings

EXAMPLE: Final = """\
alphaloop demo
alphaloop demo --jobs 40 --data-dir /tmp/demo"""

FOLDER: Final = Path(".alphaloop") / "demo"
_INSTALL_S: Final = 60.0
_ADDRESSES: Final = ("KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL")


def demo(
    context: typer.Context,
    jobs: int = typer.Option(26, min=2, max=100, help="Jobs of each task."),
    seed: int = typer.Option(7, help="Seed of the choice of prompts and of exploration."),
    data_dir: Path | None = DATA_DIR,
) -> None:
    """Run alphaloop on this machine on real text, in a few minutes.

    Starts a broker, a database and a worker with a real model under .alphaloop/demo, measures the drafters on probe
    sets, decodes jobs of three tasks, tests for drift, and writes the report. The data is kept.
    """
    options = global_options(context, data_dir)
    options = replace(options, profile=options.profile or "local", data_dir=options.data_dir or FOLDER)
    settings = _embedded(options)
    signal.signal(signal.SIGTERM, _interrupt)
    _try_kafka(settings)
    run = Demo(options, settings, err(), out(), seed, jobs)
    try:
        run.run()
    except AlphaloopError as error:
        note(f"\nThe demo failed while {run.step}. Logs: {settings.data_dir / 'logs'}")
        raise error


def _embedded(options: GlobalOptions) -> Settings:
    """Settings that name no broker and no database: the demo must never send its jobs to a real installation."""
    for name in _ADDRESSES:
        if os.environ.get(name):
            note(f"{name} is set; the demo starts its own all the same")
    settings = options.settings()
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": None})
    postgres = settings.postgres.model_copy(update={"url": None})
    return settings.model_copy(update={"kafka": kafka, "postgres": postgres})


def _try_kafka(settings: Settings) -> None:
    """Fetch Apache Kafka if there is none, for a minute at most; without it the fallback broker runs."""
    if settings.embedded.broker == "tansu" or find_kafka_home(settings) is not None:
        return
    note("no Apache Kafka is here; fetching it, for a minute at most …")
    try:
        fetch_kafka(deadline_s=_INSTALL_S)
    except InstallFailed as error:
        note(f"not fetched: {error.message.splitlines()[0]}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
