"""Jobs: the newest, those of a batch, and one."""

from __future__ import annotations

from typing import Final

from pydantic import ValidationError
from starlette.requests import Request

from alphaloop.console.page import NotFound, Page
from alphaloop.console.sources import Sources
from alphaloop.console.views.asked import moment, text
from alphaloop.messages import Result
from alphaloop.store.job_pages import JobPages, ListedJob, Place
from alphaloop.store.known_jobs import known_jobs

PAGE_SIZE: Final = 50


def jobs(sources: Sources, request: Request) -> Page:
    """The newest jobs, or those of the batch `batch`; a page behind the job of `behind`."""
    pages = JobPages(sources.database)
    batch, behind, at = text(request, "batch"), text(request, "behind"), moment(request, "at")
    if batch:
        found = pages.of_batch(batch, PAGE_SIZE + 1, behind=behind)
    else:
        found = pages.newest(PAGE_SIZE + 1, behind=Place(at, behind) if at is not None else None)
    shown, last = found[:PAGE_SIZE], found[PAGE_SIZE - 1] if len(found) > PAGE_SIZE else None
    return Page(
        "jobs.html.j2",
        "Jobs",
        {
            "jobs": shown,
            "batch": batch or None,
            "behind": None if last is None else {"at": last.created_at, "job_id": last.job_id},
            "is_first": not behind,
        },
    )


def job(sources: Sources, request: Request) -> Page:
    """The job `id`. One that no worker has claimed waits in Kafka, or was never sent."""
    job_id = text(request, "id")
    if not job_id:
        raise NotFound("name a job: /job?id=…")
    found = JobPages(sources.database).find(job_id)
    result = _result(sources, found) if found is not None and found.status != "running" else None
    return Page(
        "job.html.j2",
        "Job",
        {
            "job_id": job_id,
            "job": found,
            "result": result and result.model_dump(mode="json", exclude_none=True),
        },
        {"result": result, "asked": text(request, "asked")},
        status=200 if found is not None else 404,
        is_live=found is None or found.status == "running",
    )


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
