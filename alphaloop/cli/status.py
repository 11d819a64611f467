"""`alphaloop status`: every task and every worker at a glance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import typer
from rich.table import Table

from alphaloop.cli.children import LogFollower, child_log, field_of
from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import note, out, paragraph, print_json, table
from alphaloop.embedded.process import is_listening
from alphaloop.embedded.stack import running_stack
from alphaloop.endpoint import url_of
from alphaloop.errors import BrokerError
from alphaloop.kafka.backlog import backlog, oldest
from alphaloop.settings import Settings
from alphaloop.store.claims import RUNNING
from alphaloop.store.expectations import ExpectationStore
from alphaloop.store.incidents import IncidentStore, OpenIncident
from alphaloop.store.overview import Overview, TaskNow, waits, with_waiting
from alphaloop.store.task_figures import begin_of
from alphaloop.store.workers import SeenWorker, WorkerStore
from alphaloop.switchback.reliability import by_drafter, reliability
from alphaloop.switchback.wording import (
    another,
    computed,
    control,
    draft_lengths,
    expectations_of_all,
    figure,
    load,
    why,
)
from alphaloop.wording import counted_apart, counts, rate, share, share_with_interval

#: A worker says every two seconds what it does; one that is silent for so long may be in a long step, or dead.
_SILENT_S: Final = 15.0
EXAMPLE: Final = """\
alphaloop status
alphaloop status --json"""


def status(
    context: typer.Context,
    hours: float = typer.Option(24.0, min=0.01, help="How far back to look, to the full hour."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Show every task, its jobs, how they are decoded, and the measured speed-up; and every worker with its load.

    `waits` counts jobs that no worker has claimed, with the age of the oldest; `held` those that a worker has claimed;
    `ended` those of traffic, with the number of probes and controls below.
    """
    settings = connected_settings(context)
    with open_database(settings) as database:
        tasks = Overview(database).tasks_now(timedelta(hours=hours))
        incidents = IncidentStore(database).open_incidents()
        pairs = ExpectationStore(database).shown(datetime.now(UTC))
        compared = [reliability(its) for its in by_drafter(pairs).values()]
        workers = WorkerStore(database).seen()
        addresses = _addresses(settings, database.redacted_url)
    waiting: dict[str, int] | None = None
    ages: dict[str, float] = {}
    try:
        waiting = waits(tasks, backlog(settings.kafka))
        ages = oldest(settings.kafka)
    except BrokerError as error:
        note(f"the broker does not answer, so waiting jobs are unknown: {error.message}")
    tasks = with_waiting(tasks, waiting)
    if as_json:
        told = [_incident_as_json(one) for one in incidents]
        shown = [{**now.as_json(waiting), "oldest_s": ages.get(now.task)} for now in tasks]
        seen = [one.as_json() for one in workers]
        expected = [asdict(one) for one in compared]
        print_json({"tasks": shown, "workers": seen, "incidents": told, "expectations": expected, **addresses})
        return
    if tasks:
        out().print(task_table(tasks, waiting, ages))
        paragraph(_covers(tasks, timedelta(hours=hours)), style="dim")
    else:
        note(f"no job in the last {hours:g} hours")
    if compared:
        paragraph(expectations_of_all(compared))
    out().print()
    for worker in workers:
        out().print(_worker_line(worker), markup=False, soft_wrap=True)
    if not workers:
        note("no worker runs")
    for incident in incidents:
        kind = incident.found.kind.replace("_", " ")
        note(f"incident since {incident.opened_at:%Y-%m-%d %H:%M} UTC, {kind}: {incident.found.sentence}")
    out().print()
    for name, address in addresses.items():
        out().print(f"{name:<13}{address}", markup=False, soft_wrap=True)


