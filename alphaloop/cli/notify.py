"""`alphaloop notify`: who is told of drift and incidents, and what they were sent."""

from __future__ import annotations

import socket
from dataclasses import asdict
from typing import Final

import typer

from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings, global_options
from alphaloop.cli.screen import note as tell
from alphaloop.cli.screen import out, print_json, table
from alphaloop.errors import ConfigError, NotificationFailed
from alphaloop.notifying import Gravity, NotificationText, open_sinks
from alphaloop.store.reports import Attempted, NotificationStore

TEST_EXAMPLE: Final = "ALPHALOOP_SCHEDULER__NOTIFY_URLS='[\"json://localhost:8000/hook\"]' alphaloop notify test"
LIST_EXAMPLE: Final = "alphaloop notify list --json"


def test(context: typer.Context) -> None:
    """Send a message to every address of scheduler.notify_urls, and say which of them took it."""
    sinks = open_sinks(global_options(context).settings().scheduler.notify_urls)
    if not sinks:
        raise ConfigError("scheduler.notify_urls: expected at least one address, found none", hint=TEST_EXAMPLE)
    told = NotificationText(
        "alphaloop: a test", f"Sent by `alphaloop notify test` on {socket.gethostname()}.", Gravity.INFO
    )
    num_failed = 0
    for sink in sinks:
        try:
            sink.send(told)
            tell(f"{sink.name}: taken")
        except NotificationFailed as error:
            num_failed += 1
            tell(error.message)
    if num_failed:
        raise NotificationFailed(f"{num_failed} of {len(sinks)} addresses did not take the message")


def list_attempts(
    context: typer.Context,
    limit: int = typer.Option(50, min=1, max=10_000, help="Most lines."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """List what was sent, the newest first, and what could not be."""
    with open_database(connected_settings(context, broker=False)) as database:
        found = NotificationStore(database).attempted(limit)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        tell("nothing was sent yet")
        return
    shown = table("to", "about", "number", "attempts", "last attempt", "outcome", right=["number", "attempts"])
    for one in found:
        at = f"{one.attempted_at:%Y-%m-%d %H:%M}"
        about = one.kind.value.replace("_", " ")
        shown.add_row(one.sink, about, str(one.source_id), str(one.num_attempts), at, _outcome(one))
    out().print(shown)


def _outcome(one: Attempted) -> str:
    if one.sent_at is not None:
        return "taken"
    return one.failure or "not known: the process ended meanwhile"
