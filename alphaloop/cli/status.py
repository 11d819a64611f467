"""`alphaloop status`: every task at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import typer
from rich.table import Table

from alphaloop.cli.backlog import backlog
from alphaloop.cli.children import LogFollower, child_log, field_of
from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import counts, note, out, print_json, share, share_with_interval, table
from alphaloop.embedded.process import is_listening
from alphaloop.embedded.stack import running_stack
from alphaloop.errors import BrokerError
from alphaloop.settings import Settings
from alphaloop.store.incidents import IncidentStore, OpenIncident
from alphaloop.store.overview import Overview, TaskNow
from alphaloop.switchback.wording import control, figure, load, reason_word

EXAMPLE: Final = """\
alphaloop status
alphaloop status --json"""


def status(
    context: typer.Context,
    hours: float = typer.Option(24.0, min=0.01, help="How far back to look."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Show every task: its jobs, how they are decoded, and the measured speed-up."""
    settings = connected_settings(context)
    with open_database(settings) as database:
        tasks = Overview(database).tasks_now(timedelta(hours=hours))
        incidents = IncidentStore(database).open_incidents()
        addresses = _addresses(settings, database.redacted_url)
    waiting: dict[str, int] | None = None
    try:
        waiting = backlog(settings.kafka)
    except BrokerError as error:
        note(f"the broker does not answer, so waiting jobs are unknown: {error.message}")
    known = {now.task for now in tasks}
    tasks += [TaskNow(task) for task, number in (waiting or {}).items() if number and task not in known]
    if as_json:
        told = [_incident_as_json(one) for one in incidents]
        print_json({"tasks": [task_as_json(now, waiting) for now in tasks], "incidents": told, **addresses})
        return
    if tasks:
        out().print(task_table(tasks, waiting))
    else:
        note(f"no job in the last {hours:g} hours")
    for one in incidents:
        kind = one.found.kind.replace("_", " ")
        note(f"incident since {one.opened_at:%Y-%m-%d %H:%M} UTC, {kind}: {one.found.sentence}")
    out().print()
    for name, address in addresses.items():
        out().print(f"{name:<13}{address}", markup=False, soft_wrap=True)


def task_table(tasks: Sequence[TaskNow], waiting: dict[str, int] | None) -> Table:
    """One row a task, for a terminal of 100 columns."""
    shown = table(
        "task",
        "waits",
        "jobs",
        "mode",
        "k",
        "α₁ [95 %]",
        "α",
        "speed-up [95 %]",
        "reason",
        right=["waits", "k", "α"],
    )
    for now in tasks:
        shown.add_row(
            now.task,
            "-" if waiting is None else str(waiting.get(now.task, 0)),
            counts(now.jobs),
            mode_of(now),
            str(now.num_draft_tokens) if now.mode else "-",
            share_with_interval(now.alpha_1),
            share(now.alpha.mean if now.alpha else None),
            "\n".join(filter(None, (figure(now.measured), load(now.measured), control(now.measured)))),
            reason_word(now.reason, now.measured.verdict if now.measured else None),
        )
    return shown


def mode_of(now: TaskNow) -> str:
    """`vanilla`, the drafter's name, or `-`."""
    return now.drafter or now.mode or "-"


def task_as_json(now: TaskNow, waiting: dict[str, int] | None) -> dict[str, Any]:
    """A task as JSON: counts, and the rates that the table shows."""
    return {
        **asdict(now),
        "waiting": None if waiting is None else waiting.get(now.task, 0),
        "tokens_per_s": now.measured.tokens_per_s if now.measured else None,
        "vanilla_tokens_per_s": now.measured.vanilla_tokens_per_s if now.measured else None,
    }


def _incident_as_json(one: OpenIncident) -> dict[str, Any]:
    return {"opened_at": one.opened_at.isoformat(), **asdict(one.found)}


def _addresses(settings: Settings, database: str) -> dict[str, str]:
    stack = running_stack(settings.data_dir)
    is_embedded = stack is not None and stack.bootstrap_servers == settings.kafka.bootstrap_servers
    shown = {"broker": f"{settings.kafka.bootstrap_servers}", "database": database.replace("+psycopg", "", 1)}
    for module, process in (("worker", settings.worker), ("scheduler", settings.scheduler)):
        # Port 0: the process logs the port that the system chose.
        known = f"http://{process.http_host}:{process.http_port}/metrics" if process.http_port else "-"
        shown[module] = _logged_metrics(settings, module) if is_embedded else known
    return {
        **shown,
        "reports": str(settings.report_folder),
        **({"data": str(settings.data_dir)} if is_embedded else {}),
    }


def _logged_metrics(settings: Settings, module: str) -> str:
    found = LogFollower(child_log(settings, module), from_start=True).find(f"{module}_ready", last=True)
    address = field_of(found, "metrics") if found else None
    port = urlsplit(address).port if address else None
    return f"{address}/metrics" if port and is_listening(port) else "not running"
