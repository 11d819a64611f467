"""`alphaloop calibrate`: measure what rounds cost on this device."""

from __future__ import annotations

from typing import Final

import typer

from alphaloop.cli.processes import become

EXAMPLE: Final = """\
alphaloop calibrate
alphaloop calibrate --budget 20 --no-store --json"""


def calibrate(
    context: typer.Context,
    budget: float = typer.Option(40.0, min=1.0, help="Seconds of measuring; what is needed may take longer."),
    no_store: bool = typer.Option(False, "--no-store", help="Show only; needs no database."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Measure what rounds cost on this device, in under a minute.

    Times the target's passes and every drafter's proposals over batch sizes, widths and contexts, and the reading of
    prompts, and stores the times for the workers of this device in place of those that they know. Worth it on an idle
    device: a worker measures only what it lacks, at its first start, and learns the rest from its rounds.
    """
    arguments = ["--budget", str(budget), *(["--no-store"] if no_store else []), *(["--json"] if as_json else [])]
    become(context, "worker.calibrate_main", arguments, broker=False, database=not no_store)
