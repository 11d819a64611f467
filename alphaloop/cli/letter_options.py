"""The options that choose dead letters."""

from __future__ import annotations

from datetime import datetime
from typing import Final

import typer

from alphaloop.letters.reading import LetterFilter
from alphaloop.moments import FORMS, moment

TASK: Final = typer.Option(None, help="Only this task's.")
CODE: Final = typer.Option([], help="Only letters with this code, such as decode_failed; may be repeated.")
JOB_ID: Final = typer.Option([], help="Only this job's; may be repeated.")
SINCE: Final = typer.Option(None, help=f"Only letters written since then: {FORMS}.")
UNTIL: Final = typer.Option(None, help="Only letters written before then.")
AT: Final = typer.Option([], help="Only the letter at this place, TOPIC:PARTITION:OFFSET, as list shows it.")


def choice_of(
    task: str | None,
    code: list[str],
    job_id: list[str],
    at: list[str],
    since: str | None,
    until: str | None,
    now: datetime,
) -> LetterFilter:
    """What the options ask for. Raises ConfigError for a time that is none."""
    return LetterFilter(
        task,
        frozenset(code),
        frozenset(job_id),
        frozenset(at),
        None if since is None else moment(since, now, "--since"),
        None if until is None else moment(until, now, "--until"),
    )
