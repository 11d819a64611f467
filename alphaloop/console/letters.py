"""Dead letters: the newest, one with its reason, and what sending some of them again would do."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from starlette.requests import Request

from alphaloop.console.page import NotFound, Page, WrongRequest, past, text
from alphaloop.console.reading import Sources
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.letters.reading import Letter, LetterFilter, newest_letters
from alphaloop.letters.redriving import Redrive, corrections_of
from alphaloop.messages.dead_letter import is_reason
from alphaloop.store.known_jobs import LetterKey, RedriveStore

_PAGE_SIZE: Final = 100
#: Of each partition so many of the newest letters are looked through where not all are asked for.
_DEPTH: Final = 20_000
#: Letters that one click sends again.
_MAX_REDRIVEN: Final = 1000
#: Parameters of an address that choose letters.
FILTERS: Final = ("task", "code", "job", "since", "until", "at")


def letters(sources: Sources, request: Request) -> Page:
    """The newest letters of the task `task`, with the code `code`, of the job `job`, written since `since`."""
    asked = _asked(request)
    choice = choice_of(asked)
    kafka = sources.settings.kafka
    key = ("letters", *sorted(asked.items()))
    reading = sources.remembered.get(key, lambda: newest_letters(kafka, choice, _PAGE_SIZE, depth=_DEPTH))
    found = list(reversed(reading.value or ()))
    redriven = _redriven(sources, [one.key for one in found])
    return Page(
        "letters.html.j2",
        "Dead letters",
        {
            "letters": [one.with_redrive(redriven) for one in found],
            "asked": asked,
            "limit": _PAGE_SIZE,
            "read_at": reading.read_at,
            "errors": {"broker": reading.error} if reading.error else {},
        },
        {"query": urlencode(asked), "num_sent": text(request, "sent"), "may_act": sources.shows_texts},
    )


def letter(sources: Sources, request: Request) -> Page:
    """The letter at `at`; its message with `show=message`, where somebody has to sign in to see it."""
    found = _at(sources, text(request, "at"))
    job_id = (_redriven(sources, [found.key]) or {}).get(found.key)
    is_asked_for = text(request, "show") == "message"
    value = found.record.value or b""
    data: dict[str, Any] = {
        **found.as_json(),
        "hint": found.reason.get("message", "").partition("\nhint: ")[2] or None,
        "is_failed_job": found.is_failed_job,
        "reason": found.reason,
        "headers": {
            name: content.decode("utf-8", "replace") if sources.shows_texts else f"{len(content)} bytes"
            for name, content in found.record.headers
            if not is_reason(name)
        },
        "redriven_as": job_id,
    }
    if is_asked_for and sources.shows_texts:
        data["value"] = value.decode("utf-8", "replace")
    return Page("letter.html.j2", "Dead letter", data, {"may_act": sources.shows_texts}, is_live=False)


def redrive(sources: Sources, request: Request) -> Page:
    """What sending the chosen letters again would do, with the corrections of `set`. Nothing is sent."""
    if not sources.shows_texts:
        raise WrongRequest("letters are sent again by those who sign in", hint="set console.password")
    asked, corrections = _asked(request), request.query_params.get("set", "")
    asked.setdefault("until", "0s")  # what is confirmed is what was shown: later letters are not meant
    asked |= {name: at.isoformat() for name in ("since", "until") if (at := past(asked, name))}
    again = text(request, "again") == "1"
    tried = run(sources, asked, corrections, again=again, dry_run=True)
    data = {"asked": asked, "corrections": corrections, "again": again, "limit": _MAX_REDRIVEN, **tried.as_json()}
    return Page("redrive.html.j2", "Send dead letters again", data, is_live=False)


def run(sources: Sources, asked: Mapping[str, str], corrections: str, *, again: bool, dry_run: bool) -> Redrive:
    """Send the chosen letters again, at most MAX_REDRIVEN, as `alphaloop dlq redrive` does.

    `corrections` has one FIELD=VALUE a line. Raises WrongRequest, BrokerError, StoreError.
    """
    choice = choice_of(asked)
    if choice.is_by_task_only and choice.task is None:
        raise WrongRequest("choose letters first: by task, code, job, time or place")
    try:
        fields = corrections_of([line.strip() for line in corrections.splitlines() if line.strip()], "corrections")
    except ConfigError as error:
        raise WrongRequest(error.message, hint=error.hint) from None
    done = Redrive(sources.settings.kafka, RedriveStore(sources.database), fields, again=again, dry_run=dry_run)
    done.run(choice, _MAX_REDRIVEN)
    return done


def choice_of(asked: Mapping[str, str]) -> LetterFilter:
    """The letters that the parameters of an address or a form choose. Raises WrongRequest for a time that is none."""
    code, job, at = (frozenset({asked[name]} if name in asked else ()) for name in ("code", "job", "at"))
    return LetterFilter(asked.get("task"), code, job, at, past(asked, "since"), past(asked, "until"))


def _asked(request: Request) -> dict[str, str]:
    return {name: found for name in FILTERS if (found := text(request, name))}


def _at(sources: Sources, place: str) -> Letter:
    found = next(LetterFilter(places=frozenset({place})).letters(sources.settings.kafka), None) if place else None
    if found is None:
        raise NotFound(f"no dead letter at {place[:200]!r}", hint="it was deleted, or was never there")
    return found


def _redriven(sources: Sources, keys: Collection[LetterKey]) -> Mapping[LetterKey, str] | None:
    """The letters that were sent again; None where the database does not tell, because the rest is of use without."""
    with contextlib.suppress(AlphaloopError):
        return RedriveStore(sources.database).of(keys)
    return None
