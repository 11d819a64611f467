"""`alphaloop probes`: the fixed prompts on which acceptance is measured again. No command shows their text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import typer
from rich.table import Table

from alphaloop.cli.enqueue import report_wrong
from alphaloop.cli.explain import check_task
from alphaloop.cli.options import AS_JSON, connected_settings, example, open_database, require_tasks
from alphaloop.cli.screen import note, out, print_json, show_rows, table
from alphaloop.client.arrivals import everything_on
from alphaloop.errors import AlphaloopError, ConfigError, MessageError, UnknownName
from alphaloop.files import reading
from alphaloop.job_lines import BadLine, JobReader
from alphaloop.kafka.topics import cluster_id
from alphaloop.messages import Job, Origin, parse_job
from alphaloop.messages.topics import jobs_topic
from alphaloop.probe_plan import Measurement, ProbePlan, ProbePlanner
from alphaloop.probes import DEFAULT_K, DEFAULT_MAX_TOKENS, ProbeSet, draw_prompts, new_probe_set
from alphaloop.settings import Settings
from alphaloop.store.database import DatabaseClock
from alphaloop.store.probes import ProbeSetStore, ProbeSetVersion
from alphaloop.wording import how_many

_K: Final = typer.Option(None, "--k", min=1, max=64, help="k of its probes; the setting's, if left out.")
_MAX_TOKENS: Final = typer.Option(None, min=8, help="Output limit of its probes; the setting's, if left out.")


@example("alphaloop probes register probes.jsonl --task code")
def register(
    context: typer.Context,
    file: Path = typer.Argument(
        help="JSONL of prompts, in any form that `alphaloop enqueue` takes; - for standard input."
    ),
    task: str = typer.Option(help="The task that the prompts stand for."),
    num_draft_tokens: int | None = _K,
    max_tokens: int | None = _MAX_TOKENS,
) -> None:
    """Register prompts as the task's probe set. Never send them as traffic: a drafter could have seen them.

    The version before is no longer sent; its history stays, and is compared over the prompts that both versions have.
    The same prompts again change nothing.
    """
    settings = connected_settings(context, broker=False)
    jobs = _read_file(settings, file, task)
    _put_in_use(settings, task, jobs, num_draft_tokens, max_tokens, is_drawn=False)


@example("alphaloop probes draw --task code --prompts 40")
def draw(
    context: typer.Context,
    task: str = typer.Option(help="The task whose jobs are drawn from."),
    prompts: int = typer.Option(40, min=2, help="How many prompts to draw."),
    newest: int = typer.Option(2000, min=1, help="How many jobs of each partition to draw from, the newest."),
    seed: int = typer.Option(0, help="Another seed draws other prompts."),
    num_draft_tokens: int | None = _K,
    max_tokens: int | None = _MAX_TOKENS,
) -> None:
    """Draw the task's probe set from the jobs that lie in Kafka, as many of each length.

    Needs the task's consent, `probes_from_traffic = true`: the prompts are kept in the database until the version is
    deleted, and are decoded again and again. No command and no report shows their text.
    """
    settings = connected_settings(context)
    drawn = draw_prompts(list(_read_traffic(settings, task, newest)), prompts, seed)
    if len(drawn) < prompts:
        raise AlphaloopError(f"expected {prompts} different prompts in {jobs_topic(task)}, found {len(drawn)}")
    _put_in_use(settings, task, drawn, num_draft_tokens, max_tokens, is_drawn=True)


@example("alphaloop probes list --json")
def list_sets(
    context: typer.Context,
    task: str | None = typer.Option(None, help="Only this task's."),
    as_json: bool = AS_JSON,
) -> None:
    """List the versions of every task's probe set, the newest first."""
    settings = connected_settings(context, broker=False)
    with open_database(settings) as database:
        check_task(database, settings, task)
        versions = ProbeSetStore(database).versions(task)
    show_rows(
        versions,
        *("task", "version", "in use", "prompts", "k", "source", "registered"),
        right=["prompts", "k"],
        cells=_version_cells,
        nothing="no task has a probe set; `alphaloop probes register` makes one",
        as_json=as_json,
        row_as_json=_version_as_json,
    )


