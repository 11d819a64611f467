"""`alphaloop status`: every task and every worker at a glance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import typer
from rich.table import Table

from alphaloop.as_decoded import at_load, drafted_by_load, percent, setting
from alphaloop.cli.children import LogFollower, child_log, field_of
from alphaloop.cli.options import AS_JSON, connected_settings, example, open_database
from alphaloop.cli.screen import note, out, paragraph, print_json, show_address, table
from alphaloop.embedded.process import is_listening
from alphaloop.embedded.stack import running_stack
from alphaloop.errors import BrokerError
from alphaloop.experiment.figures import Reliability, by_drafter, reliability
from alphaloop.experiment.wording import computed, draft_lengths, expectations_of_all, figure, load, why
from alphaloop.explaining.explanation import tasks_now
from alphaloop.liveness import url_of
from alphaloop.outcomes.reading import unended
from alphaloop.settings import Settings
from alphaloop.store.drift import IncidentStore, KnownIncident
from alphaloop.store.jobs import RUNNING
from alphaloop.store.lacks import Lack, LackStore
from alphaloop.store.switchback import ExpectationStore
from alphaloop.store.task_figures import TaskFigures, begin_of, waits, with_targets, with_waiting
from alphaloop.store.workers import SeenWorker, WorkerStore, heard_lately
from alphaloop.wording import counted_apart, how_many, minute, rate, share_with_interval, span, words

#: Columns: in a narrower window the table of tasks has columns of these widths.
_WIDE: Final = 120
#: Widths of rounds, α₁ and speed-up: `up to 12`, `[0.45 0.58]` and `1.62 [1.55 1.70]` stand on one line.
_WIDTHS: Final = (8, 11, 16)


@example("""\
alphaloop status
alphaloop status --json""")
def status(
    context: typer.Context,
    hours: float = typer.Option(24.0, min=0.01, help="How far back to look, to the full hour."),
    as_json: bool = AS_JSON,
) -> None:
    """Show the state of all tasks and workers.

    For each task: its jobs, how they were decoded, the measured speed-up, and what the next job would do.

    Among jobs, `waiting` counts those that no worker has claimed; beyond 1000 in a partition it counts offsets,
    transactions' markers and ended jobs too. A refused message counts until what is before it in its partition has
    ended: only the dead letters know of it. `oldest` is the age of the oldest job that has not ended. `held` counts
    those that a worker has claimed, `left` those that it gave back or died with, which wait for the next one; the
    others are traffic that ended. `reused` are those that succeeded with the text of an equal job. `rounds drafted` is
    the share of the traffic's rounds in which a drafter was asked, by load where that made a difference; k is the
    longest draft that a round was allowed. `next job` is what `alphaloop explain` says: what would be decided now at
    the usual load of the last day.
    """
    settings, window = connected_settings(context), timedelta(hours=hours)
    now = _read(settings, window)
    if as_json:
        print_json(now.as_json())
        return
    if now.tasks:
        out().print(task_table(now.tasks, now.waiting, now.ages))
        paragraph(_covers(now.tasks, window), style="dim")
    else:
        note(f"no job in the last {hours:g} hours")
    if now.compared:
        paragraph(expectations_of_all(now.compared))
    out().print()
    for worker in now.workers:
        paragraph(_worker_line(worker))
    if not heard_lately(now.workers):
        note("no worker runs")
    for sentence in (*told_of(now.workers), *told_of_waiting(now.tasks, now.waiting or {})):
        note(sentence, is_prose=True)
    for opened in now.incidents:
        kind, sentence = words(opened.found.kind), opened.found.sentence
        note(f"incident since {minute(opened.opened_at)}, {kind}: {sentence}", is_prose=True)
    for lack in now.lacks:
        note(lack.shown(datetime.now(UTC)), is_prose=True)
    out().print()
    for name, address in now.addresses.items():
        show_address(name, address)


@dataclass(frozen=True, slots=True)
class _Status:
    tasks: Sequence[TaskFigures]
    waiting: dict[str, int] | None  #: by task; None where the broker does not answer
    ages: Mapping[str, float]  #: by task, seconds since the oldest unfinished job was sent
    workers: Sequence[SeenWorker]
    incidents: Sequence[KnownIncident]
    lacks: Sequence[Lack]
    compared: Sequence[Reliability]
    addresses: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "tasks": [{**task.as_json(self.waiting), "oldest_s": self.ages.get(task.task)} for task in self.tasks],
            "workers": [worker.as_json() for worker in self.workers],
            "incidents": [
                {"opened_at": incident.opened_at.isoformat(), **asdict(incident.found)} for incident in self.incidents
            ],
            "lacks": [lack.as_json() for lack in self.lacks],
            "expectations": [asdict(drafter) for drafter in self.compared],
            **self.addresses,
        }


def _read(settings: Settings, window: timedelta) -> _Status:
    waiting: dict[str, int] | None = None
    ages: dict[str, float] = {}
    with open_database(settings) as database:
        tasks = tasks_now(database, settings, window)
        pairs = ExpectationStore(database).shown(datetime.now(UTC))
        workers = WorkerStore(database).seen()
        try:
            backlogs = unended(settings.kafka, database)
            waiting = waits(tasks, {task: backlog.num_messages for task, backlog in backlogs.items()})
            ages = {task: age for task, backlog in backlogs.items() if (age := backlog.oldest_s) is not None}
        except BrokerError as error:
            note(f"the broker does not answer, so waiting jobs are unknown: {error.message}", is_prose=True)
        return _Status(
            tasks=list(with_targets(with_waiting(tasks, waiting), settings.bindings, workers)),
            waiting=waiting,
            ages=ages,
            workers=workers,
            incidents=IncidentStore(database).open_incidents(),
            lacks=LackStore(database).open(),
            compared=[reliability(of_drafter) for of_drafter in by_drafter(pairs).values()],
            addresses=_addresses(settings, database.redacted_url),
        )


def task_table(
    tasks: Sequence[TaskFigures], waiting: dict[str, int] | None, ages: Mapping[str, float] | None = None
) -> Table:
    """One row a task, for a terminal of 80 columns. `ages`: seconds since the oldest unfinished job was sent."""
    shown = table("task", "jobs", "rounds drafted", "α₁ [95 %]", "speed-up [95 %]", "next job")
    is_narrow = out().width < _WIDE
    for column, width in zip(shown.columns[2:5], _WIDTHS if is_narrow else (None, None, None), strict=True):
        column.width = width
    for now in tasks:
        shown.add_row(
            now.task if now.target is None else f"{now.task}\n{now.target}",
            _jobs(now, None if waiting is None else waiting.get(now.task, 0), (ages or {}).get(now.task)),
            _drafted(now),
            _alpha(now, is_narrow=is_narrow),
            _speedup(now),
            _next(now),
        )
    return shown


def _speedup(now: TaskFigures) -> str:
    speedup = now.measured
    return figure(speedup) if speedup is None else f"{figure(speedup)}\n{speedup.drafter}, {load(speedup)}"


def _alpha(now: TaskFigures, *, is_narrow: bool) -> str:
    figure_and_interval = share_with_interval(now.alpha_1).split(" ", 1 if is_narrow else 0)
    return "\n".join(filter(None, (*figure_and_interval, now.alpha_drafter, now.alpha_of)))


def _jobs(now: TaskFigures, num_waiting: int | None, age_s: float | None) -> str:
    """Traffic by status, and what waits; probes and controls stand apart."""
    ended = {status: number for status, number in now.jobs.items() if status != RUNNING}
    lines = [f"{number:,} {status}" for status, number in ended.items() if number] or ["none ended"]
    if now.num_reused:
        lines.append(f"reused: {now.num_reused:,}")
    if now.num_held:
        lines.append(f"{now.num_held:,} held")
    if num_waiting:
        lines.append(f"{num_waiting:,} waiting")
        lines += [] if age_s is None else [f"oldest {span(age_s)}"]
    apart = counted_apart(now.num_probes, now.num_controls)
    return "\n".join([*lines, *([f"apart: {apart}"] if apart else [])])


def _drafted(now: TaskFigures) -> str:
    done = now.decoded
    if done is None:
        return "-"
    lengths = draft_lengths(done.num_draft_tokens or ())
    share = f"{percent(done.drafted_share)}, {lengths}" if lengths else percent(done.drafted_share)
    return "\n".join([share, *drafted_by_load(done)])


def _next(now: TaskFigures) -> str:
    next_job = now.next_job
    return "-" if next_job is None else f"{setting(next_job)}\n{at_load(next_job)}\n{why(next_job)}"


def _covers(tasks: Sequence[TaskFigures], window: timedelta) -> str:
    begin = minute(begin_of(datetime.now(UTC), window))
    legend = (
        f"Jobs, rounds and acceptance: traffic since {begin}; by the sequences that ran where that made a difference. "
        "k: the longest draft that a round was allowed. "
        "Next job: what would be decided now at the usual load of the last day."
    )
    return f"{legend} {computed(now.measured for now in tasks)}".strip()


def _worker_line(worker: SeenWorker) -> str:
    load = worker.load
    speed = "" if load.tokens_per_s is None else f", {rate(load.tokens_per_s)} tokens/s"
    silent = f"silent for {span(worker.silence.total_seconds())}; said last: " if worker.is_silent else ""
    ahead = f", {how_many(load.num_waiting, 'job')} read ahead" if load.num_waiting else ""
    sampling = f"\n  its generation_config.json: {load.sampling_defaults}" if load.sampling_defaults else ""
    doing = f"{len(load.tokens)} running, slots: {load.num_slots}{speed}{ahead}"
    return f"worker {load.owner}: {silent}{doing} ({load.target} on {worker.shown_device}){sampling}"


def told_of_waiting(tasks: Sequence[TaskFigures], waiting: Mapping[str, int]) -> list[str]:
    """Which tasks wait because their target has no worker, a sentence a reason."""
    reasons: dict[str, list[str]] = {}
    for now in tasks:
        if now.not_served is not None and waiting.get(now.task):
            reasons.setdefault(now.not_served, []).append(now.task)
    return [f"{why}: the jobs of {', '.join(names)} wait" for why, names in reasons.items()]


def told_of(workers: Sequence[SeenWorker]) -> list[str]:
    """What needs a look: drafters that are asked no more, jobs held for others, several revisions of one target."""
    sentences, by_target = list[str](), dict[str, Counter[str]]()
    for worker in heard_lately(workers):
        if (setup := worker.load.setup) is not None:
            sentences += [
                f"worker {worker.load.owner} does not ask {name} for {why}" for name, why in setup.ended.items()
            ]
            sentences += [
                f"worker {worker.load.owner} sends {name} nothing new, {held.sentence}"
                for name, held in setup.held.items()
            ]
            by_target.setdefault(worker.load.target, Counter())[setup.facts.target_revision] += 1
    for target, revisions in by_target.items():
        if len(revisions) > 1:
            counted = ", ".join(f"{revision} ({number})" for revision, number in revisions.most_common())
            which = "the target" if len(by_target) == 1 else target
            sentences.append(f"workers serve {len(revisions)} revisions of {which}: {counted}")
    return sentences


def _addresses(settings: Settings, database: str) -> dict[str, str]:
    stack = running_stack(settings.data_dir)
    is_embedded = stack is not None and stack.bootstrap_servers == settings.kafka.bootstrap_servers
    shown = {"broker": f"{settings.kafka.bootstrap_servers}", "database": database}
    console = settings.console
    for name, process in (("worker", settings.worker), ("scheduler", settings.scheduler), ("console", console)):
        # Port 0: the process logs the port that the system chose.
        known = url_of(process.http_host, process.http_port) if process.http_port else None
        address = _logged(settings, name) if is_embedded else known
        path = "" if name == "console" else "/metrics"
        shown[name] = f"{address}{path}" if address else "not running" if is_embedded else "-"
    shown["console"] = (console.public_url or shown["console"]) if console.is_on else "off"
    return {
        **shown,
        "reports": str(settings.report_folder),
        **({"data": str(settings.data_dir)} if is_embedded else {}),
    }


def _logged(settings: Settings, name: str) -> str | None:
    """The address that a process of `alphaloop up` logged at its start; None where nothing listens there."""
    module, field = ("scheduler", name) if name == "console" else (name, "metrics")
    line = LogFollower(child_log(settings, module), from_start=True).find(f"{module}_ready", last=True)
    address = field_of(line, field) if line else None
    found_at = urlsplit(address) if address else None
    return address if found_at and found_at.port and is_listening(found_at.port, f"{found_at.hostname}") else None
