"""Sending a batch, and what became of each request: a row of OpenAI's output or error file, or still open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Final, Literal

from alphaloop.batches.lines import BadRequest, BatchLine, BatchReader, BatchRequest, BatchSource
from alphaloop.claim_check.store import ContentStore, with_text
from alphaloop.client import Client
from alphaloop.errors import ContentError, ContentStoreUnavailable, InvalidField, MessageError, UnknownName
from alphaloop.files import reading
from alphaloop.kafka.backlog import search
from alphaloop.letters.redriving import next_job_id
from alphaloop.messages import Failure, Job, Result, Status
from alphaloop.outcomes.reading import refusals, refusals_of
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import RedriveStore, known_jobs, pages_of_batch

Part = Literal["output", "error", "open"]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request: where it belongs, its status in words, and its row there; none for one that is open."""

    part: Part
    status: str
    job_id: str | None
    row: dict[str, Any] | None = None
    custom_id: str | None = None  #: of an open one, where it is known


@dataclass(frozen=True, slots=True)
class Progress:
    """The requests of a batch, counted by what became of them."""

    by_status: Mapping[str, int]
    by_part: Mapping[Part, int]
    wrong: Sequence[RequestRow] = ()  #: the first requests without a text

    @property
    def state(self) -> str:
        """`in_progress`, `cancelled` or `completed`, as OpenAI calls them."""
        if self.by_part.get("open"):
            return "in_progress"
        return "cancelled" if self.by_status.get("cancelled") else "completed"

    def as_json(self, batch_id: str) -> dict[str, Any]:
        """OpenAI's batch object, with the counts by status beside it."""
        completed, failed = self.by_part.get("output", 0), self.by_part.get("error", 0)
        totals = {"total": sum(self.by_part.values()), "completed": completed, "failed": failed}
        found: dict[str, Any] = {"id": batch_id, "object": "batch", "status": self.state, "request_counts": totals}
        return {**found, "requests_by_status": dict(self.by_status)}


def rows_of(
    batch: BatchSource, settings: Settings, database: Database, contents: ContentStore | None = None
) -> Iterator[RequestRow]:
    """Every request of the batch once; with `contents`, texts that lie there are in the rows.

    A text that is gone or altered makes its request an error. Raises ConfigError, StoreError, BrokerError,
    ContentStoreUnavailable.
    """
    open_later: dict[str, _Asked] = {}  # by job_id: no worker has claimed them
    redriven = set[str]()  # of a batch by its name, these jobs are found for themselves too
    for page in _pages_of(batch, settings, database):
        latest = latest_jobs(database, [one.job_id for one in page if isinstance(one, _Asked)])
        for one in page:
            if isinstance(one, BadRequest):
                yield RequestRow("error", "invalid", None, bad_line_row(one.number, one.error, custom_id=one.custom_id))
                continue
            if one.job_id in redriven:
                continue
            now = latest[one.job_id]
            redriven |= {*now.made_of[1:], now.job_id} if now.made_of else set()
            if now.result is not None:
                yield _ended(now.result, one, contents)
            elif now.is_claimed:
                yield RequestRow("open", "held", now.job_id, custom_id=one.custom_id)
            else:
                open_later[now.job_id] = one
    refused = refusals_of(settings.kafka, open_later)
    for job_id, one in open_later.items():
        if job_id in refused:
            yield _ended(refused[job_id], one, contents)
        else:
            yield RequestRow("open", "waiting", job_id, custom_id=one.custom_id)


def counted(rows: Iterable[RequestRow], *, most_wrong: int = 0) -> Progress:
    """Count them, and keep the first `most_wrong` that have no text."""
    by_status, by_part, wrong = Counter[str](), Counter[Part](), list[RequestRow]()
    for row in rows:
        by_status[row.status] += 1
        by_part[row.part] += 1
        if row.part == "error" and len(wrong) < most_wrong:
            wrong.append(row)
    return Progress(by_status, by_part, wrong)


def require_sent(batch: BatchSource, settings: Settings, database: Database) -> None:
    """Raises UnknownName for a batch of which nothing was sent, unless its file has only wrong lines; BrokerError."""
    name, kafka = batch.batch_id, settings.kafka
    if (
        any(pages_of_batch(database, name))
        or search(kafka, lambda _, batch_id: batch_id == name, num=1)
        or refusals(kafka, lambda refusal: refusal.batch_id == name)
        or any(pages_of_batch(database, name))  # a worker has claimed it meanwhile
    ):
        return
    lines = chain.from_iterable(_pages_of(batch, settings, database))
    if batch.path is None or any(isinstance(line, _Asked) for line in lines):
        what = f"{batch.name}, batch {name}: not submitted" if batch.path else f"no batch {name}"
        raise UnknownName(f"{what}: no worker has seen a job of it, none waits in Kafka, and none was refused")