@example("""\
alphaloop probes show code
alphaloop probes show code --against 1f0c3a59d2b7e684""")
def show(
    context: typer.Context,
    task: str = typer.Argument(help="The task."),
    version: str | None = typer.Option(None, help="The version to show; the one in use, if left out."),
    against: str | None = typer.Option(None, help="Another version, of which the differences are shown."),
    as_json: bool = AS_JSON,
) -> None:
    """Show the prompts of a probe set by their ids and lengths, and which of them another version has.

    Runs of two versions are compared over the prompts that both have. Texts are not shown.
    """
    with open_database(connected_settings(context, broker=False)) as database:
        store = ProbeSetStore(database)
        shown = _version(store, task, version)
        other = _version(store, task, against) if against else None
    ours = {prompt.prompt_id for prompt in shown.prompts.values()}
    theirs = {prompt.prompt_id for prompt in other.prompts.values()} if other else ours
    lines: list[dict[str, Any]] = [
        {"position": position, "prompt_id": prompt.prompt_id, "num_chars": _num_chars(prompt.body)}
        | ({"is_shared": prompt.prompt_id in theirs} if other else {})
        for position, prompt in sorted(shown.prompts.items())
    ]
    if as_json:
        print_json({"task": task, "version": shown.version, "against": other and other.version, "prompts": lines})
        return
    columns = ["position", "prompt", "characters", *(["in both"] if other else [])]
    title = f"{shown.task} {shown.version}, k={shown.num_draft_tokens}, from {shown.source.value}"
    shown_table = table(*columns, right=["position", "characters"], title=title)
    for line in lines:
        in_both = ["yes" if line["is_shared"] else "no"] if other else []
        shown_table.add_row(str(line["position"]), line["prompt_id"], str(line["num_chars"]), *in_both)
    out().print(shown_table)
    if other is not None:
        both = how_many(len(ours & theirs), "prompt")
        comparison = f"{both} in both, {len(ours - theirs)} only here, {len(theirs - ours)} only there"
        here, there = shown.num_draft_tokens, other.num_draft_tokens
        note(comparison + (f"; not compared, because k is {here} here and {there} there" if here != there else ""))


@example("alphaloop probes plan")
def plan(
    context: typer.Context,
    as_json: bool = AS_JSON,
) -> None:
    """Show which probes the scheduler's next run would send, why, in which order, and what the budget holds back."""
    settings = connected_settings(context, broker=False)
    with open_database(settings) as database:
        planner = ProbePlanner(database, settings)
        planned = planner.plan(planner.sets(), DatabaseClock(database).measure())
    if as_json:
        measurements = [_measurement_as_json(measurement) for measurement in planned.measurements]
        print_json({"budget_device_s": round(planned.budget_device_s, 3), "measurements": measurements})
    elif not planned.num_probe_sets:
        note("no task has a probe set; `alphaloop probes register` makes one")
    else:
        if planned.measurements:
            out().print(_plan_table(planned))
        note(_plan_sentence(planned))


def _put_in_use(
    settings: Settings,
    task: str,
    jobs: Sequence[Job],
    num_draft_tokens: int | None,
    max_tokens: int | None,
    *,
    is_drawn: bool,
) -> None:
    k, most = num_draft_tokens or DEFAULT_K, max_tokens or DEFAULT_MAX_TOKENS
    bodies = [job.body.model_dump(mode="json", exclude_defaults=True, exclude_none=True) for job in jobs]
    made = new_probe_set(task, bodies, num_draft_tokens=k, max_tokens=most, drawn_from=jobs if is_drawn else ())
    with open_database(settings) as database:
        ProbeSetStore(database).register(made, datetime.now(UTC))
    prompts = how_many(len(made.prompts), "prompt")
    note(f"{task} has a probe set of {prompts} at k={made.num_draft_tokens}, version {made.version}")


def _version(store: ProbeSetStore, task: str, version: str | None) -> ProbeSet:
    probe_set = store.active().get(task) if version is None else store.get(task, version)
    if probe_set is None:
        wanted = f"version {version} of {task}" if version else f"probe set of {task} in use"
        raise UnknownName(f"no {wanted}", hint="`alphaloop probes list` shows what there is")
    return probe_set


