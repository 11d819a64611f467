"""The report for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from alphaloop.as_decoded import at_load, drafted_by_load, percent, setting
from alphaloop.experiment.wording import expectations, sentence, why
from alphaloop.probe_plan import Why
from alphaloop.wording import share, words
from scheduler.report.data import DriftReport, TaskLine
from scheduler.report.wording import (
    apart_from_traffic,
    cost_of_all,
    cost_of_jobs,
    costs,
    estimate,
    freshness,
    gap_lines,
    measured_with,
    probe_spend,
    saved,
    told_changes,
)

WIDTH: Final = 80
_WHY: Final = {Why.ALARM: "an alarm", Why.NEW: "something new", Why.AGE: "age"}
HEADER: Final = ("task", "jobs", "drafted", "α_1", "α")
_LEGEND: Final = (
    "jobs: traffic of the last day.",
    "drafted: share of its rounds in which a drafter was asked.",
    "α_1: acceptance of its first drafted tokens [95 %].",
    "α: pooled over positions, at its k.",
)
RIGHT: Final = frozenset({1, 2})


def render_text(report: DriftReport) -> str:
    """The report as plain text, ending with a newline."""
    parts = [
        f"alphaloop report, {report.created_at:%Y-%m-%d %H:%M} UTC",
        *textwrap.wrap(report.headline, WIDTH),
        f"Window: {report.covers_from:%Y-%m-%d %H:%M} to {report.covers_to:%Y-%m-%d %H:%M} UTC.",
        *(line for told in freshness(report) for line in textwrap.wrap(told, WIDTH)),
        "",
        "What changed",
        *_changes(report),
        "",
    ]
    if report.tasks:
        parts += _table([HEADER, *(_row(line) for line in report.tasks)])
        parts += ["", *textwrap.wrap(" ".join((*_LEGEND, apart_from_traffic(report))), WIDTH), ""]
        parts += ["Next job, as it would be decided now at the usual load of the last day", *_next_jobs(report), ""]
    if report.incidents:
        parts += ["Incidents", *_incidents(report), ""]
    parts += ["Measured speed-up", *_measured(report), ""]
    if report.expectations:
        parts += ["Expected and measured speed-up", *_expectations(report), ""]
    if report.tasks:
        parts += ["Saved by speculation", *_saved(report), ""]
        parts += ["Cost", *_cost(report), ""]
    if report.gaps:
        parts += ["Not measured", *(f"  {told}" for told in gap_lines(report)), ""]
    parts += ["Drift", *_drift(report), ""]
    parts += ["Probes", *_probes(report), ""]
    parts += ["Drafts", *_drafts(report)]
    return "\n".join(line.rstrip() for line in parts) + "\n"


def _changes(report: DriftReport) -> list[str]:
    lines = [f"  {told_changes(report.changes)}"]
    for line in report.changes.lines:
        lines += textwrap.wrap(line.sentence, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return lines


def _row(line: TaskLine) -> tuple[str, ...]:
    return (
        line.task,
        str(line.num_jobs),
        percent(line.done.drafted_share) if line.done else "-",
        estimate(line.alpha_1),
        f"{share(line.alpha.mean)} ({measured_with(line)})" if line.alpha else "-",
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    # If the line would be too long, first the gaps shrink, then the task names, the only cells of any length.
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    spare = WIDTH - sum(widths[1:]) - len(gap) * (len(widths) - 1)
    widths[0] = max(8, min(widths[0], spare))
    lines = []
    for row in rows:
        cells = [_fit(row[0], widths[0]), *row[1:]]
        aligned = (
            cell.rjust(width) if i in RIGHT else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        lines.append(gap.join(aligned))
    lines.insert(1, "-" * min(WIDTH, max(len(line.rstrip()) for line in lines)))
    return lines


def _next_jobs(report: DriftReport) -> list[str]:
    """What the next job of each task would do; where load made a difference, what was done at each."""
    lines = []
    for line in report.tasks:
        next_job, found = line.next_job, drafted_by_load(line.done)
        told = f"{line.task}: {setting(next_job)}"
        if next_job is not None:
            told += f" {at_load(next_job)}, {why(line.reason or None, line.drafter, line.measured)}"
        told += f". In the last day {', '.join(found)} running drafted." if found else ""
        lines += _item(told)
    return lines


def _item(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _fit(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 1] + "…"


def _measured(report: DriftReport) -> list[str]:
    """The speed-ups measured by the switchback experiment in the last day."""
    lines = [
        line
        for task in report.tasks
        if task.measured is not None
        for line in _item(f"{task.task}: {sentence(task.measured.drafter, task.measured)}")
    ]
    return lines or ["  no verdict yet: no slice of the switchback experiment was recorded in the last day"]


def _expectations(report: DriftReport) -> list[str]:
    return [line for one in report.expectations for line in _item(f"{one.task}: {expectations(one)}")]


def _saved(report: DriftReport) -> list[str]:
    return [line for task in report.tasks for line in _item(f"{task.task}: {saved(task)}")]


def _cost(report: DriftReport) -> list[str]:
    told = [cost_of_all(report)]
    if report.device_cost_per_hour is not None:
        told += [f"{task.task}: {cost_of_jobs(task, report.currency)}" for task in report.tasks]
    return [line for one in told for line in _item(one)]


def _drift(report: DriftReport) -> list[str]:
    changed = f"  {report.opened} opened and {report.closed} closed by this run."
    if not report.drift:
        return ["  None is open.", changed]
    lines = []
    for line in report.drift:
        head = (
            f"{line.id}. {line.task}, {line.drafter}: {words(line.cause)}, {line.state}, "
            f"since {line.opened_at:%Y-%m-%d %H:%M} UTC; {costs(line)}"
        )
        lines += _item(head)
        for told in (line.verdict, line.action):
            lines += textwrap.wrap(told, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return [*lines, changed]


def _incidents(report: DriftReport) -> list[str]:
    lines = []
    for one in report.incidents:
        since = f"since {one.opened_at:%Y-%m-%d %H:%M} UTC, {one.num_jobs} jobs"
        told = f"{one.kind.replace('_', ' ')}, {since}: {one.sentence}"
        lines += _item(told)
    return lines


def _probes(report: DriftReport) -> list[str]:
    if not report.num_probe_sets:
        return ["  No task has a probe set, so a stale draft cannot be distinguished from changed traffic."]
    lines = [
        f"  {line.task}, {line.drafter} at k={line.num_draft_tokens}: {line.num_probes} sent"
        + (f" and {line.num_scored} scored" if line.num_scored else "")
        + f" for {_WHY[line.why]}, "
        + (f"last measured {line.last_probed:%Y-%m-%d %H:%M} UTC" if line.last_probed else "never measured before")
        for line in report.probes
    ]
    if report.probes_waiting:
        waiting = ", ".join(f"{line.task} {line.drafter}" for line in report.probes_waiting)
        budget = f"of {report.probe_budget_device_s:.0f} device seconds"
        lines += _item(f"Held back by the budget {budget}: {waiting}.")
    return [
        *(lines or ["  None was due: every drafter of a task with a probe set has fresh evidence."]),
        f"  {probe_spend(report)}",
    ]


def _drafts(report: DriftReport) -> list[str]:
    lines = []
    for d in report.drafts:
        why = f": {d.status_reason}" if d.status_reason else ""
        draft_line = f"{d.drafter} {d.draft_revision} for target {d.target_revision}: {d.status}{why}"
        lines += _item(draft_line)
    return lines or ["  No worker has registered one."]
