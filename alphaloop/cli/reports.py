"""What the scheduler found: `alphaloop report`, `drift` and `notify`."""

from __future__ import annotations

import socket
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import typer

from alphaloop.cli.options import AS_JSON, connected_settings, example, global_options, open_database
from alphaloop.cli.screen import note as tell
from alphaloop.cli.screen import out, paragraph, print_json, show_rows
from alphaloop.errors import AlphaloopError, ConfigError, NotificationFailed, UnknownName
from alphaloop.files import Destination
from alphaloop.notifying import Gravity, NotificationText, open_sinks
from alphaloop.store.drift import DriftEvent, DriftEventStore, PastState
from alphaloop.store.reports import Attempted, NotificationStore, ReportStore, StoredReport
from alphaloop.wording import minute, moment_ago, words

ACK_EXAMPLE: Final = """\
alphaloop drift ack 17 --by Ada --note "a new draft is in training"
alphaloop drift ack 17 --by Ada --new-level --note "longer reviews"\
"""
_NUMBER: Final = typer.Argument(min=1, help="Number of the event, as list shows it.")
TEST_EXAMPLE: Final = "ALPHALOOP_SCHEDULER__NOTIFY_URLS='[\"json://hook\"]' alphaloop notify test"


@example("""\
alphaloop report
alphaloop report --html report.html""")
def report(
    context: typer.Context,
    html: Path | None = typer.Option(None, help="Write the page to this file instead, - for standard output."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Show the newest report.

    For the terminal, as one self-contained page, or as data.
    """
    if html is not None and as_json:
        raise typer.BadParameter("expected either --html or --json")
    target = None if html is None else Destination.of(html, option="--html")
    with open_database(connected_settings(context, broker=False)) as database:
        newest = ReportStore(database).latest()
    if newest is None:
        raise AlphaloopError("there is no report yet", hint="make one now with `alphaloop scheduler once`")
    _say_if_old(newest)
    if as_json:
        print_json({**newest.content, "created_at": newest.created_at, "summary": newest.summary})
    elif html is None or target is None:
        out().print(newest.text, soft_wrap=True)
    else:
        with target.writing() as file:
            file.write(newest.html)
        if html.is_file():
            tell(f"written to {html.absolute().as_uri()}")


def _say_if_old(newest: StoredReport) -> None:
    """A note where a newer report should exist."""
    next_due = newest.content.get("next_due")
    if next_due is not None and datetime.fromisoformat(next_due) < datetime.now(UTC):
        tell(
            f"this report is old: it was made at {minute(newest.created_at)}, and the run that was due at "
            f"{minute(datetime.fromisoformat(next_due))} made none yet; does a scheduler run?"
        )


@example("""\
alphaloop drift list
alphaloop drift list --since 30d --json""")
def list_events(
    context: typer.Context,
    since: str | None = typer.Option(None, help="Also events that ended since then: 30d, 2026-09-01."),
    as_json: bool = AS_JSON,
) -> None:
    """List open drift events: cause, state, and what it costs to do nothing."""
    with open_database(connected_settings(context, broker=False)) as database:
        store = DriftEventStore(database)
        events = store.open_events() if since is None else store.since(moment_ago(since, datetime.now(UTC), "--since"))
    show_rows(
        events,
        *("id", "task", "drafter", "cause", "state", "costs", "since"),
        right=["id", "costs"],
        cells=_event_cells,
        nothing="no drift is open" if since is None else f"no drift was open since {since}",
        as_json=as_json,
        row_as_json=_as_dict,
    )


def _event_cells(event: DriftEvent) -> list[str]:
    subject, opened = event.subject, f"{event.opened_at:%Y-%m-%d %H:%M}"
    return [str(event.id), subject.task, subject.drafter, words(event.cause), event.state, cost(event), opened]


@example("alphaloop drift show 17 --json")
def show(context: typer.Context, event_id: int = _NUMBER, as_json: bool = AS_JSON) -> None:
    """Show an event: what was found, what it costs, what may be done, and its history."""
    with open_database(connected_settings(context, broker=False)) as database:
        store = DriftEventStore(database)
        event, history = store.find(event_id), store.history(event_id)
    if event is None:
        raise UnknownName(f"no drift event {event_id}", hint="`alphaloop drift list --since 90d` shows what there was")
    if as_json:
        print_json(_as_dict(event) | {"history": [asdict(state) for state in history]})
        return
    subject = event.subject
    paragraph(f"{event.id}. {subject.task}, {subject.drafter}: {words(event.cause)}, {event.state}")
    for sentence in (event.content.verdict, event.content.action, f"Cost of doing nothing: {cost(event)}."):
        paragraph(sentence, indent=2)
    paragraph("History")
    for state in history:
        paragraph(_line(state), indent=2)


@example(ACK_EXAMPLE)
def ack(
    context: typer.Context,
    event_id: int = _NUMBER,
    by: str = typer.Option(help="Who takes note of it."),
    note: str = typer.Option("", help="What they do about it."),
    new_level: bool = typer.Option(
        False, "--new-level", help="Take the level that it has now for the norm, and close the event."
    ),
) -> None:
    """Acknowledge an event, which silences its alert. The event stays open until evidence closes it.

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
                tell(f"event {closed.id} is closed: {closed.subject.task}, {words(closed.cause)}")
            tell("the level that it has now is the norm; the drift test learns it from the jobs to come")
            return
        event = store.acknowledge(event_id, by.strip(), note, datetime.now(UTC))
    tell(f"{by.strip()} has taken note of event {event.id}: {event.subject.task}, {words(event.cause)}")


def _as_dict(event: DriftEvent) -> dict[str, Any]:
    """An event as JSON shows it: flat, with its state."""
    fields = asdict(event)
    content = fields.pop("content")
    return {"id": fields.pop("id"), **content.pop("subject"), "state": event.state, **content, **fields}


def cost(event: DriftEvent) -> str:
    """What it costs to do nothing."""
    lost = event.content.lost_tokens_per_s
    return "not known" if lost is None else f"{lost:.3g} tokens/s"


def _line(state: PastState) -> str:
    by = "" if state.actor == "scheduler" else f" by {state.actor}"
    return f"{state.at:%Y-%m-%d %H:%M} {state.state}{by} ({words(state.cause)}): {state.sentence}"


@example(TEST_EXAMPLE)
def test(context: typer.Context) -> None:
    """Send a test message to every address of scheduler.notify_urls, and say which of them took it."""
    sinks = open_sinks(global_options(context).settings().scheduler.notify_urls)
    if not sinks:
        raise ConfigError("scheduler.notify_urls: expected at least one address, found none", hint=TEST_EXAMPLE)
    message = NotificationText(
        "alphaloop: a test", f"Sent by `alphaloop notify test` on {socket.gethostname()}.", Gravity.INFO
    )
    num_failed = 0
    for sink in sinks:
        try:
            sink.send(message)
            tell(f"{sink.name}: taken")
        except NotificationFailed as error:
            num_failed += 1
            tell(error.message)
    if num_failed:
        raise NotificationFailed(f"{num_failed} of {len(sinks)} addresses did not take the message")


@example("alphaloop notify list --json")
def list_attempts(
    context: typer.Context,
    limit: int = typer.Option(50, min=1, max=10_000, help="Most lines."),
    as_json: bool = AS_JSON,
) -> None:
    """List deliveries, the newest first, and those that failed."""
    with open_database(connected_settings(context, broker=False)) as database:
        attempts = NotificationStore(database).attempted(limit)
    show_rows(
        attempts,
        *("to", "about", "number", "attempts", "last attempt", "outcome"),
        right=["number", "attempts"],
        cells=_attempt_cells,
        nothing="nothing was sent yet",
        as_json=as_json,
        row_as_json=asdict,
    )


def _attempt_cells(attempt: Attempted) -> list[str]:
    outcome = "taken" if attempt.sent_at is not None else attempt.failure or "not known: the process ended meanwhile"
    at = f"{attempt.attempted_at:%Y-%m-%d %H:%M}"
    return [attempt.sink, words(attempt.kind.value), str(attempt.source_id), str(attempt.num_attempts), at, outcome]