def _read_file(settings: Settings, file: Path, task: str) -> list[Job]:
    """Every prompt of a JSONL file, or an error: a set with a prompt missing would be another set."""
    with reading(file, say=note) as source:
        items = list(JobReader(settings, task=task).read(source.lines, source.name))
    wrong = [item for item in items if isinstance(item, BadLine)]
    jobs = [item.job for item in items if not isinstance(item, BadLine)]
    report_wrong(wrong)
    if strangers := {job.task for job in jobs} - {task}:
        raise AlphaloopError(f"expected prompts of {task}, found some of {', '.join(sorted(strangers))}")
    if wrong or not jobs:
        raise AlphaloopError(f"nothing was registered: {len(wrong)} wrong lines, {len(jobs)} good ones")
    return jobs


def _read_traffic(settings: Settings, task: str, newest: int) -> Iterator[Job]:
    """The newest jobs of a task, `newest` of each partition. Raises ConfigError without the task's consent.

    Messages that are no jobs are passed over.
    """
    require_tasks(settings, [task])
    if not settings.tasks[task].probes_from_traffic:
        raise ConfigError(
            f"tasks.{task}.probes_from_traffic: expected true, found false",
            hint="set it if prompts of this task may be stored and decoded again; else register a file of prompts",
        )
    topic, cluster = jobs_topic(task), cluster_id(settings.kafka)
    for record in everything_on(settings.kafka, [topic], newest=newest):
        with suppress(MessageError):
            yield parse_job(record.value, Origin(cluster, topic, record.partition, record.offset), task=task)


def _version_as_json(version: ProbeSetVersion) -> dict[str, Any]:
    """One version for machines."""
    fields = asdict(version)
    return {"in_use": fields.pop("is_active"), **fields, "created_at": version.created_at.isoformat()}


def _version_cells(version: ProbeSetVersion) -> list[str]:
    in_use, registered = "yes" if version.is_active else "", f"{version.created_at:%Y-%m-%d %H:%M}"
    numbers = [str(version.num_prompts), str(version.num_draft_tokens)]
    return [version.task, version.version, in_use, *numbers, version.source.value, registered]


def _plan_table(plan: ProbePlan) -> Table:
    """The measurements in their order."""
    numbers = ["k", "decoded", "scored", "device s", "at stake s"]
    shown = table("task", "drafter", "k", "why", *numbers[1:], "last measured", "sent", right=numbers)
    for measurement in plan.measurements:
        due, num_decoded = measurement.due, measurement.num_decoded
        counts = due.num_draft_tokens, due.why.value, num_decoded, measurement.num_prompts - num_decoded
        device_s = f"{measurement.device_s:.1f}", f"{due.at_stake_device_s:.1f}"
        last = f"{due.last_probed:%Y-%m-%d %H:%M}" if due.last_probed else "never"
        sent = "yes" if measurement.is_sent else "waits"
        shown.add_row(due.task, due.drafter, *map(str, counts), *device_s, last, sent)
    return shown


def _plan_sentence(plan: ProbePlan) -> str:
    """What the next run sends, and what it may take."""
    if not plan.measurements:
        return "nothing is due: every drafter of a live worker has fresh evidence"
    needed = sum(measurement.device_s for measurement in plan.measurements if measurement.is_sent)
    head = f"the next run sends {len(plan.chosen)} of {len(plan.measurements)} measurements"
    return f"{head}, {needed:.1f} of {plan.budget_device_s:.1f} device seconds"


def _measurement_as_json(measurement: Measurement) -> dict[str, Any]:
    fields = asdict(measurement)
    flat = fields.pop("due") | fields
    del flat["is_scored"]
    times = {name: round(flat[name], 3) for name in ("device_s", "at_stake_device_s")}
    return {**flat, **times, "last_probed": flat["last_probed"] and flat["last_probed"].isoformat()}


def _num_chars(body: Mapping[str, Any]) -> int:
    asked = body.get("prompt")
    return len(asked) if isinstance(asked, str) else len(json.dumps(body.get("messages"), ensure_ascii=False))
