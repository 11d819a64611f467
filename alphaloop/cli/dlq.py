"""`alphaloop dlq`: messages that could not become jobs and jobs that failed: why, and what to do with them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import typer

from alphaloop.cli.options import AS_JSON, connected_settings, example, open_both, open_database
from alphaloop.cli.screen import note, out, paragraph, print_json
from alphaloop.dead_letters.reading import DeadLetterFilter, ListedDeadLetter, newest_dead_letters, require_dead_letters
from alphaloop.dead_letters.redriving import Purge, Redrive, corrections_of
from alphaloop.errors import AlphaloopError
from alphaloop.settings import Settings
from alphaloop.store.known_jobs import RedriveStore
from alphaloop.wording import FORMS, how_many, moment_ago, one_line

_DRY_RUN: Final = typer.Option(False, "--dry-run", help="Show what would be done, and change nothing.")
_TASK: Final = typer.Option(None, help="Only this task's.")
_CODE: Final = typer.Option([], help="Only letters with this code, such as decode_failed; may be repeated.")
_JOB_ID: Final = typer.Option([], help="Only this job's; may be repeated.")
_SINCE: Final = typer.Option(None, help=f"Only letters written since then: {FORMS}.")
_UNTIL: Final = typer.Option(None, help="Only letters written before then.")
_AT: Final = typer.Option([], help="Only the letter at this place, TOPIC:PARTITION:OFFSET, as list shows it.")


@example("""\
alphaloop dlq list --task code --limit 20
alphaloop dlq list --code decode_failed --since 2h --json""")
def list_letters(
    context: typer.Context,
    task: str | None = _TASK,
    code: list[str] = _CODE,
    job_id: list[str] = _JOB_ID,
    since: str | None = _SINCE,
    until: str | None = _UNTIL,
    limit: int = typer.Option(50, min=1, help="Number of dead letters to show, newest last."),
    show_value: bool = typer.Option(
        False, "--show-value", help="Show the start of the message too: it may hold a prompt."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """List the newest dead letters: place, time, reason, and whether it was sent again."""
    settings = connected_settings(context, database=False)
    choice = _choice(task, code, job_id, [], since, until)
    require_dead_letters(settings, choice)
    letters = _with_redrives(settings, newest_dead_letters(settings.kafka, choice, limit, show_value=show_value))
    if as_json:
        print_json(letters)
        return
    if not letters:
        note("no dead letters")
        return
    _show(letters)


@example("alphaloop dlq show jobs.code.dlq:0:17 --value")
def show(
    context: typer.Context,
    place: str = typer.Argument(help="TOPIC:PARTITION:OFFSET, as list shows it."),
    value: bool = typer.Option(False, "--value", help="Write the message, byte for byte, and nothing else."),
    as_json: bool = AS_JSON,
) -> None:
    """Show one dead letter: its reason and headers, or its message."""
    kafka = connected_settings(context, database=False).kafka
    letter = next(DeadLetterFilter(places=frozenset({place})).letters(kafka), None)
    if letter is None:
        raise AlphaloopError(f"no dead letter at {place[:200]}", hint="`alphaloop dlq list` shows the places")
    if value:
        content = letter.record.value or b""
        if sys.stdout.isatty():  # byte for byte it could act upon the terminal
            out().print(content.decode("utf-8", "replace"), soft_wrap=True)
        else:
            sys.stdout.buffer.write(content)
        return
    headers = {name: content.decode("utf-8", "replace") for name, content in letter.record.headers}
    if as_json:
        print_json({**letter.as_json(), "headers": headers})
        return
    for name, content in {**letter.as_json(), **headers}.items():
        paragraph(one_line(f"{name:<28}{'-' if content is None else content}"))


@example("""\
alphaloop dlq redrive --code unknown_task --dry-run
alphaloop dlq redrive --task code --code decode_failed --since 1d
alphaloop dlq redrive --job-id order-17 --set body.temperature=0.5""")
def redrive(
    context: typer.Context,
    task: str | None = _TASK,
    code: list[str] = _CODE,
    job_id: list[str] = _JOB_ID,
    at: list[str] = _AT,
    since: str | None = _SINCE,
    until: str | None = _UNTIL,
    correct: list[str] = typer.Option([], "--set", help="Correct a field: body.temperature=0.5; may be repeated."),
    again: bool = typer.Option(False, "--again", help="Also letters that were sent again before."),
    limit: int | None = typer.Option(None, min=1, help="Most letters to send."),
    dry_run: bool = _DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Resend dead letters to their topics.

    Each becomes a new job, JOB_ID~1, because a result stands for ever; the new one names the old one in redrive_of. The
    exit code is 1 if a letter could not be sent.
    """
    corrections = corrections_of(correct, "--set")
    choice = _choice(task, code, job_id, at, since, until)
    if choice.is_by_task_only and task is None:
        raise typer.BadParameter("choose letters: --task, --code, --job-id, --at, --since or --until")
    settings = connected_settings(context)
    require_dead_letters(settings, choice)
    with open_both(settings) as database:
        done = Redrive(settings, RedriveStore(database), corrections, again=again, dry_run=dry_run)
        done.run(choice, limit)
    if as_json:
        print_json(done.as_json())
    else:
        for problem in done.problems:
            note(f"{problem['at']}: {problem['message']}")
        note(f"{done.num_sent} {'would be sent' if dry_run else 'sent'}; {done.num_already_sent} were sent before")
    if done.num_wrong:
        raise AlphaloopError(
            f"{how_many(done.num_wrong, 'letter')} would be refused again", hint="correct them with --set"
        )


