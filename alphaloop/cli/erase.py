"""`alphaloop erase`: remove the texts of jobs, and what was made of them, for good."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

import typer

from alphaloop.claim_check.store import ContentStore
from alphaloop.cli.keys import account
from alphaloop.cli.options import AS_JSON, connected_settings, example, open_database
from alphaloop.cli.screen import note, print_json
from alphaloop.store.api import Deed
from alphaloop.store.database import DatabaseClock
from alphaloop.store.erasing import EraseStore, Erasure, Texts
from alphaloop.wording import moment_ago


@example("""\
alphaloop erase --job 7f3c1a90 --yes
alphaloop erase --segment acme --dry-run
alphaloop erase --before 2026-09-01""")
def erase(
    context: typer.Context,
    job: str | None = typer.Option(None, help="The texts of this job."),
    segment: str | None = typer.Option(None, help="The texts of all jobs of this segment."),
    before: str | None = typer.Option(None, help="The texts of all jobs that ended before then: 30d, 2026-09-01."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only count what would be erased."),
    as_json: bool = AS_JSON,
) -> None:
    """Erase texts from results, drawn probes and the memory of tasks, after counting them. Workers follow in seconds.

    Counts stay, because they hold no text. So do messages: Kafka deletes them, and prompts that they refer to, when
    their retention ends.
    """
    until = moment_ago(before, datetime.now(UTC), "--before") if before is not None else None
    erasure = Erasure(job, segment, until)
    settings = connected_settings(context, broker=False)
    with open_database(settings) as database:
        store = EraseStore(database)
        found = store.count(erasure)
        for row in _rows(found):
            note(row)
        is_done = not dry_run and (yes or typer.confirm(f"erase the texts of {erasure.subject}?", err=True))
        if is_done:
            contents = ContentStore.of(settings.claim_check)
            deed = Deed("command", account(), "texts_erased", erasure.subject)
            delete = None if contents is None else contents.delete
            found = store.erase(erasure, deed, delete, DatabaseClock(database).measure())
    if as_json:
        print_json({**asdict(found), "erased": is_done})
    if found.num_running:
        note(f"{found.num_running} jobs have not ended, and write their texts when they do: erase again then")
    if not is_done and not dry_run:
        raise typer.Exit(1)


def _rows(found: Texts) -> list[str]:
    named = {
        "results": found.num_jobs,
        "results in the memory of tasks": found.num_remembered,
        "drawn probes": found.num_drawn_probes,
        "texts of probes": found.num_probe_texts,
        "texts outside the database": found.num_stored_texts,
        "files of the API": found.num_api_files,
    }
    return [f"{num} {name}" for name, num in named.items()]
