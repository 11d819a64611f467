"""Jobs: the newest, those of a batch, and one, with its text while it is decoded, as server-sent events. Dead letters:
the newest, one with its reason, and what sending some of them again would do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final
from urllib.parse import urlencode

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from alphaloop.console.page import Page, WrongRequest, moment, named, past, text
from alphaloop.console.reading import Sources, errors_of
from alphaloop.dead_letters.reading import DeadLetterFilter, DeadLetterRecord, newest_dead_letters, require_dead_letters
from alphaloop.dead_letters.redriving import Redrive, corrections_of
from alphaloop.errors import AlphaloopError, ConfigError, UnknownName
from alphaloop.messages import Result, Status, fields_of
from alphaloop.messages.dead_letter import is_reason
from alphaloop.outcomes.reading import Ended, Event, JobPlace, TextSoFar, Waits, find_jobs, follow, text_so_far
from alphaloop.store.api import Deed, write_down
from alphaloop.store.known_jobs import JobPages, LetterKey, ListedJob, PageStart, RedriveStore, Wanted, known_jobs
from alphaloop.store.spending import SpendingStore, spent_as_json
from alphaloop.store.workers import not_served

_PAGE_SIZE: Final = 50
#: Parameters of an address that choose jobs.
_FILTERS: Final = ("task", "status", "since", "until", "batch")
#: What a row may have: a refused message has no row.
_STATUSES: Final = ("running", *(status.value for status in Status if status is not Status.REFUSED))
log = logging.getLogger(__name__)
#: Each stream has a thread and a consumer of its own.
_MAX_STREAMS: Final = 24
#: After this long a stream ends, and the browser asks anew: then it is seen whether its session still stands.
_LONGEST_S: Final = 600.0
_ALIVE_EVERY_S: Final = 15.0
#: Reads events until they end or no browser watches: alphaloop.outcomes.reading.follow of one job.
Read = Callable[[Callable[[], bool]], Iterable[Event]]


def jobs(sources: Sources, request: Request) -> Page:
    """The newest jobs of the task `task`, with the status `status`, claimed first from `since` to `until`.

    Or those of the batch `batch`. A page begins after the job `behind`, which was claimed at `at`.
    """
    asked = {name: value for name in _FILTERS if (value := text(request, name))}
    wanted = _wanted(asked)
    pages, behind, at = JobPages(sources.database), text(request, "behind"), moment(request, "at")
    if "batch" in asked:
        of_batch = pages.of_batch(asked["batch"], _PAGE_SIZE + 1, wanted, after=behind)
        shown, num_walked = of_batch[:_PAGE_SIZE], len(of_batch)
        last = PageStart(shown[-1].created_at, shown[-1].job_id) if len(of_batch) > _PAGE_SIZE else None
    else:
        page = pages.newest(_PAGE_SIZE, wanted, after=PageStart(at, behind) if at is not None else None)
        shown, num_walked, last = page.jobs, page.num_walked, page.next_page
    return Page(
        "jobs.html.j2",
        "Jobs",
        {
            "jobs": shown,
            "asked": asked,
            "behind": None if last is None else {"at": last.created_at, "job_id": last.job_id},
            "is_first": not behind,
            # How many were looked at, where the page ends before it is full.
            "num_walked": num_walked if last is not None and len(shown) < _PAGE_SIZE else None,
        },
        {
            "statuses": _STATUSES,
            "first": urlencode(asked),
            "next": last and urlencode({**asked, "behind": last.job_id, "at": last.created_at.isoformat()}),
        },
    )


def _wanted(asked: Mapping[str, str]) -> Wanted:
    status = asked.get("status")
    if status is not None and status not in _STATUSES:
        raise WrongRequest(f"status: expected one of {', '.join(_STATUSES)}, found {status[:60]!r}")
    return Wanted(asked.get("task"), status, past(asked, "since"), past(asked, "until"))


def job(sources: Sources, request: Request) -> Page:
    """The job `id`; of one that runs with `show=text` the text so far, where pages need a sign-in.

    One that no worker has claimed waits in Kafka, or was never sent.
    """
    job_id = named(request, "job")
    known = JobPages(sources.database).find(job_id)
    find = partial(find_jobs, sources.settings, sources.database, [job_id])
    elsewhere = None if known else sources.remembered.get(("job", job_id), find)
    where = elsewhere.value[0] if elsewhere and elsewhere.value else None
    is_running = known is not None and known.status == "running"
    result = _result(sources, known) if known is not None and not is_running else None
    spent = SpendingStore(sources.database, sources.settings.prices).of_jobs([job_id]).get(job_id)
    is_text_asked_for = is_running and sources.shows_texts and text(request, "show") == "text"
    so_far = None
    if known is not None and is_text_asked_for:
        so_far = text_so_far(sources.settings.kafka, job_id, known.created_at)
    reading, letter = None, None
    if (where is not None and not where.is_open) or (known is not None and known.status == Status.FAILED):
        choice, kafka = DeadLetterFilter(job_ids=frozenset({job_id})), sources.settings.kafka
        reading = sources.remembered.get(
            ("letter", job_id), lambda: newest_dead_letters(kafka, choice, 9, depth=_DEPTH)
        )
        reasons = (reason.shown for reason in reversed(reading.value or ()))
        letter = next((reason for reason in reasons if job_id in (reason["job_id"], reason["sent_job_id"])), None)
    return Page(
        "job.html.j2",
        "Job",
        {
            "job_id": job_id,
            "job": known,
            "spent": spent_as_json(spent, sources.settings.prices.currency),
            "result": result and result.model_dump(mode="json", exclude_none=True),
            "text_so_far": so_far,
            "where": where and where.as_json(),
            "letter": letter,
            "errors": errors_of(broker=elsewhere, **{"dead letters": reading}),
        },
        {
            "may_cancel": is_running or (where is not None and where.is_open),
            "result": result,
            "not_served": known is not None
            and is_running
            and not known.owner
            and not_served(sources.settings.bindings, known.task, sources.workers()),
            "asked": text(request, "asked"),
            "took": spent and spent.in_words(sources.settings.prices.currency),
            "is_followed": is_running and sources.shows_texts,
            "is_text_shown": is_text_asked_for,
        },
        status=200 if known or letter or (where and where.place is not JobPlace.UNKNOWN) else 404,
        is_live=known is None or is_running,
    )


def follow_job(sources: Sources, request: Request) -> Read:
    """Reads the job `id` as `alphaloop tail` does. Raises UnknownName, and WrongRequest where texts are hidden."""
    job_id = named(request, "job")
    if not sources.shows_texts:
        raise WrongRequest("texts of jobs are shown to those who sign in", hint="set console.password")
    if not known_jobs(sources.database, [job_id]):
        raise UnknownName(f"no worker has claimed a job {job_id[:100]!r}")

    def read(is_watched: Callable[[], bool]) -> Iterable[Event]:
        kafka = sources.settings.kafka
        return follow(kafka, sources.database, [job_id], timeout_s=_LONGEST_S, is_watched=is_watched)

    return read


def _result(sources: Sources, listed: ListedJob) -> Result | None:
    """The recorded result; without its texts where pages need no sign-in."""
    known = known_jobs(sources.database, [listed.job_id]).get(listed.job_id)
    if known is None or known.outcome is None:
        return None
    try:
        result = Result.decode(known.outcome)
    except ValidationError:
        return None
    return result if sources.shows_texts else result.without_texts()


class Streams:
    """The streams that are open. Threads share it."""

    def __init__(self, limit: int = _MAX_STREAMS) -> None:
        self._free = threading.BoundedSemaphore(limit)

    def answer(self, read: Read) -> Response:
        """A stream of events; beyond the limit one that says so, because a browser does not ask again after that."""
        headers = {"X-Accel-Buffering": "no"}  # a proxy must not collect it
        return StreamingResponse(self._events(read), media_type="text/event-stream", headers=headers)

    async def _events(self, read: Read) -> AsyncIterator[str]:
        if not self._free.acquire(blocking=False):
            yield _sent("refused", {"reason": "too many streams are open"})
            return
        watched, sent, is_over = _Watched(read), "", False
        try:
            while not is_over:
                is_over, event = await watched.news(_ALIVE_EVERY_S)
                said, sent = _of(event, sent)
                yield said
        finally:
            watched.is_stopped.set()
            self._free.release()


class _Watched:
    """Hands the newest event of a reading thread to the loop that sends. Older ones are of no use any more."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._newest: Event | str | None = None
        self._is_over = False
        self.is_stopped: Final = threading.Event()
        threading.Thread(target=self._run, name="console-stream", daemon=True).start()

    async def news(self, timeout_s: float) -> tuple[bool, Event | str | None]:
        """Whether nothing follows, and the newest event since the last call: a text is why the reading failed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)
        self._news.clear()
        event, self._newest = self._newest, None
        return self._is_over, event

    def _run(self) -> None:
        failed: str | None = None
        try:
            for event in self._read(lambda: not self.is_stopped.is_set()):
                self._tell(event, is_over=isinstance(event, Ended))
        except AlphaloopError as error:
            failed = error.message
        except Exception as error:
            # Only its class: the text of a foreign exception may quote a prompt.
            log.error("a stream failed: %s", type(error).__name__, extra={"action": "console_failed"})
            failed = type(error).__name__
        self._tell(failed, is_over=True)

    def _tell(self, event: Event | str | None, *, is_over: bool) -> None:
        def note() -> None:
            self._newest, self._is_over = event or self._newest, self._is_over or is_over
            self._news.set()

        with suppress(RuntimeError):  # the loop is closed: the console stops
            self._loop.call_soon_threadsafe(note)


def _of(event: Event | str | None, sent: str) -> tuple[str, str]:
    """What is sent for an event after the text that was sent before, and the text that is sent then."""
    match event:
        case Waits():
            return _sent("waits", {"is_claimed": event.is_claimed}), sent
        case TextSoFar():
            return _text(event.shown, sent), event.shown
        case Ended():
            end = _sent("end", {"status": event.status.value, "reason": event.reason})
            return (end if event.shown is None else _text(event.shown, sent) + end), sent
        case str():
            return _sent("refused", {"reason": event}), sent
    return ": \n\n", sent  # nothing new; a browser that is gone is seen by that


def _text(text: str, sent: str) -> str:
    """What is new; the whole text where it does not continue what was sent: the job is decoded again."""
    if sent and text.startswith(sent):
        return _sent("text", {"add": text[len(sent) :]}) if len(text) > len(sent) else ""
    return _sent("text", {"text": text})


def _sent(event: str, data: Mapping[str, Any]) -> str:
    return f"event: {event}\ndata: {json.dumps(data)}\n\n"


_MOST_LETTERS: Final = 100
#: The newest letters of each partition that are looked through where not all are asked for.
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
    reading = sources.remembered.get(key, lambda: newest_dead_letters(kafka, choice, _MOST_LETTERS, depth=_DEPTH))
    newest = list(reversed(reading.value or ()))
    redriven = _redriven(sources, [listed.key for listed in newest])
    return Page(
        "letters.html.j2",
        "Dead letters",
        {
            "letters": [listed.with_redrive(redriven) for listed in newest],
            "asked": asked,
            "limit": _MOST_LETTERS,
            "read_at": reading.read_at,
            "errors": errors_of(broker=reading),
        },
        {"query": urlencode(asked), "num_sent": text(request, "sent"), "may_act": sources.shows_texts},
    )


def letter(sources: Sources, request: Request) -> Page:
    """The letter at `at`; its message with `show=message`, where pages need a sign-in."""
    dead_letter = _at(sources, text(request, "at"))
    job_id = (_redriven(sources, [dead_letter.key]) or {}).get(dead_letter.key)
    is_asked_for = text(request, "show") == "message"
    value = dead_letter.record.value or b""
    data: dict[str, Any] = {
        **dead_letter.as_json(),
        "is_failed_job": dead_letter.is_failed_job,
        "batch_id": (fields_of(value) or {}).get("batch_id"),
        "reason": dead_letter.reason,
        "headers": {
            name: content.decode("utf-8", "replace") if sources.shows_texts else f"{len(content)} bytes"
            for name, content in dead_letter.record.headers
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
    tried = run(sources, asked, corrections, again=again)
    data = {"asked": asked, "corrections": corrections, "again": again, "limit": _MAX_REDRIVEN, **tried.as_json()}
    return Page("redrive.html.j2", "Send dead letters again", data, is_live=False)


def run(
    sources: Sources, asked: Mapping[str, str], corrections: str, *, again: bool, deed: Deed | None = None
) -> Redrive:
    """Send the chosen letters again, at most MAX_REDRIVEN, as `alphaloop dlq redrive` does.

    Nothing is sent without `deed`, which the audit has before. `corrections` has one FIELD=VALUE a line. Raises
    WrongRequest, UnknownName, BrokerError, StoreError.
    """
    choice = choice_of(asked)
    if choice.is_by_task_only and choice.task is None:
        raise WrongRequest("choose letters first: by task, code, job, time or place")
    try:
        fields = corrections_of([line.strip() for line in corrections.splitlines() if line.strip()], "corrections")
    except ConfigError as error:
        raise WrongRequest(error.message, hint=error.hint) from None
    require_dead_letters(sources.settings, choice)
    if deed is not None:
        write_down(sources.database, deed)
    done = Redrive(sources.settings, RedriveStore(sources.database), fields, again=again, dry_run=deed is None)
    done.run(choice, _MAX_REDRIVEN)
    return done


def choice_of(asked: Mapping[str, str]) -> DeadLetterFilter:
    """The letters that the parameters of an address or a form choose. Raises WrongRequest for a time that is none."""
    code, job, at = (frozenset({asked[name]} if name in asked else ()) for name in ("code", "job", "at"))
    return DeadLetterFilter(asked.get("task"), code, job, at, past(asked, "since"), past(asked, "until"))


def _asked(request: Request) -> dict[str, str]:
    return {name: value for name in FILTERS if (value := text(request, name))}


def _at(sources: Sources, place: str) -> DeadLetterRecord:
    dead_letter = (
        next(DeadLetterFilter(places=frozenset({place})).letters(sources.settings.kafka), None) if place else None
    )
    if dead_letter is None:
        raise UnknownName(f"no dead letter at {place[:200]!r}", hint="it was deleted, or was never there")
    return dead_letter


def _redriven(sources: Sources, keys: Collection[LetterKey]) -> Mapping[LetterKey, str] | None:
    """The letters that were sent again; None where the database does not answer, because the rest is of use without."""
    with contextlib.suppress(AlphaloopError):
        return RedriveStore(sources.database).of(keys)
    return None
