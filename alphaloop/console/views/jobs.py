"""Jobs: the newest, those of a batch, and one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final
from urllib.parse import urlencode

from pydantic import ValidationError
from starlette.requests import Request

from alphaloop.console.page import NotFound, Page, WrongRequest
from alphaloop.console.sources import Sources
from alphaloop.console.streaming import LONGEST_S, Read
from alphaloop.console.views.asked import moment, past, text
from alphaloop.messages import Result, Status
from alphaloop.outcomes.reading import Event, TextSoFar, follow, text_so_far
from alphaloop.store.known_jobs import JobPages, ListedJob, PageStart, Wanted, known_jobs

PAGE_SIZE: Final = 50
#: Parameters of an address that choose jobs.
FILTERS: Final = ("task", "status", "since", "until", "batch")
STATUSES: Final = ("running", *(one.value for one in Status))
#: Longest reading of the text so far.
SO_FAR_S: Final = 10.0


def jobs(sources: Sources, request: Request) -> Page:
    """The newest jobs of the task `task`, with the status `status`, claimed first from `since` to `until`.

    Or those of the batch `batch`. A page begins behind the job `behind`, which was claimed at `at`.
    """
    asked = {name: found for name in FILTERS if (found := text(request, name))}
    wanted = _wanted(asked)
    pages, behind, at = JobPages(sources.database), text(request, "behind"), moment(request, "at")
    if "batch" in asked:
        of_batch = pages.of_batch(asked["batch"], PAGE_SIZE + 1, wanted, behind=behind)
        shown, num_walked = of_batch[:PAGE_SIZE], len(of_batch)
        last = PageStart(shown[-1].created_at, shown[-1].job_id) if len(of_batch) > PAGE_SIZE else None
    else:
        page = pages.newest(PAGE_SIZE, wanted, behind=PageStart(at, behind) if at is not None else None)
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
            "num_walked": num_walked if last is not None and len(shown) < PAGE_SIZE else None,
        },
        {
            "statuses": STATUSES,
            "first": urlencode(asked),
            "next": last and urlencode({**asked, "behind": last.job_id, "at": last.created_at.isoformat()}),
        },
    )


def _wanted(asked: Mapping[str, str]) -> Wanted:
    status = asked.get("status")
    if status is not None and status not in STATUSES:
        raise WrongRequest(f"status: expected one of {', '.join(STATUSES)}, found {status[:60]!r}")
    return Wanted(asked.get("task"), status, past(asked, "since"), past(asked, "until"))


def job(sources: Sources, request: Request) -> Page:
    """The job `id`; of one that runs with `show=text` the text so far, where somebody has to sign in to see it.

    One that no worker has claimed waits in Kafka, or was never sent.
    """
    job_id = _job_id(request)
    found = JobPages(sources.database).find(job_id)
    is_running = found is not None and found.status == "running"
    result = _result(sources, found) if found is not None and not is_running else None
    is_text_asked_for = is_running and sources.shows_texts and text(request, "show") == "text"
    so_far = _so_far(sources, job_id) if is_text_asked_for else None
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
            "asked": text(request, "asked"),
            "is_followed": is_running and sources.shows_texts,
            "is_text_shown": is_text_asked_for,
        },
        status=200 if found is not None else 404,
        is_live=found is None or is_running,
    )


def follow_job(sources: Sources, request: Request) -> Read:
    """Reads the job `id` as `alphaloop tail` does. Raises NotFound without one, WrongRequest where texts are hidden."""
    job_id = _job_id(request)
    if not sources.shows_texts:
        raise WrongRequest("texts of jobs are shown to those who sign in", hint="set console.password")

    def read(is_watched: Callable[[], bool]) -> Iterable[Event]:
        kafka, database = sources.settings.kafka, sources.database
        return follow(
            kafka, lambda ids: known_jobs(database, ids), [job_id], timeout_s=LONGEST_S, is_watched=is_watched
        )

    return read


def _job_id(request: Request) -> str:
    job_id = text(request, "id")
    if not job_id:
        raise NotFound("name a job: /job?id=…")
    return job_id


def _so_far(sources: Sources, job_id: str) -> TextSoFar | None:
    known = known_jobs(sources.database, [job_id]).get(job_id)
    return None if known is None else text_so_far(sources.settings.kafka, known, timeout_s=SO_FAR_S)


def _result(sources: Sources, found: ListedJob) -> Result | None:
    """The recorded result; without its text unless somebody has to sign in to see it."""
    known = known_jobs(sources.database, [found.job_id]).get(found.job_id)
    if known is None or known.outcome is None:
        return None
    try:
        result = Result.decode(known.outcome)
    except ValidationError:
        return None
    return result if sources.shows_texts else result.model_copy(update={"text": None, "text_ref": None})
