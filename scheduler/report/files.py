"""The report in a folder: three files a run, and `latest.html`."""

from __future__ import annotations

import os
from datetime import UTC
from pathlib import Path

from alphaloop.errors import ConfigError
from scheduler.report.data import Report


def write_report(folder: Path, report: Report, text: str, html: str) -> Path:
    """Write `drift-report-<UTC time>.{html,json,txt}` and `latest.html`; returns the page's path.

    Each file appears whole or not at all. Raises ConfigError when the folder cannot be written.
    """
    stem = f"drift-report-{report.created_at.astimezone(UTC):%Y%m%dT%H%M%SZ}"
    page = folder / f"{stem}.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / f"{stem}.json", report.model_dump_json(indent=2) + "\n")
        _write(folder / f"{stem}.txt", text)
        _write(page, html)
        _write(folder / "latest.html", html)
    except OSError as error:
        raise ConfigError(
            f"expected a folder to write reports to, found {folder}: {error.strerror or error}",
            hint="set scheduler.report_folder to a writable folder",
        ) from None
    return page


def _write(path: Path, content: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(content, encoding="utf-8")
    beside.replace(path)