def open_jobs(rows: Iterable[RequestRow]) -> list[str]:
    """The jobs of the requests that have not ended."""
    return [row.job_id for row in rows if row.part == "open" and row.job_id]


@dataclass(slots=True)
class SentBatch:
    """What came of it."""

    num_lines: int = 0  #: with text, wrong ones among them
    num_wrong: int = 0
    num_sent: int = 0
    waiting: dict[str, None] = field(default_factory=dict)  #: the jobs that have not ended


def send(
    lines: Iterator[BatchLine],
    settings: Settings,
    database: Database,
    batch_id: str,
    *,
    after_page: Callable[[SentBatch], None] | None = None,
) -> SentBatch:
    """Send what no worker has seen or refused, and wait until the broker has it; wrong lines are left out.

    `after_page` is told how far it is, each time that the broker has everything so far, and may raise to end it.
    Creates missing topics. Raises BrokerError, StoreError, ContentStoreUnavailable.
    """
    done, refused = SentBatch(), refusals(settings.kafka, lambda refusal: refusal.batch_id == batch_id)
    with Client(settings) as client:
        for page in pages(lines):
            client.submit(_unseen(page, database, done, refused))
            if after_page is not None:
                after_page(done)
    return done


def _unseen(page: Sequence[BatchLine], database: Database, done: SentBatch, refused: Container[str]) -> list[Job]:
    """The jobs of a page that no worker has seen; the page is counted in `done`."""
    jobs = [line.job for line in page if isinstance(line, BatchRequest)]
    done.num_lines += len(page)
    done.num_wrong += len(page) - len(jobs)
    latest = latest_jobs(database, [job.job_id for job in jobs])
    left = [now for now in latest.values() if now.result is None and now.job_id not in refused]
    done.waiting |= {now.job_id: None for now in left}
    unclaimed = {now.job_id for now in left if not now.is_claimed}
    unseen = [job for job in jobs if job.job_id in unclaimed]
    done.num_sent += len(unseen)
    return unseen


@dataclass(frozen=True, slots=True)
class LatestJob:
    """The job that now stands for a request: its own, or the last that a redrive made of it."""

    job_id: str
    is_claimed: bool
    result: Result | None
    made_of: tuple[str, ...] = ()  #: the failed and refused ones before it, the request's own first


def latest_jobs(database: Database, job_ids: Collection[str]) -> dict[str, LatestJob]:
    """Of each job the last one that redrives have made of it, itself where it was not redriven. Raises StoreError."""
    found = {job_id: job_id for job_id in job_ids}
    latest = _looked_up(database, job_ids)
    while ended := {first: latest[first] for first in found if _may_be_redriven(latest[first])}:
        following = {
            first: next_job_id(job.job_id, is_redriven=bool(job.made_of) or _is_redriven(job))
            for first, job in ended.items()
        }
        jobs = _looked_up(database, following.values())
        sent = RedriveStore(database).among(following.values())
        found = {}
        for first, job_id in following.items():
            job = jobs[job_id]
            # A job of this name that ended is the next one only where it says so itself.
            before = ended[first]
            is_next = job_id in sent if job.result is None else job.result.redrive_of == before.job_id
            if is_next:
                latest[first] = replace(job, made_of=(*before.made_of, before.job_id))
                found[first] = job_id
    return latest


def output_row(result: Result, *, custom_id: str | None) -> dict[str, Any]:
    """A request that succeeded: the response as the endpoint would have given it."""
    response = {"status_code": 200, "request_id": result.job_id, "body": result.response}
    return {"id": _request(result.job_id), "custom_id": custom_id, "response": response, "error": None}


def failed_row(result: Result, *, custom_id: str | None) -> dict[str, Any]:
    """A request that failed, expired, was cancelled or refused."""
    code = result.error.code if result.error else result.status.value
    message = result.error.message if result.error else result.status.value
    if result.status is Status.FAILED:
        return refused_row(result.job_id, code, message, None, custom_id=custom_id, by=_BY_SERVER)
    if result.status is Status.REFUSED:
        field = result.error.field if result.error else None
        return refused_row(result.job_id, code, message, field, custom_id=custom_id)
    return unanswered_row(result.job_id, result.status, message, custom_id=custom_id)


