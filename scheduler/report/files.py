"""The report in a folder: three files a run, `latest.html` and `index.html`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from alphaloop.errors import ConfigError
from alphaloop.files import replace_file
from scheduler.report.data import Report

#: The name of a report's files, of the time in UTC.
STEM: Final = "drift-report-%Y%m%dT%H%M%SZ"


def page_name(created_at: datetime) -> str:
    """The name of the page of a report."""
    return f"{created_at.astimezone(UTC).strftime(STEM)}.html"


def write_report(folder: Path, report: Report, text: str, html: str) -> Path:
    """Write `drift-report-<UTC time>.{html,json,txt}` and `latest.html`; returns the page's path.

    Each file appears whole or not at all. Raises ConfigError when the folder cannot be written.
    """
    page = folder / page_name(report.created_at)
    stem = page.stem
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"{stem}.json", report.model_dump_json(indent=2) + "\n")
        replace_file(folder / f"{stem}.txt", text)
        replace_file(page, html)
        replace_file(folder / "latest.html", html)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return page


def write_index(folder: Path, render: Callable[[Collection[str]], str]) -> None:
    """Write `index.html`; `render` makes it from the names of the pages of reports that are in the folder.

    Raises ConfigError when the folder cannot be written.
    """
    try:
        pages = [path.name for path in folder.glob("drift-report-*.html") if _made_at(path) is not None]
        replace_file(folder / "index.html", render(pages))
    except OSError as error:
        raise _unwritable(folder, error) from None


def drop_reports(folder: Path, before: datetime) -> int:
    """Delete the files of reports that were made before `before`; returns how many.

    `latest.html` and `index.html` stay. Raises ConfigError when the folder cannot be written.
    """
    num_files = 0
    try:
        for path in sorted(folder.glob("drift-report-*")):
            if (made := _made_at(path)) is not None and made < before:
                path.unlink(missing_ok=True)
                num_files += 1
    except OSError as error:
        raise _unwritable(folder, error) from None
    return num_files


def _made_at(path: Path) -> datetime | None:
    """When a report was made, by its file's name; None for a name that is not a report's."""
    try:
        return datetime.strptime(path.stem, STEM).replace(tzinfo=UTC)
    except ValueError:
        return None


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"expected a folder to write reports to, found {folder}: {error.strerror or error}",
        hint="set scheduler.report_folder to a writable folder",
    )
