"""The report as one self-contained page, and the folder of reports: three files a run, `latest.html` and `index.html`.

A page has no script and fetches nothing; everything from outside is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import Final

from markupsafe import Markup

from alphaloop.errors import ConfigError
from alphaloop.files import replace_file
from alphaloop.pages.drawing import RatioBar, alpha_of_tasks, environment, ratios_by_task
from alphaloop.store.reports import ReportHeading
from alphaloop.wording import minute
from scheduler.report.data import DriftReport, ExpectationLine
from scheduler.report.wording import (
    cost_of_all,
    cost_saved,
    costs,
    freshness,
    gap_lines,
    money,
    probe_spend,
    saved,
    told_changes,
)

#: What the page says with.
_SAYINGS: Final = (
    costs, cost_of_all, cost_saved, freshness, gap_lines, money, probe_spend, saved, told_changes,
)  # fmt: skip
#: Reports that the index lists.
MAX_ENTRIES: Final = 200
#: The name of a report's files, of the time in UTC.
STEM: Final = "drift-report-%Y%m%dT%H%M%SZ"


def render_page(report: DriftReport) -> str:
    """The report as HTML."""
    plots = {
        "history": alpha_of_tasks({task: one.model_dump(mode="json") for task, one in report.history.items()}),
        "expectations": _reliability_plot(report.expectations),
    }
    sayings = {its.__name__: its for its in _SAYINGS}
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
    told = "; ".join(
        f"{name} {line.ratio:.2f}, {line.num_held} of {line.num_pairs} held"
        for name, line in zip(names, lines, strict=True)
    )
    axis = "measured over expected speed-up"
    return ratios_by_task(bars, axis, f"Measured over expected speed-up by task: {told}")


def render_index(headings: Sequence[ReportHeading], pages: Collection[str]) -> str:
    """The index as HTML: of `headings`, the newest first, those whose page is among the file names `pages`.

    It lists at most MAX_ENTRIES and counts the other pages.
    """
    present = frozenset(pages)
    by_name = {page_name(one.created_at): one for one in reversed(headings)}
    entries = [(name, one) for name, one in reversed(by_name.items()) if name in present][:MAX_ENTRIES]
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
            if (made := _made_at(path)) is not None and made < before:
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
