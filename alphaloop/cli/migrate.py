"""`alphaloop migrate`: the database's schema."""

from __future__ import annotations

from typing import Final

import typer

from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import note, print_json
from alphaloop.errors import ConfigError
from alphaloop.store import schema

EXAMPLE: Final = "DATABASE_URL=postgresql://alphaloop@localhost/alphaloop alphaloop migrate"


def migrate(
    context: typer.Context,
    revision: str = typer.Option("head", help="Schema revision to go up to."),
    check: bool = typer.Option(False, "--check", help="Change nothing; exit code 1 if the schema is not up to date."),
    as_json: bool = typer.Option(False, "--json", help="Print the revisions as JSON."),
) -> None:
    """Bring the database's schema up to date. Safe to run from several machines at once."""
    url = connected_settings(context, broker=False).postgres.url
    if url is None:
        raise ConfigError("no database is configured", hint="set DATABASE_URL")
    before = schema.current(url)
    if check:
        is_pending = schema.pending(url)
        note(f"at revision {before or 'none'}, " + ("an upgrade is pending" if is_pending else "nothing to do"))
        if as_json:
            print_json({"revision": before, "pending": is_pending})
        raise typer.Exit(int(is_pending))
    schema.upgrade(url, revision)
    after = schema.current(url)
    note(f"already at revision {after}" if before == after else f"from revision {before or 'none'} to {after}")
    if after is not None and (missing := schema.grant_to_roles(url)):
        note(
            f"this user may not create the roles {', '.join(missing)}; until somebody does, and migrates again, every "
            "process needs the rights of this user"
        )
    if as_json:
        print_json({"from": before, "to": after})
