"""`alphaloop keys`: who may use the API for files and batches."""

from __future__ import annotations

import getpass
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Final

import typer
from pydantic import TypeAdapter, ValidationError

from alphaloop.cli.options import AS_JSON, connected_settings, example, open_database, require_tasks
from alphaloop.cli.screen import note, show_rows
from alphaloop.errors import ConfigError
from alphaloop.messages.job import Label
from alphaloop.store.api import ApiKey, ApiKeyStore, Deed
from alphaloop.store.database import values_of
from alphaloop.wording import one_line

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ARGUMENT: Final = typer.Argument(help="Name of the key: files and batches belong to it.")


@example("alphaloop keys create nightly --segment free --task chat")
def create(
    context: typer.Context,
    name: str = _ARGUMENT,
    segment: str = typer.Option(help="Segment of every job that is sent with it."),
    task: list[str] = typer.Option([], help="Task that it may send jobs to; repeat it for more. Without one, all."),
    expires_days: int | None = typer.Option(None, min=1, max=3650, help="Days after which it is refused."),
) -> None:
    """Make a key of the API, and print it. It is shown this once: only a digest of it is stored.

    A new key of a name whose key was revoked goes on with the files and batches of that one.
    """
    settings = connected_settings(context, broker=False)
    if not _NAME.fullmatch(name):
        raise ConfigError("expected a name of 1 to 100 letters, digits, points, hyphens or underscores")
    try:
        TypeAdapter(Label).validate_python(segment)
    except ValidationError:
        raise ConfigError("--segment: expected 1 to 100 characters without control characters") from None
    require_tasks(settings, task)
    expires_at = None if expires_days is None else datetime.now(UTC) + timedelta(days=expires_days)
    with open_database(settings) as database:
        made = ApiKeyStore(database).create(
            name, segment=segment, tasks=task, expires_at=expires_at, deed=_deed("key_created", name)
        )
    sys.stdout.write(f"{made}\n")
    note("keep it now: it is not shown again")


@example("alphaloop keys list")
def list_keys(context: typer.Context, as_json: bool = AS_JSON) -> None:
    """List every key that was made, without its secret."""
    with open_database(connected_settings(context, broker=False)) as database:
        found = ApiKeyStore(database).all()
    show_rows(
        found,
        *("name", "key", "segment", "tasks", "made", "last used", "state"),
        cells=_cells,
        nothing="no keys; `alphaloop keys create` makes one",
        as_json=as_json,
        row_as_json=values_of,
    )


@example("alphaloop keys revoke nightly")
def revoke(context: typer.Context, name: str = _ARGUMENT) -> None:
    """Refuse a key from now on. Its files and batches stay, and its open batches go on."""
    with open_database(connected_settings(context, broker=False)) as database:
        ApiKeyStore(database).revoke(name, _deed("key_revoked", name))
    note(one_line(f"{name} is revoked"))


def _cells(key: ApiKey) -> tuple[str, ...]:
    now, state = datetime.now(UTC), "valid"
    if key.revoked_at is not None:
        state = f"revoked {key.revoked_at:%F}"
    elif key.expires_at is not None:
        state = f"{'expired' if key.expires_at <= now else 'valid until'} {key.expires_at:%F}"
    used = f"{key.last_used_at:%F %H:%M}" if key.last_used_at else "never"
    tasks = ", ".join(key.tasks) or "all"
    return (key.name, f"{key.prefix}…", one_line(key.segment), tasks, f"{key.created_at:%F}", used, state)


def _deed(action: str, name: str) -> Deed:
    return Deed("command", account(), action, name)


def account() -> str:
    """Who types the command, as the operating system calls them."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
