"""`alphaloop draft refresh`: have a drafter trained anew, see how far that is, or end it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from alphaloop.cli.options import AS_JSON, connected_settings, example, open_database
from alphaloop.cli.screen import note, paragraph, show_rows
from alphaloop.errors import ConfigError
from alphaloop.explaining.refreshing import RefreshLine, refresh_lines, served
from alphaloop.settings import Settings
from alphaloop.store.database import Database, DatabaseClock
from alphaloop.store.refreshes import RefreshReason, RefreshStore
from alphaloop.store.workers import WorkerStore
from alphaloop.wording import how_many, words


@example("""\
alphaloop draft refresh heads
alphaloop draft refresh heads --status
alphaloop draft refresh heads --cancel""")
def refresh(
    context: typer.Context,
    name: str = typer.Argument(help="A drafter of the method heads or eagle3, by its name in the settings."),
    status: bool = typer.Option(False, "--status", help="Only show its refreshes, the newest first."),
    cancel: bool = typer.Option(False, "--cancel", help="End those that are open, a trial too."),
    as_json: bool = AS_JSON,
) -> None:
    """Train heads anew for the target that workers serve now, and try them beside the old ones.

    A trainer (`alphaloop trainer`) takes the refresh, trains with prompts of tasks that have train_from_traffic, and
    judges old and new heads on texts that are held out. New ones that are better in a task go on trial: workers load
    them as a drafter of their own, and decisions choose by task.
    """
    if status and cancel:
        raise typer.BadParameter("expected --status or --cancel, found both")
    settings = connected_settings(context, broker=False)
    with open_database(settings) as database:
        store = RefreshStore(database)
        # One that has gone from the settings may have refreshes, to be shown or ended.
        if not ((status or cancel) and store.of(name)):
            _refuse_unknown(settings, name)
        if cancel:
            ended = store.cancel(name, DatabaseClock(database).now())
            note(f"{how_many(len(ended), 'refresh')} of {name} cancelled" if ended else f"no refresh of {name} is open")
        elif not status:
            _open(database, name)
        lines = refresh_lines(database, settings.models, drafter=name)
    show_rows(
        lines,
        *("number", "target", "why", "state", "stale", "after", "gain"),
        right=["number", "stale", "after"],
        cells=_cells,
        nothing=f"no refresh of {name} is known",
        as_json=as_json,
        row_as_json=asdict,
    )
    if not as_json:
        for line in reversed(lines):
            if line.in_words:
                paragraph(f"{line.id}: {line.in_words}")


def _refuse_unknown(settings: Settings, name: str) -> None:
    """Raise ConfigError unless the settings have a drafter of this name that can be trained anew."""
    trainable = settings.models.trainable
    if name not in trainable:
        raise ConfigError(
            f"expected a drafter of heads or eagle3, one of {', '.join(trainable) or 'none'}, found {name!r}",
            hint="[models.drafters.NAME] names them; others are trained with `alphaloop draft train`",
        )


def _open(database: Database, name: str) -> None:
    """A refresh for each target that workers serve with this drafter."""
    pairs = served(WorkerStore(database).seen(), name)
    if not pairs:
        raise ConfigError(
            f"expected a worker that drafts with {name}, found none that was heard of lately",
            hint="start one: the refresh is for the target that it serves",
        )
    store, now = RefreshStore(database), DatabaseClock(database).now()
    for pair in pairs:
        store.open(name, pair.target_revision, pair.draft_revision, RefreshReason.BY_HAND, now)


def _cells(line: RefreshLine) -> list[str]:
    rates = ["-" if rate is None else f"{rate:.2f}" for rate in (line.stale, line.after)]
    names = [str(line.id), line.target_revision, words(line.reason), words(line.state)]
    return [*names, *rates, line.gain or "-"]
