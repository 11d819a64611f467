"""`alphaloop tail`: the texts of jobs while they are decoded."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import closing
from typing import Any, Final

import typer

from alphaloop.cli.connection import open_database
from alphaloop.cli.options import connected_settings
from alphaloop.cli.screen import as_shown, note, print_json_line
from alphaloop.errors import AlphaloopError
from alphaloop.messages import Status
from alphaloop.outcomes.reading import Ended, Event, TextSoFar, Waits, follow
from alphaloop.store.known_jobs import known_jobs

EXAMPLE: Final = """\
alphaloop tail order-4711
alphaloop tail order-4711 order-4712 --json"""


def tail(
    context: typer.Context,
    job_id: list[str] = typer.Argument(help="The jobs to follow."),
    timeout: float = typer.Option(1800.0, min=0.0, help="Seconds to wait for the ends of the jobs."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object a line: each new text, and each end."),
) -> None:
    """Show texts while they are decoded, until every job has ended.

    A job sent with stream=true appears as it grows, any other at its end. A text is printed on standard output; what
    happens to the job, on standard error. Of several jobs each line begins with the job's id. The exit code is 0 if
    every job succeeded.
    """
    settings = connected_settings(context)
    wanted = list(dict.fromkeys(job_id))
    with closing(open_database(settings)) as database:
        events = follow(settings.kafka, lambda ids: known_jobs(database, ids), wanted, timeout_s=timeout)
        ends = _show_json(events) if as_json else _show(events, is_one=len(wanted) == 1)
    if missing := [one for one in wanted if one not in ends]:
        raise AlphaloopError(
            f"not ended within {timeout:g} s: {', '.join(missing)}",
            hint="is a worker running? `alphaloop status` shows it, and `alphaloop dlq list` shows refused messages",
        )
    if any(end.status is not Status.SUCCEEDED for end in ends.values()):
        raise typer.Exit(1)


class GrowingText:
    """One job's text on standard output. What is printed stays, so a new attempt goes on where it says the same."""

    def __init__(self, job_id: str, *, is_one: bool) -> None:
        self._job_id = job_id
        self._is_one = is_one
        self._shown = ""
        self._line = ""  #: of several jobs: the line that is not complete
        self._is_in_line = False  #: of one job: whether what was printed does not end a line

    def show(self, text: str, *, is_end: bool = False) -> None:
        """Print what is new of the text so far."""
        if self._shown.startswith(text) and not (is_end and text != self._shown):
            return  # a new attempt has not come so far yet
        if not text.startswith(self._shown):
            self._finish_line()
            note(f"{self._job_id}: decoded again with another text; it begins here")
            self._shown = ""
        self._print(text[len(self._shown) :])
        self._shown = text

    def end(self, text: str | None = None) -> None:
        """Nothing more comes; `text` is the whole text where there is one."""
        if text is not None:
            self.show(text, is_end=True)
        self._finish_line()

    def _print(self, text: str) -> None:
        text = as_shown(text)
        if self._is_one:
            sys.stdout.write(text)
            self._is_in_line = not text.endswith("\n") if text else self._is_in_line
        else:
            *lines, self._line = (self._line + text).split("\n")
            sys.stdout.writelines(f"{self._job_id}  {line}\n" for line in lines)
        sys.stdout.flush()

    def _finish_line(self) -> None:
        if self._is_in_line:
            sys.stdout.write("\n")
            self._is_in_line = False
        if self._line:
            sys.stdout.write(f"{self._job_id}  {self._line}\n")
            self._line = ""
        sys.stdout.flush()


def _show(events: Iterable[Event], *, is_one: bool) -> dict[str, Ended]:
    texts: dict[str, GrowingText] = {}
    ends: dict[str, Ended] = {}
    for event in events:
        text = texts.setdefault(event.job_id, GrowingText(event.job_id, is_one=is_one))
        match event:
            case Waits():
                note(f"{event.job_id}: {_waiting(event)}")
            case TextSoFar():
                text.show(event.text)
            case Ended():
                ends[event.job_id] = event
                text.end(event.text)
                note(f"{event.job_id}: {_ending(event)}")
    return ends


def _show_json(events: Iterable[Event]) -> dict[str, Ended]:
    ends: dict[str, Ended] = {}
    shown: dict[str, TextSoFar] = {}
    for event in events:
        line: dict[str, Any] = {"job_id": event.job_id}
        match event:
            case Waits():
                line |= {"status": "running" if event.is_claimed else "unknown"}
            case TextSoFar():
                before = shown.get(event.job_id)
                is_same = before is not None and before.attempt == event.attempt
                num_shown = len(before.text) if before is not None and is_same else 0
                line |= {"attempt": event.attempt, "new_text": event.text[num_shown:]}
                shown[event.job_id] = event
            case Ended():
                ends[event.job_id] = event
                line |= {"status": event.status.value, "text": event.text, "streamed": event.is_streamed}
                line |= {"reason": event.reason} if event.reason else {}
        print_json_line(line)
    return ends


def _waiting(event: Waits) -> str:
    if event.is_claimed:
        return "a worker has it; a text that is not streamed comes at its end"
    return "no worker has seen it: it waits in Kafka, or no such job was sent"


def _ending(event: Ended) -> str:
    told = event.status.value + (f", {event.reason}" if event.reason else "")
    return told if event.is_streamed else f"{told}; it was not streamed"
