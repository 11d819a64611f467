"""`alphaloop replay`: what another configuration would have chosen, and what that would have cost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import typer

from alphaloop.cli.connection import open_database
from alphaloop.cli.explain import check_task
from alphaloop.cli.options import connected_settings, global_options
from alphaloop.cli.replaying.result import Replayed, Window
from alphaloop.cli.replaying.run import replay_history, rules_of
from alphaloop.cli.replaying.screens import document, show
from alphaloop.cli.screen import print_json, progress
from alphaloop.deciding.replay import Rules
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.explaining.explanation import HISTORY
from alphaloop.moments import moment
from alphaloop.settings import Settings, load_settings, overridden
from alphaloop.store.database import Database
from alphaloop.store.snapshots import SnapshotStore

EXAMPLE: Final = """\
alphaloop replay --set policy.explore_share=0.0
alphaloop replay --task code --since 7d --set models.drafters.lookup.max_draft_tokens=4
alphaloop replay --configs ./configs-to-be --since 2026-09-01 --until 2026-09-08 --json"""

#: Settings that decisions depend on and that history can replay; `*` is a name that the user chooses.
_DECIDING: Final = (
    "policy.*",
    "tasks.*.decoding",
    "tasks.*.target_time_per_token_ms",
    "tasks.*.target_time_to_first_token_ms",
    "models.drafters.*.max_draft_tokens",
)
#: Settings that decisions depended on, and that a snapshot has the outcome of alone.
_INFERRED: Final = {
    "worker.history_half_life_days": "it is in the posteriors of a snapshot",
    "tasks.*.max_tokens": "a snapshot has the limits of the jobs themselves",
}


def replay(
    context: typer.Context,
    task: str | None = typer.Option(None, help="Only this task; all, if not given."),
    since: str | None = typer.Option(None, help="From this time on: 2026-09-01, or 90m, 2h, 3d ago. 14 days at most."),
    until: str | None = typer.Option(None, help="Up to this time; now, if not given."),
    changes: list[str] = typer.Option(
        [], "--set", help="A setting to change, policy.explore_share=0.0; may be repeated."
    ),
    configs: Path | None = typer.Option(None, help="Folder of TOML files to use instead of today's."),
    seed: int = typer.Option(0, help="Seed of the random draws for exploration, controls and bounds."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Decide past jobs again under another configuration, and compare the costs.

    Takes each decision again from its snapshot, in order, with the policy that a worker uses, and compares the device
    time of these choices with that of the choices made. Writes nothing to the database.
    """
    now = datetime.now(UTC)
    end = now if until is None else moment(until, now, "--until")
    begin = None if since is None else moment(since, now, "--since")
    if begin is not None and begin >= end:
        raise ConfigError("--since: expected a time before --until", hint="--since 7d --until 1d")
    was = connected_settings(context, broker=False)
    would = changed_settings(context, was, configs, changes)
    with open_database(was) as database:
        if task is not None:
            check_task(database, was, task)
        window = _window(database, task, begin, end, HISTORY)
        found = _run(database, rules_of(was, would), window, seed)
    changed = [*([f"--configs {configs}"] if configs else []), *changes]
    if as_json:
        print_json(document(found, changed))
    else:
        show(found, changed)


def changed_settings(context: typer.Context, was: Settings, configs: Path | None, changes: list[str]) -> Settings:
    """The settings to replay with. Raises ConfigError for an unknown setting or one that no decision depends on."""
    for change in changes:
        path = change.partition("=")[0].strip()
        why = next((why for known, why in _INFERRED.items() if _matches(path, known)), None)
        if why is not None and _is_setting(was, change):
            raise _cannot_change(path, why)
        if not any(_matches(path, known) for known in _DECIDING) and _is_setting(was, change):
            raise ConfigError(f"{path}: no decision of the past depends on it", hint=f"any of {', '.join(_DECIDING)}")
    found = was if configs is None else load_settings(configs, profile=global_options(context).profile)
    would = overridden(found, changes)
    if would.worker.history_half_life_days != was.worker.history_half_life_days:
        path = "worker.history_half_life_days"
        raise _cannot_change(path, _INFERRED[path])
    for name in would.models.drafters.keys() & was.models.drafters.keys():
        longest, known = (one.models.drafters[name].max_draft_tokens for one in (would, was))
        if longest > known:
            raise ConfigError(
                f"models.drafters.{name}.max_draft_tokens: expected at most {known}, found {longest}",
                hint="a snapshot knows nothing of longer drafts; shorter ones can be replayed",
            )
    return would


def _cannot_change(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"{path}: expected a setting that a snapshot is decided with, found one that comes before: {why}",
        hint=f"what replay can change: {', '.join(_DECIDING)}",
    )


def _is_setting(settings: Settings, change: str) -> bool:
    """Whether `change` names a setting. Raises ConfigError if not, with the better message."""
    overridden(settings, [change])
    return True


def _matches(path: str, known: str) -> bool:
    parts, pattern = path.split("."), known.split(".")
    return len(parts) == len(pattern) and all(b in ("*", a) for a, b in zip(parts, pattern, strict=True))


def _window(database: Database, task: str | None, begin: datetime | None, end: datetime, longest: timedelta) -> Window:
    kept = SnapshotStore(database).first_and_last(task)
    if kept is None or kept[0] >= end or (begin is not None and kept[1] < begin):
        which = f"job of {task}" if task else "job"
        span = "" if kept is None else f"; they are from {kept[0]:%Y-%m-%d %H:%M} to {kept[1]:%Y-%m-%d %H:%M} UTC"
        raise AlphaloopError(f"expected history to replay, found no {which} in that time{span}")
    last = min(end, kept[1] + timedelta(microseconds=1))
    return Window(max(kept[0], last - longest if begin is None else begin), last, task)


def _run(database: Database, rules: Rules, window: Window, seed: int) -> Replayed:
    num_days = sum(1 for _ in window.days())
    with progress() as bar:
        shown = bar.add_task("days", total=num_days, note="")

        def tell(num_done: int, num_jobs: int) -> None:
            bar.update(shown, completed=num_done, note=f"{num_jobs} jobs")

        return replay_history(database, rules, window, seed=seed, tell=tell)
