"""The report for a terminal of 80 columns, as one self-contained page, and the folder of reports: three files a run,
`latest.html` and `index.html`.

A page has no script and fetches nothing; everything from outside is escaped.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import Final

from markupsafe import Markup

from alphaloop.as_decoded import at_load, drafted_by_load, percent, setting
from alphaloop.errors import ConfigError
from alphaloop.experiment.wording import expectations, sentence, why
from alphaloop.files import replace_file
from alphaloop.pages.drawing import RatioBar, alpha_of_tasks, environment, ratios_by_task
from alphaloop.probe_plan import Why
from alphaloop.store.reports import ReportHeading
from alphaloop.wording import how_many, minute, money, share, share_with_interval, words
from scheduler.report.data import DraftLine, DriftReport, ExpectationLine, IncidentLine, RefreshReport, TaskLine
from scheduler.report.wording import (
    apart_from_traffic,
    cost_of_all,
    cost_of_jobs,
    cost_of_owner,
    cost_saved,
    costs,
    freshness,
    gap_lines,
    measured_with,
    none_sent,
    probe_spend,
    saved,
    told_changes,
)

WIDTH: Final = 80
_WHY: Final = {Why.ALARM: "an alarm", Why.NEW: "something new", Why.AGE: "age"}
HEADER: Final = ("task", "jobs", "drafted", "α₁", "α")
_LEGEND: Final = (
    "jobs: traffic of the last day.",
    "drafted: share of its rounds in which a drafter was asked.",
    "α₁: acceptance of its first drafted tokens [95 %].",
    "α: pooled over positions, at its k, the longest draft that a round was allowed.",
)
RIGHT: Final = frozenset({1, 2})


def render_text(report: DriftReport) -> str:
    """The report as plain text, ending with a newline."""
    parts = [
        f"alphaloop report, {minute(report.created_at)}",
        *_wrapped([report.headline], ""),
        f"Window: {report.covers_from:%Y-%m-%d %H:%M} to {report.covers_to:%Y-%m-%d %H:%M} UTC.",
        *_wrapped(freshness(report), ""),
    ]

    def chapter(title: str, lines: Iterable[str]) -> None:
        parts.extend(["", title, *lines])

    changes = (line.sentence for line in report.changes.lines)
    chapter("What changed", [*_items([told_changes(report.changes)]), *_items(changes, "  - ")])
    if report.tasks:
        parts += ["", *_table([HEADER, *(_row(line) for line in report.tasks)])]
        parts += ["", *_wrapped([" ".join((*_LEGEND, apart_from_traffic(report)))], "")]
        chapter(
            "Next job, as it would be decided now at the usual load of the last day",
            _items(map(_next_job, report.tasks)),
        )
    if report.incidents:
        chapter("Incidents", _items(map(_incident, report.incidents)))
    if report.lacks:
        chapter("Deadlines that will be missed", _items(line.sentence for line in report.lacks))
    measured = [(line.task, line.measured) for line in report.tasks if line.measured]
    no_verdict = "no verdict yet: no slice of the switchback experiment was recorded in the last day"
    speedups = [f"{task}: {sentence(speedup.drafter, speedup)}" for task, speedup in measured]
    chapter("Measured speed-up", _items(speedups or [no_verdict]))
    if report.expectations:
        pairs = (f"{line.task}: {expectations(line)}" for line in report.expectations)
        chapter("Expected and measured speed-up", _items(pairs))
    if report.tasks:
        chapter("Saved by speculation", _items(f"{line.task}: {saved(line)}" for line in report.tasks))
        priced = report.tasks if report.cost is not None else ()
        jobs = (f"{line.task}: {cost_of_jobs(line, report.currency)}" for line in priced)
        owners = (cost_of_owner(line, report.currency) for line in report.spending)
        chapter("Cost", _items([cost_of_all(report), *jobs, *owners]))
    if report.gaps:
        chapter("Not measured", _items(gap_lines(report)))
    chapter("Drift", _drift(report))
    chapter("Probes", _probes(report))
    chapter("Drafts", _items(map(_draft, report.drafts)) or ["  No worker has registered one."])
    if report.refreshes:
        chapter("Drafts trained anew", _items(map(_refresh, report.refreshes)))
    return "\n".join(line.rstrip() for line in parts) + "\n"


def _incident(line: IncidentLine) -> str:
    return f"{words(line.kind)}, since {minute(line.opened_at)}, {how_many(line.num_jobs, 'job')}: {line.sentence}"


def _draft(line: DraftLine) -> str:
    return f"{line.name}: {line.status}{f': {line.status_reason}' if line.status_reason else ''}"


def _refresh(line: RefreshReport) -> str:
    candidate = f" as {line.candidate_name}" if line.candidate_name else ""
    state = f"{words(line.state)}{candidate}, {words(line.reason)}"
    said = "; ".join(part for part in (line.in_words, line.rates) if part)
    return f"{line.drafter} for target {line.target_revision}: {state}{f': {said}' if said else ''}"


def _row(line: TaskLine) -> tuple[str, ...]:
    return (
        line.task,
        str(line.num_jobs),
        percent(line.done.drafted_share) if line.done else "-",
        share_with_interval(line.alpha_1),
        f"{share(line.alpha.mean)} ({measured_with(line)})" if line.alpha else "-",
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    # If the line would be too long, first the gaps shrink, then the task names; then the last cells are broken.
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    room = WIDTH - len(gap) * (len(widths) - 1)
    widths[0] = max(8, min(widths[0], room - sum(widths[1:])))
    widths[-1] = min(widths[-1], room - sum(widths[:-1]))
    lines = []
    for row in rows:
        last, *more = textwrap.wrap(row[-1], widths[-1])
        cells = [row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "…", *row[1:-1], last]
        aligned = (
            cell.rjust(width) if i in RIGHT else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        lines += [gap.join(aligned), *(" " * (WIDTH - room + sum(widths[:-1])) + part for part in more)]
    lines.insert(1, "-" * min(WIDTH, max(len(line.rstrip()) for line in lines)))
    return lines


def _next_job(line: TaskLine) -> str:
    """What the next job of a task would do; where load made a difference, what was done at each."""
    next_job, loads = line.next_job, drafted_by_load(line.done)
    text = f"{line.task}{f' on {line.target}' if line.target else ''}: {setting(next_job)}"
    if next_job is not None:
        text += f" {at_load(next_job)}, {why(next_job)}"
    text += f"; {line.not_served}" if line.not_served else ""
    return text + (f". In the last day {', '.join(loads)} running drafted." if loads else "")


def _items(sentences: Iterable[str], indent: str = "  ") -> list[str]:
    return _wrapped(sentences, indent, "    ")


def _wrapped(sentences: Iterable[str], indent: str, later: str = "") -> list[str]:
    return [
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, WIDTH, initial_indent=indent, subsequent_indent=later)
    ]


def _drift(report: DriftReport) -> list[str]:
    lines = [] if report.drift else ["  None is open."]
    for line in report.drift:
        head = (
            f"{line.id}. {line.task}, {line.drafter}: {words(line.cause)}, {line.state}, "
            f"since {minute(line.opened_at)}; {costs(line)}"
        )
        lines += [*_items([head]), *_items((line.verdict, line.action), "    ")]
    return [*lines, f"  {report.opened} opened and {report.closed} closed by this run."]


def _probes(report: DriftReport) -> list[str]:
    sentences = [] if report.probes else [none_sent(report)]
    sentences += [
        f"{line.task}, {line.drafter} at k={line.num_draft_tokens}: {line.num_probes} sent"
        + (f" and {line.num_scored} scored" if line.num_scored else "")
        + f" for {_WHY[line.why]}, "
        + (f"last measured {minute(line.last_probed)}" if line.last_probed else "never measured before")
        for line in report.probes
    ]
    if report.probes_waiting:
        waiting = ", ".join(f"{line.task} {line.drafter}" for line in report.probes_waiting)
        budget = f"of {report.probe_budget_device_s:.0f} device seconds"
        sentences.append(f"Held back by the budget {budget}: {waiting}.")
    return _items([*sentences, probe_spend(report)])


#: What the page says with.
_SAYINGS: Final = (
    costs, cost_of_all, cost_saved, freshness, gap_lines, money, none_sent, probe_spend, saved, told_changes,
)  # fmt: skip
#: Reports that the index lists.
MAX_ENTRIES: Final = 200
#: The name of a report's files, of the time in UTC.
STEM: Final = "drift-report-%Y%m%dT%H%M%SZ"


def render_page(report: DriftReport) -> str:
    """The report as HTML."""
    plots = {
        "history": alpha_of_tasks({task: history.model_dump(mode="json") for task, history in report.history.items()}),
        "expectations": _reliability_plot(report.expectations),
    }
    sayings = {saying.__name__: saying for saying in _SAYINGS}
    return environment("scheduler.report").get_template("page.html.j2").render(report=report, plots=plots, **sayings)


def _reliability_plot(lines: Sequence[ExpectationLine]) -> Markup | None:
    """A row for each task and drafter: what the intervals allowed, and each measurement over its expectation."""
    is_only = {task: number == 1 for task, number in Counter(line.task for line in lines).items()}
    names = [line.task if is_only[line.task] else f"{line.task}, {line.drafter}" for line in lines]
    bars = [
        RatioBar(
            name,
            geometric_mean(point.expected.low / point.expected.mean for point in line.points),
            geometric_mean(point.expected.high / point.expected.mean for point in line.points),
            [(point.measured.mean / point.expected.mean, point.is_held) for point in line.points],
        )
        for name, line in zip(names, lines, strict=True)
    ]
    figures = "; ".join(
        f"{name} {line.ratio:.2f}, {line.num_held} of {line.num_pairs} held"
        for name, line in zip(names, lines, strict=True)
    )
    axis = "measured over expected speed-up"
    return ratios_by_task(bars, axis, f"Measured over expected speed-up by task: {figures}")


def render_index(headings: Sequence[ReportHeading], pages: Collection[str]) -> str:
    """The index as HTML: of `headings`, the newest first, those whose page is among the file names `pages`.

    It lists at most MAX_ENTRIES and counts the other pages.
    """
    present = frozenset(pages)
    by_name = {page_name(heading.created_at): heading for heading in reversed(headings)}
    entries = [(name, heading) for name, heading in reversed(by_name.items()) if name in present][:MAX_ENTRIES]
    page = environment("scheduler.report").get_template("index.html.j2")
    return page.render(entries=entries, num_others=len(present) - len(entries), minute=minute)


def page_name(created_at: datetime) -> str:
    """The name of the page of a report."""
    return f"{created_at.astimezone(UTC).strftime(STEM)}.html"


def write_report(folder: Path, report: DriftReport, text: str, html: str) -> Path:
    """Write `drift-report-<UTC time>.{html,json,txt}` and `latest.html`; returns the page's path.

    Each file appears whole or not at all. Raises ConfigError when the folder cannot be written.
    """
    page = folder / page_name(report.created_at)
    stem = page.stem
    with _written(folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"{stem}.json", report.model_dump_json(indent=2) + "\n")
        replace_file(folder / f"{stem}.txt", text)
        replace_file(page, html)
        replace_file(folder / "latest.html", html)
    return page


def write_index(folder: Path, render: Callable[[Collection[str]], str]) -> None:
    """Write `index.html`; `render` makes it from the names of the pages of reports that are in the folder.

    Raises ConfigError when the folder cannot be written.
    """
    with _written(folder):
        pages = [path.name for path in folder.glob("drift-report-*.html") if _made_at(path) is not None]
        replace_file(folder / "index.html", render(pages))


def drop_reports(folder: Path, before: datetime) -> int:
    """Delete the files of reports that were made before `before`; returns how many.

    `latest.html` and `index.html` stay. Raises ConfigError when the folder cannot be written.
    """
    num_files = 0
    with _written(folder):
        for path in sorted(folder.glob("drift-report-*")):
            if (made_at := _made_at(path)) is not None and made_at < before:
                path.unlink(missing_ok=True)
                num_files += 1
    return num_files


def _made_at(path: Path) -> datetime | None:
    """When a report was made, by its file's name; None for a name that is not a report's."""
    try:
        return datetime.strptime(path.stem, STEM).replace(tzinfo=UTC)
    except ValueError:
        return None


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"expected a folder to write reports to, found {folder}: {error.strerror or error}",
            hint="set data_dir to a folder that this process may write",
        ) from None
