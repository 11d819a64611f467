"""Jobs: the newest, those of a batch, and one, with its text while it is decoded, as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlencode

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from alphaloop.console.page import Page, WrongRequest, moment, named, past, text
from alphaloop.console.reading import Sources
from alphaloop.errors import AlphaloopError
from alphaloop.messages import Result, Status
from alphaloop.outcomes.reading import Ended, Event, TextSoFar, Waits, follow, text_so_far
from alphaloop.store.known_jobs import JobPages, ListedJob, PageStart, Wanted, known_jobs
from alphaloop.store.workers import not_served

_PAGE_SIZE: Final = 50
#: Parameters of an address that choose jobs.
_FILTERS: Final = ("task", "status", "since", "until", "batch")
#: Of rows: a refused message has none.
_STATUSES: Final = ("running", *(one.value for one in Status if one is not Status.REFUSED))
#: Longest reading of the text so far.
_SO_FAR_S: Final = 10.0
log = logging.getLogger(__name__)
#: Each stream has a thread and a consumer of its own.
_MAX_STREAMS: Final = 24
#: After this long a stream ends, and the browser asks anew: then it is seen whether its session still stands.
_LONGEST_S: Final = 600.0
_ALIVE_EVERY_S: Final = 15.0
#: Reads events until they end or nobody watches: alphaloop.outcomes.reading.follow of one job.
Read = Callable[[Callable[[], bool]], Iterable[Event]]


def jobs(sources: Sources, request: Request) -> Page:
    """The newest jobs of the task `task`, with the status `status`, claimed first from `since` to `until`.

    Or those of the batch `batch`. A page begins behind the job `behind`, which was claimed at `at`.
    """
    asked = {name: found for name in _FILTERS if (found := text(request, name))}
    wanted = _wanted(asked)
    pages, behind, at = JobPages(sources.database), text(request, "behind"), moment(request, "at")
    if "batch" in asked:
        of_batch = pages.of_batch(asked["batch"], _PAGE_SIZE + 1, wanted, behind=behind)
        shown, num_walked = of_batch[:_PAGE_SIZE], len(of_batch)
        last = PageStart(shown[-1].created_at, shown[-1].job_id) if len(of_batch) > _PAGE_SIZE else None
    else:
        page = pages.newest(_PAGE_SIZE, wanted, behind=PageStart(at, behind) if at is not None else None)
        shown, num_walked, last = page.jobs, page.num_walked, page.behind
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
    """The job `id`; of one that runs with `show=text` the text so far, where somebody has to sign in to see it.

    One that no worker has claimed waits in Kafka, or was never sent.
    """
    job_id = named(request, "job")
    found = JobPages(sources.database).find(job_id)
    is_running = found is not None and found.status == "running"
    result = _result(sources, found) if found is not None and not is_running else None
    is_text_asked_for = is_running and sources.shows_texts and text(request, "show") == "text"
    so_far = None
    if found is not None and is_text_asked_for:
        so_far = text_so_far(sources.settings.kafka, job_id, found.created_at, timeout_s=_SO_FAR_S)
    return Page(
        "job.html.j2",
        "Job",
        {
            "job_id": job_id,
            "job": found,
            "result": result and result.model_dump(mode="json", exclude_none=True),
            "text_so_far": so_far,
        },
        {
            "result": result,
            "not_served": found and not_served(sources.settings.bindings, found.task, sources.workers()),
            "asked": text(request, "asked"),
            "is_followed": is_running and sources.shows_texts,
            "is_text_shown": is_text_asked_for,
        },
        status=200 if found is not None else 404,
        is_live=found is None or is_running,
    )


def follow_job(sources: Sources, request: Request) -> Read:
    """Reads the job `id` as `alphaloop tail` does. Raises NotFound without one, WrongRequest where texts are hidden."""
    job_id = named(request, "job")
    if not sources.shows_texts:
        raise WrongRequest("texts of jobs are shown to those who sign in", hint="set console.password")

    def read(is_watched: Callable[[], bool]) -> Iterable[Event]:
        kafka, database = sources.settings.kafka, sources.database
        return follow(
            kafka, lambda ids: known_jobs(database, ids), [job_id], timeout_s=_LONGEST_S, is_watched=is_watched
        )

    return read


def _result(sources: Sources, found: ListedJob) -> Result | None:
    """The recorded result; without its texts unless somebody has to sign in to see it."""
    known = known_jobs(sources.database, [found.job_id]).get(found.job_id)
    if known is None or known.outcome is None:
        return None
    try:
        result = Result.decode(known.outcome)
    except ValidationError:
        return None
    hidden = {"text": None, "text_ref": None, "choices": (), "choices_ref": None}
    return result if sources.shows_texts else result.model_copy(update=hidden)


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
        watched, told, is_over = _Watched(read), "", False
        try:
            while not is_over:
                is_over, event = await watched.news(_ALIVE_EVERY_S)
                said, told = _of(event, told)
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


def _of(event: Event | str | None, told: str) -> tuple[str, str]:
    """What is sent for an event behind the text that was told before, and the text that is told then."""
    match event:
        case Waits():
            return _sent("waits", {"is_claimed": event.is_claimed}), told
        case TextSoFar():
            return _text(event.shown, told), event.shown
        case Ended():
            end = _sent("end", {"status": event.status.value, "reason": event.reason})
            return (end if event.shown is None else _text(event.shown, told) + end), told
        case str():
            return _sent("refused", {"reason": event}), told
    return ": \n\n", told  # nothing new; a browser that is gone is seen by that


def _text(text: str, told: str) -> str:
    """What is new; the whole text where it does not go on with what was told: the job is decoded again."""
    if told and text.startswith(told):
        return _sent("text", {"add": text[len(told) :]}) if len(text) > len(told) else ""
    return _sent("text", {"text": text})


def _sent(event: str, data: Mapping[str, Any]) -> str:
    return f"event: {event}\ndata: {json.dumps(data)}\n\n"