def unanswered_row(job_id: str, status: Status, message: str, *, custom_id: str | None) -> dict[str, Any]:
    """A request that expired or was cancelled."""
    error = {"code": f"batch_{status.value}", "message": message}
    return {"id": _request(job_id), "custom_id": custom_id, "response": None, "error": error}


#: Status and type of an error, by whose fault it is.
_BY_CLIENT: Final = (400, "invalid_request_error")
_BY_SERVER: Final = (500, "server_error")


def refused_row(
    job_id: str,
    code: str,
    message: str,
    field: str | None,
    *,
    custom_id: str | None,
    by: tuple[int, str] = _BY_CLIENT,
) -> dict[str, Any]:
    """A request that a worker refused, or that failed."""
    status, kind = by
    body = {"error": {"message": message, "type": kind, "param": field, "code": code}}
    return {
        "id": _request(job_id),
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": job_id, "body": body},
        "error": {"code": code, "message": message},
    }


def bad_line_row(number: int, error: MessageError, *, custom_id: str | None) -> dict[str, Any]:
    """A line that was not sent; `line` is its number in the file, because it may have no custom_id."""
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    row = refused_row(f"line-{number}", error.code, message, error.field, custom_id=custom_id)
    return {**row, "line": number}


def pages(lines: Iterator[BatchLine]) -> Iterator[list[BatchLine]]:
    """So many lines at a time as one query asks for."""
    while page := list(islice(lines, _PAGE)):
        yield page


_PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that was sent."""

    job_id: str
    custom_id: str | None


def _pages_of(batch: BatchSource, settings: Settings, database: Database) -> Iterator[list[_Asked | BadRequest]]:
    """Every request of a batch once."""
    if batch.path is None:
        yield from _by_name(batch.batch_id, settings, database)
        return
    with reading(batch.path) as source:
        # The task only matters where a line is sent.
        reader = (
            BatchReader(settings, batch.batch_id, task=next(iter(settings.tasks), "any"))
            if batch.reader is None
            else batch.reader()
        )
        for page in pages(reader.read(source.lines)):
            yield [line if isinstance(line, BadRequest) else _Asked(line.job.job_id, line.custom_id) for line in page]


def _by_name(batch_id: str, settings: Settings, database: Database) -> Iterator[list[_Asked | BadRequest]]:
    """What was refused, then what a worker has claimed, then what waits in Kafka.

    In this order, and by their ids, each comes before the job that a redrive made of it.
    """
    refused = refusals(settings.kafka, lambda refusal: refusal.batch_id == batch_id)
    yield [_Asked(job_id, refused[job_id].custom_id) for job_id in sorted(refused)]
    known = set(refused)
    for page in pages_of_batch(database, batch_id):
        yield [_Asked(job_id, custom_id) for job_id, custom_id in page if job_id not in known]
        known |= {job_id for job_id, _ in page}
    waiting = search(settings.kafka, lambda _, batch: batch == batch_id)
    yield [_Asked(job_id, None) for job_id in {message.job_id: None for message in waiting} if job_id not in known]


def _looked_up(database: Database, job_ids: Collection[str]) -> dict[str, LatestJob]:
    found = {job_id: LatestJob(job_id, is_claimed=False, result=None) for job_id in job_ids}
    for job_id, job in known_jobs(database, list(found)).items():
        result = None if job.outcome is None else Result.decode(job.outcome)
        found[job_id] = LatestJob(job_id, is_claimed=True, result=result)
    return found


def _may_be_redriven(job: LatestJob) -> bool:
    """Whether it has failed, or may have been refused: that one has no row."""
    return not job.is_claimed if job.result is None else job.result.status is Status.FAILED


def _is_redriven(job: LatestJob) -> bool:
    return job.result is not None and job.result.redrive_of is not None


def _ended(result: Result, asked: _Asked, contents: ContentStore | None) -> RequestRow:
    status, job_id, custom_id = result.status.value, result.job_id, asked.custom_id
    try:
        result = with_text(result, contents)
    except ContentStoreUnavailable:
        raise
    except (ContentError, InvalidField) as error:
        failure = Failure(code=error.code, message=error.message)
        result = result.model_copy(update={"status": Status.FAILED, "error": failure})
    if result.status is Status.SUCCEEDED:
        return RequestRow("output", status, job_id, output_row(result, custom_id=custom_id))
    return RequestRow("error", status, job_id, failed_row(result, custom_id=custom_id))


def _request(job_id: str) -> str:
    return f"batch_req_{job_id}"