@example("""\
alphaloop dlq purge --task code --before 14d --dry-run
alphaloop dlq purge --before 14d --yes""")
def purge(
    context: typer.Context,
    before: str = typer.Option(..., help="Delete letters written before then: 14d, 2026-09-01."),
    task: str | None = _TASK,
    yes: bool = typer.Option(False, "--yes", help="Do not ask."),
    dry_run: bool = _DRY_RUN,
    as_json: bool = AS_JSON,
) -> None:
    """Delete old dead letters, after showing what they are. Kafka deletes from the beginning of a partition."""
    choice = DeadLetterFilter(task, until=moment_ago(before, datetime.now(UTC), "--before"))
    settings = connected_settings(context)
    require_dead_letters(settings, choice)
    with open_both(settings) as database:
        plan = Purge(settings.kafka, RedriveStore(database))
        plan.read(choice)
        if as_json:
            print_json({**plan.as_json(), "deleted": not dry_run and bool(plan.num_letters)})
        else:
            for row in plan.rows():
                note(row)
        if dry_run or not plan.num_letters:
            return
        if not yes and not typer.confirm(f"delete {plan.num_letters} dead letters?", err=True):
            raise typer.Exit(1)
        plan.carry_out()


def _choice(
    task: str | None, code: list[str], job_id: list[str], at: list[str], since: str | None, until: str | None
) -> DeadLetterFilter:
    """What the options ask for. Raises ConfigError for a time that is none."""
    now, options = datetime.now(UTC), (("--since", since), ("--until", until))
    span = (moment_ago(text, now, option) if text is not None else None for option, text in options)
    return DeadLetterFilter(task, frozenset(code), frozenset(job_id), frozenset(at), *span)


def _with_redrives(settings: Settings, letters: Sequence[ListedDeadLetter]) -> list[dict[str, Any]]:
    """Also whether each was sent again; None where no database answers, because the list is of use without one."""
    redriven = None
    with contextlib.suppress(AlphaloopError), open_database(settings) as database:
        redriven = RedriveStore(database).of([letter.key for letter in letters])
    return [letter.with_redrive(redriven) for letter in letters]


def _show(letters: Sequence[Mapping[str, Any]]) -> None:
    """Two lines or more a letter: what can be chosen by in columns, and what was wrong in the width of the window."""
    redriven = {None: "?", False: "no", True: "yes"}
    rows = [(letter["at"], letter["when"] or "-", letter["code"], redriven[letter["redriven"]]) for letter in letters]
    shown = [tuple(map(one_line, row)) for row in rows]
    head = ("at", "when", "code", "redriven")
    widths = [max(len(row[number]) for row in (head, *shown)) for number in range(len(head))]
    paragraph("  ".join(map(str.ljust, head, widths)).rstrip(), style="bold")
    for row, letter in zip(shown, letters, strict=True):
        paragraph("  ".join(map(str.ljust, row, widths)).rstrip())
        job, sent, field = letter["job_id"] or "no job_id", letter["sent_job_id"], letter["field"]
        job = one_line(job if sent in (None, job) else f"{job} (sent as {sent})")
        paragraph(f"{job}: " + one_line(f"{field}: {letter['message']}" if field else letter["message"]), indent=2)
        if value := letter.get("value"):
            paragraph(one_line(value), indent=2, style="dim")
