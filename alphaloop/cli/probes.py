"""`alphaloop probes`: the fixed prompts on which acceptance is measured again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import typer

from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings
from alphaloop.cli.probing import screens
from alphaloop.cli.probing.prompts import bodies_of, read_file, read_traffic
from alphaloop.cli.screen import note, out, print_json
from alphaloop.errors import AlphaloopError
from alphaloop.messages.topics import jobs_topic
from alphaloop.probe_plan import ProbePlanner
from alphaloop.probes import DEFAULT_K, DEFAULT_MAX_TOKENS, ProbeSet, ProbeSource, draw_prompts, new_probe_set
from alphaloop.settings import Settings
from alphaloop.store.database import DatabaseClock
from alphaloop.store.probes import ProbeSetStore

REGISTER_EXAMPLE: Final = "alphaloop probes register probes.jsonl --task code"
DRAW_EXAMPLE: Final = "alphaloop probes draw --task code --prompts 40"
LIST_EXAMPLE: Final = "alphaloop probes list --json"
SHOW_EXAMPLE: Final = """\
alphaloop probes show code
alphaloop probes show code --against 1f0c3a59d2b7e684"""
PLAN_EXAMPLE: Final = "alphaloop probes plan"

_K: Final = typer.Option(None, "--k", min=1, max=64, help="k of its probes; the setting's, if left out.")
_MAX_TOKENS: Final = typer.Option(None, min=8, help="Output limit of its probes; the setting's, if left out.")


def register(
    context: typer.Context,
    file: Path = typer.Argument(
        help="JSONL of prompts, in any form that `alphaloop enqueue` takes; - for standard input."
    ),
    task: str = typer.Option(help="The task that the prompts stand for."),
    num_draft_tokens: int | None = _K,
    max_tokens: int | None = _MAX_TOKENS,
) -> None:
    """Make these prompts the task's probe set. Never send them as traffic: a drafter could have seen them.

    The version before is no longer sent; its history stays, and is compared over the prompts that both versions have.
    The same prompts again change nothing.
    """
    settings = connected_settings(context, broker=False)
    bodies = bodies_of(read_file(settings, file, task))
    _put_in_use(settings, task, bodies, num_draft_tokens, max_tokens, ProbeSource.FILE)


def draw(
    context: typer.Context,
    task: str = typer.Option(help="The task whose jobs are drawn from."),
    prompts: int = typer.Option(40, min=2, help="How many prompts to draw."),
    newest: int = typer.Option(2000, min=1, help="How many jobs of each partition to draw from, the newest."),
    seed: int = typer.Option(0, help="Another seed draws other prompts."),
    num_draft_tokens: int | None = _K,
    max_tokens: int | None = _MAX_TOKENS,
) -> None:
    """Draw the task's probe set from the jobs that lie in Kafka, as many of each length.

    Needs the task's consent, `probes_from_traffic = true`: the prompts are kept in the database until the version is
    deleted, and are decoded again and again. No command and no report shows their text.
    """
    settings = connected_settings(context)
    bodies = draw_prompts(list(read_traffic(settings, task, newest)), prompts, seed)
    if len(bodies) < prompts:
        raise AlphaloopError(f"expected {prompts} different prompts in {jobs_topic(task)}, found {len(bodies)}")
    _put_in_use(settings, task, bodies, num_draft_tokens, max_tokens, ProbeSource.TRAFFIC)


def list_sets(
    context: typer.Context,
    task: str | None = typer.Option(None, help="Only this task's."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """List the versions of every task's probe set, the newest first."""
    with open_database(connected_settings(context, broker=False)) as database:
        versions = ProbeSetStore(database).versions(task)
    if as_json:
        print_json([screens.version_as_json(version) for version in versions])
    elif not versions:
        note("no task has a probe set; `alphaloop probes register` makes one")
    else:
        out().print(screens.versions_table(versions))


def show(
    context: typer.Context,
    task: str = typer.Argument(help="The task."),
    version: str | None = typer.Option(None, help="The version to show; the one in use, if left out."),
    against: str | None = typer.Option(None, help="Another version, of which the differences are shown."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Show the prompts of a probe set by their ids and lengths, and which of them another version has.

    Runs of two versions are compared over the prompts that both have. Texts are not shown.
    """
    with open_database(connected_settings(context, broker=False)) as database:
        store = ProbeSetStore(database)
        shown = _version(store, task, version)
        other = _version(store, task, against) if against else None
    lines = screens.prompt_lines(shown, other)
    if as_json:
        print_json({"task": task, "version": shown.version, "against": other and other.version, "prompts": lines})
    else:
        out().print(screens.prompts_table(shown, lines))
        if other is not None:
            note(screens.difference(shown, other))


def plan(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Show which probes the scheduler's next run would send, why, in which order, and what the budget holds back."""
    settings = connected_settings(context, broker=False)
    with open_database(settings) as database:
        planner = ProbePlanner(database, settings)
        found = planner.plan(planner.sets(), DatabaseClock(database).measure())
    if as_json:
        print_json(screens.plan_as_json(found))
    elif not found.num_probe_sets:
        note("no task has a probe set; `alphaloop probes register` makes one")
    else:
        if found.measurements:
            out().print(screens.plan_table(found))
        note(screens.plan_sentence(found))


def _put_in_use(
    settings: Settings,
    task: str,
    bodies: Sequence[Mapping[str, Any]],
    num_draft_tokens: int | None,
    max_tokens: int | None,
    source: ProbeSource,
) -> None:
    made = new_probe_set(
        task,
        bodies,
        num_draft_tokens=num_draft_tokens or DEFAULT_K,
        max_tokens=max_tokens or DEFAULT_MAX_TOKENS,
        source=source,
    )
    with open_database(settings) as database:
        ProbeSetStore(database).register(made, datetime.now(UTC))
    note(f"{task} has a probe set of {len(made.prompts)} prompts at k={made.num_draft_tokens}, version {made.version}")


def _version(store: ProbeSetStore, task: str, version: str | None) -> ProbeSet:
    found = store.active().get(task) if version is None else store.get(task, version)
    if found is None:
        wanted = f"version {version} of {task}" if version else f"a probe set of {task} in use"
        raise AlphaloopError(f"there is no {wanted}", hint="`alphaloop probes list` shows what there is")
    return found
