"""`alphaloop report`: the newest drift report."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import typer

from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import note, out, print_json
from alphaloop.errors import AlphaloopError
from alphaloop.files import Destination
from alphaloop.store.reports import ReportStore, StoredReport

EXAMPLE: Final = """\
alphaloop report
alphaloop report --html report.html"""


def report(
    context: typer.Context,
    html: Path | None = typer.Option(None, help="Write the page to this file instead, - for standard output."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Show the newest report.

    For the terminal, as one self-contained page, or as data.
    """
    if html is not None and as_json:
        raise typer.BadParameter("expected either --html or --json")
    target = None if html is None else Destination.of(html, option="--html")
    with open_database(connected_settings(context, broker=False)) as database:
        found = ReportStore(database).latest()
    if found is None:
        raise AlphaloopError("there is no report yet", hint="make one now with `alphaloop scheduler once`")
    _say_if_old(found)
    if as_json:
        print_json({**found.content, "created_at": found.created_at, "summary": found.summary})
    elif html is None or target is None:
        out().print(found.text, soft_wrap=True)
    else:
        with target.writing() as file:
            file.write(found.html)
        if html.is_file():
            note(f"written to {html.absolute().as_uri()}")


def _say_if_old(found: StoredReport) -> None:
    """A note where a newer report should exist."""
    next_due = found.content.get("next_due")
    if next_due is not None and datetime.fromisoformat(next_due) < datetime.now(UTC):
        note(
            f"this report is old: it was made at {found.created_at:%Y-%m-%d %H:%M} UTC, and the run that was due at "
            f"{datetime.fromisoformat(next_due):%Y-%m-%d %H:%M} UTC made none yet; does a scheduler run?"
        )
