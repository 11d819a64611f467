"""`alphaloop probes`: the fixed prompts on which acceptance is measured again."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import typer

from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import note, out, print_json, table
from alphaloop.cli.sending import report_wrong
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.job_lines import BadLine, JobReader
from alphaloop.messages import Job
from alphaloop.probe_sets import new_probe_set
from alphaloop.store.probe_sets import ProbeSetStore

ADD_EXAMPLE: Final = "alphaloop probes add --task code --file probes.jsonl"
LIST_EXAMPLE: Final = "alphaloop probes list --json"


def add(
    context: typer.Context,
    task: str = typer.Option(help="The task that the prompts stand for."),
    file: Path = typer.Option(help="JSONL of prompts, in any form that `alphaloop enqueue` takes."),
) -> None:
    """Make these prompts the task's probe set. Never send them as traffic: a drafter could have seen them.

    The previous set is no longer sent; its history stays. The same prompts again change nothing.
    """
    settings = connected_settings(context, broker=False)
    try:
        items = list(JobReader(settings, task=task).read(file.read_bytes().splitlines(), str(file)))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}", hint="--file takes a JSONL file") from None
    wrong = [item for item in items if isinstance(item, BadLine)]
    jobs = [item.job for item in items if not isinstance(item, BadLine)]
    report_wrong(wrong)
    if strangers := {job.task for job in jobs} - {task}:
        raise AlphaloopError(f"expected prompts of {task}, found some of {', '.join(sorted(strangers))}")
    if wrong or not jobs:
        raise AlphaloopError(f"nothing was registered: {len(wrong)} wrong lines, {len(jobs)} good ones")
    pinned = settings.scheduler
    made = new_probe_set(
        task,
        probe_bodies(jobs),
        num_draft_tokens=pinned.probe_num_draft_tokens,
        max_tokens=pinned.probe_max_tokens,
    )
    with open_database(settings) as database:
        ProbeSetStore(database).register(made, datetime.now(UTC))
    note(f"{task} has a probe set of {len(made.prompts)} prompts, version {made.version}")


def list_sets(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """List the probe set of each task."""
    with open_database(connected_settings(context, broker=False)) as database:
        sets = ProbeSetStore(database).active()
    if as_json:
        print_json([{"task": s.task, "version": s.version, "num_prompts": len(s.prompts)} for s in sets.values()])
        return
    if not sets:
        note("no task has a probe set; `alphaloop probes add` registers one")
        return
    shown = table("task", "prompts", "version", right=["prompts"])
    for found in sets.values():
        shown.add_row(found.task, str(len(found.prompts)), found.version)
    out().print(shown)


def probe_bodies(jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """The bodies as they are stored, in OpenAI's form."""
    return [job.body.model_dump(mode="json", exclude_defaults=True, exclude_none=True) for job in jobs]