def task_table(
    tasks: Sequence[TaskNow], waiting: dict[str, int] | None, ages: Mapping[str, float] | None = None
) -> Table:
    """One row a task, for a terminal of 100 columns. `ages`: seconds since the oldest unfinished job was sent."""
    shown = table(
        "task",
        "waits",
        "held",
        "ended",
        "mode",
        "k",
        "α₁ [95 %]",
        "α",
        "speed-up [95 %]",
        "reason",
        right=["waits", "held", "k", "α"],
    )
    for now in tasks:
        shown.add_row(
            now.task,
            "-" if waiting is None else _waits(waiting.get(now.task, 0), (ages or {}).get(now.task)),
            str(now.num_held),
            _ended(now),
            mode_of(now),
            str(now.num_draft_tokens) if now.mode else "-",
            _alpha_1(now),
            f"{share(now.alpha.mean)}\n{draft_lengths(now.alpha_num_draft_tokens or ())}" if now.alpha else "-",
            _speedup(now),
            why(now.reason, now.drafter, now.measured),
        )
    return shown


def _ended(now: TaskNow) -> str:
    """Traffic that ended, by status; probes and controls stand apart."""
    ended = counts({status: number for status, number in now.jobs.items() if status != RUNNING})
    return "\n".join(filter(None, (ended, counted_apart(now.num_probes, now.num_controls))))


def _alpha_1(now: TaskNow) -> str:
    """With the drafter, where another one is in force."""
    drafter = now.alpha_drafter if now.alpha_drafter != now.drafter else None
    return "\n".join(filter(None, (share_with_interval(now.alpha_1), drafter)))


def _speedup(now: TaskNow) -> str:
    its = now.measured
    return "\n".join(filter(None, (figure(its), another(its, now.drafter), load(its), control(its))))


def _covers(tasks: Sequence[TaskNow], window: timedelta) -> str:
    begin = f"{begin_of(datetime.now(UTC), window):%Y-%m-%d %H:%M} UTC"
    return f"Jobs and acceptance of traffic since {begin}. {computed(now.measured for now in tasks)}".strip()


def _waits(number: int, age_s: float | None) -> str:
    return f"{number}\n{_age(age_s)}" if number and age_s is not None else str(number)


def _age(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h`, `2 d`."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _worker_line(one: SeenWorker) -> str:
    load = one.load
    speed = "" if load.tokens_per_s is None else f", {rate(load.tokens_per_s)} tokens/s"
    silence_s = one.silence.total_seconds()
    silent = "" if silence_s < _SILENT_S else f"; silent for {_age(silence_s)}"
    return (
        f"worker {load.owner}: decodes in {len(load.tokens)} of {load.num_slots} slots{speed}, "
        f"{load.num_waiting} more taken from Kafka ({load.target} on {load.device}){silent}"
    )


def mode_of(now: TaskNow) -> str:
    """`vanilla`, the drafter's name, or `-`."""
    return now.drafter or now.mode or "-"


def _incident_as_json(one: OpenIncident) -> dict[str, Any]:
    return {"opened_at": one.opened_at.isoformat(), **asdict(one.found)}


def _addresses(settings: Settings, database: str) -> dict[str, str]:
    stack = running_stack(settings.data_dir)
    is_embedded = stack is not None and stack.bootstrap_servers == settings.kafka.bootstrap_servers
    shown = {"broker": f"{settings.kafka.bootstrap_servers}", "database": database}
    for module, process in (("worker", settings.worker), ("scheduler", settings.scheduler)):
        # Port 0: the process logs the port that the system chose.
        known = f"{url_of(process.http_host, process.http_port)}/metrics" if process.http_port else "-"
        shown[module] = _logged_metrics(settings, module) if is_embedded else known
    return {
        **shown,
        "reports": str(settings.report_folder),
        **({"data": str(settings.data_dir)} if is_embedded else {}),
    }


def _logged_metrics(settings: Settings, module: str) -> str:
    found = LogFollower(child_log(settings, module), from_start=True).find(f"{module}_ready", last=True)
    address = field_of(found, "metrics") if found else None
    found_at = urlsplit(address) if address else None
    is_up = found_at and found_at.port and is_listening(found_at.port, f"{found_at.hostname}")
    return f"{address}/metrics" if is_up else "not running"
