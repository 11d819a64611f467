"""`alphaloop drift`: falls of acceptance, their causes, and who has taken note of them."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

import typer

from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import note as tell
from alphaloop.cli.screen import out, paragraph, print_json, table
from alphaloop.errors import AlphaloopError
from alphaloop.moments import moment
from alphaloop.store.drift import DriftEvent, DriftEventStore, NoSuchEvent, PastState

LIST_EXAMPLE: Final = """\
alphaloop drift list
alphaloop drift list --since 30d --json"""
SHOW_EXAMPLE: Final = "alphaloop drift show 17 --json"
ACK_EXAMPLE: Final = """\
alphaloop drift ack 17 --by Ada --note "a new draft is in training"
alphaloop drift ack 17 --by Ada --new-level --note "the reviews are longer since Monday"\
"""
_JSON: Final = typer.Option(False, "--json", help="Print as JSON.")
_NUMBER: Final = typer.Argument(min=1, help="Number of the event, as list shows it.")


def list_events(
    context: typer.Context,
    since: str | None = typer.Option(None, help="Also events that ended since then: 30d, 2026-09-01."),
    as_json: bool = _JSON,
) -> None:
    """List the drift that is open: cause, state, and what it costs to do nothing."""
    with open_database(connected_settings(context, broker=False)) as database:
        store = DriftEventStore(database)
        events = store.open_events() if since is None else store.since(moment(since, datetime.now(UTC), "--since"))
    if as_json:
        print_json([as_dict(event) for event in events])
        return
    if not events:
        tell("no drift is open" if since is None else f"no drift was open since {since}")
        return
    shown = table("id", "task", "drafter", "cause", "state", "costs", "since", right=["id", "costs"])
    for event in events:
        cause, at = event.cause.replace("_", " "), f"{event.opened_at:%Y-%m-%d %H:%M}"
        shown.add_row(str(event.id), event.subject.task, event.subject.drafter, cause, event.state, cost(event), at)
    out().print(shown)


def show(context: typer.Context, event_id: int = _NUMBER, as_json: bool = _JSON) -> None:
    """Show an event: what was found, what it costs, what may be done, and its history."""
    with open_database(connected_settings(context, broker=False)) as database:
        store = DriftEventStore(database)
        event, history = store.find(event_id), store.history(event_id)
    if event is None:
        raise NoSuchEvent(f"no drift event {event_id}", hint="`alphaloop drift list --since 90d` shows what there was")
    if as_json:
        print_json(as_dict(event) | {"history": [asdict(state) for state in history]})
        return
    subject = event.subject
    paragraph(f"{event.id}. {subject.task}, {subject.drafter}: {event.cause.replace('_', ' ')}, {event.state}")
    for told in (event.content.verdict, event.content.action, f"Cost of doing nothing: {cost(event)}."):
        paragraph(told, indent=2)
    paragraph("History")
    for state in history:
        paragraph(_line(state), indent=2)


def ack(
    context: typer.Context,
    event_id: int = _NUMBER,
    by: str = typer.Option(help="Who takes note of it."),
    note: str = typer.Option("", help="What they do about it."),
    new_level: bool = typer.Option(
        False, "--new-level", help="Take the level that it has now for the norm, and close the event."
    ),
) -> None:
    """Take note of an open event: its alert ends, the event stays open until evidence closes it.

    With --new-level it is closed, together with the other open ones of its drafter in its task: later jobs and probes
    are compared with the level that they have now.
    """
    if not by.strip() or len(by) > 200 or len(note) > 2000:
        raise AlphaloopError(
            f"expected a name of 1 to 200 characters and a note of at most 2000, found {len(by)} and {len(note)}",
            hint=ACK_EXAMPLE,
        )
    with open_database(connected_settings(context, broker=False)) as database:
        store = DriftEventStore(database)
        if new_level:
            for closed in store.accept(event_id, by.strip(), note):
                tell(f"event {closed.id} is closed: {closed.subject.task}, {closed.cause.replace('_', ' ')}")
            tell("the level that it has now is the norm; the drift test learns it from the jobs to come")
            return
        event = store.acknowledge(event_id, by.strip(), note, datetime.now(UTC))
    tell(f"{by.strip()} has taken note of event {event.id}: {event.subject.task}, {event.cause.replace('_', ' ')}")


def as_dict(event: DriftEvent) -> dict[str, Any]:
    """An event as JSON shows it: flat, with its state."""
    found = asdict(event)
    content = found.pop("content")
    return {"id": found.pop("id"), **content.pop("subject"), "state": event.state, **content, **found}


def cost(event: DriftEvent) -> str:
    """What it costs to do nothing."""
    lost = event.content.lost_tokens_per_s
    return "not known" if lost is None else f"{lost:.3g} tokens/s"


def _line(state: PastState) -> str:
    by = "" if state.actor == "scheduler" else f" by {state.actor}"
    return f"{state.at:%Y-%m-%d %H:%M} {state.state}{by} ({state.cause.replace('_', ' ')}): {state.sentence}"
