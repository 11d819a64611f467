"""Sending a batch, and what became of each request: a row of OpenAI's output or error file, or still open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, Literal

from alphaloop.batches.lines import BadRequest, BatchLine, BatchReader, BatchRequest, BatchSource
from alphaloop.claim_check.store import ContentStore, with_text
from alphaloop.client import Client
from alphaloop.dead_letters.reading import refusals, refusals_of
from alphaloop.dead_letters.redriving import next_job_id
from alphaloop.errors import ContentError, ContentStoreUnavailable, InvalidField, UnknownName
from alphaloop.files import reading
from alphaloop.kafka.backlog import search
from alphaloop.messages import Failure, Job, Result, Status
from alphaloop.settings import Settings
from alphaloop.store.api import ApiBatch
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import (
    BatchStore,
    ListedBatch,
    RedriveStore,
    claimed_among,
    known_jobs,
    pages_of_batch,
)
from alphaloop.store.promises import PromisedEnd

Part = Literal["output", "error", "open"]


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request: where it belongs, its status in words, and its row there; none for one that is open."""

    part: Part
    status: str
    job_id: str | None
    row: dict[str, Any] | None = None

    def as_wrong(self) -> dict[str, Any]:
        """A request without a text, from its row of the error file: which one, and what is wrong."""
        row = self.row or {}
        answered = ((row.get("response") or {}).get("body") or {}).get("error") or {}
        named = {name: row.get(name) for name in ("line", "custom_id", "error")}
        return {**named, "status": self.status, "job_id": self.job_id, "field": answered.get("param")}


@dataclass(frozen=True, slots=True)
class Progress:
    """The requests of a batch, counted by what became of them: the same numbers wherever a batch is shown."""

    by_status: Mapping[str, int]
    status: str | None = None  #: of a batch of the API, which has one of its own
    wrong: Sequence[RequestRow] = ()  #: the first requests without a text
    promised: PromisedEnd | None = None  #: what was said last of its end

    @classmethod
    def of(cls, known: ApiBatch | ListedBatch) -> Progress:
        """As it was counted last."""
        num_invalid = 0 if known.status else known.num_invalid
        return cls(known.by_status, known.status, promised=known.end).filled(known.num_total, num_invalid)

    def filled(self, num_total: int, num_invalid: int) -> Progress:
        """With the lines of its file that were not counted: the wrong ones, and the others wait to be sent."""
        missing = max(0, num_total - self.total)
        num_wrong = min(missing, max(0, num_invalid - self.by_status.get("invalid", 0)))
        lines = Counter({"invalid": num_wrong, "waiting": missing - num_wrong})
        return replace(self, by_status=dict(Counter(self.by_status) + lines))

    @property
    def total(self) -> int:
        """Every request: each line of a file that has text is one."""
        return sum(self.by_status.values())

    @property
    def num_completed(self) -> int:
        """Requests with a text."""
        return self.by_status.get("succeeded", 0)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self.by_status.get("waiting", 0) + self.by_status.get("held", 0)

    @property
    def num_failed(self) -> int:
        """Requests that ended without a text."""
        return self.total - self.num_completed - self.num_open

    @property
    def state(self) -> str:
        """As OpenAI calls it; of any other batch in_progress, cancelled, completed, or failed if no line is a job."""
        if self.status is not None or self.num_open:
            return self.status or "in_progress"
        if 0 < self.total == self.by_status.get("invalid", 0):
            return "failed"
        return "cancelled" if self.by_status.get("cancelled") else "completed"

    @property
    def end(self) -> PromisedEnd | None:
        """When it is expected to end; None once it has ended, and before a scheduler has said so."""
        return self.promised if self.num_open else None

    @property
    def request_counts(self) -> dict[str, int]:
        """As OpenAI's batch object has them."""
        return {"total": self.total, "completed": self.num_completed, "failed": self.num_failed}

    def as_json(self, batch_id: str) -> dict[str, Any]:
        """OpenAI's batch object, with the counts by status beside it."""
        head: dict[str, Any] = {"id": batch_id, "object": "batch", "status": self.state}
        end = self.end.as_json() if self.end else None
        counts = {"request_counts": self.request_counts, "requests_by_status": dict(self.by_status)}
        return {**head, **counts, "end": end}


def batch_as_json(batch: ListedBatch) -> dict[str, Any]:
    """A batch of a list: what is known of it, and its counts."""
    columns = ("source", "by", "name", "task", "num_bytes", "created_at")
    return {**Progress.of(batch).as_json(batch.id), **{name: getattr(batch, name) for name in columns}}


def count(batch: BatchSource, settings: Settings, database: Database, *, most_wrong: int = 0) -> Progress:
    """What became of its requests, and the first `most_wrong` without a text.

    Those of the API's batches are counted by a scheduler, and shown as it counted them last. Raises as `rows_of`.
    """
    known = BatchStore(database).find(batch.batch_id)
    if known is None:
        by_status, wrong = Counter[str](), list[RequestRow]()
        for row in rows_of(batch, settings, database):
            by_status[row.status] += 1
            if row.part == "error" and len(wrong) < most_wrong:
                wrong.append(row)
        return Progress(by_status, wrong=wrong)
    counted = Progress.of(known) if known.status else count_each({known.id: known}, settings, database)[known.id]
    errors = (row for row in rows_of(batch, settings, database) if row.part == "error") if most_wrong else ()
    return replace(counted, wrong=tuple(islice(errors, most_wrong)))


def count_each(batches: Mapping[str, ListedBatch], settings: Settings, database: Database) -> dict[str, Progress]:
    """What became of the requests of open batches, by id: dead letters and Kafka's backlog are read once for all.

    Reads no text of a job, so a login that may not do so can count.

    A request counts once, by the last job that was made of its dead letters. Where a batch's number of lines is known,
    the lines that are nowhere wait; for the other batches the backlog is searched. Raises StoreError, BrokerError.
    """
    refused = refusals(settings.kafka, lambda refusal: refusal.batch_id in batches)
    counts = {batch_id: Counter[str]() for batch_id in batches}
    without_text = {job_id: (str(refusal.batch_id), "refused") for job_id, refusal in refused.items()}
    for batch_id, status, num_jobs, failed in BatchStore(database).claimed(batches.keys()):
        counts[batch_id][status] += num_jobs
        without_text |= {job_id: (batch_id, status) for job_id in failed or ()}
    counted_elsewhere = _counted_elsewhere(database, {job_id: status for job_id, (_, status) in without_text.items()})
    for job_id, (batch_id, status) in without_text.items():
        counts[batch_id][status] += (status == "refused") - (job_id in counted_elsewhere)
    if unknown := {batch.id for batch in batches.values() if not batch.num_total}:
        waiting = search(settings.kafka, lambda _, batch_id: batch_id in unknown)
        batch_of = {message.job_id: str(message.batch_id) for message in waiting if message.job_id not in refused}
        for job_id in batch_of.keys() - claimed_among(database, batch_of):
            counts[batch_of[job_id]]["waiting"] += 1
    return {
        batch.id: Progress(dict(+counts[batch.id]), promised=batch.end).filled(batch.num_total, batch.num_invalid)
        for batch in batches.values()
    }


def _counted_elsewhere(database: Database, without_text: Mapping[str, str]) -> set[str]:
    """Jobs, given with their status, that another one stands for: the one made of its dead letter, or of its name."""
    sent, elsewhere = RedriveStore(database), set[str]()
    for start in range(0, len(without_text), PAGE):
        page = list(without_text)[start : start + PAGE]
        redriven = sent.among(page)
        following = {next_job_id(job_id, is_redriven=job_id in redriven): job_id for job_id in page}
        elsewhere |= {following[job_id] for job_id in sent.among(following)}
        elsewhere |= claimed_among(database, [job_id for job_id in page if without_text[job_id] == "refused"])
    return elsewhere


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
        latest = latest_jobs(database, [request.job_id for request in page if isinstance(request, _Asked)])
        for request in page:
            if isinstance(request, BadRequest):
                yield RequestRow("error", "invalid", None, bad_line_row(request))
                continue
            if request.job_id in redriven:
                continue
            now = latest[request.job_id]
            redriven |= {*now.made_of[1:], now.job_id} if now.made_of else set()
            if now.result is not None:
                yield _ended(now.result, request, contents)
            elif now.is_claimed:
                yield _open("held", now.job_id, request, batch)
            else:
                open_later[now.job_id] = request
    refused = refusals_of(settings.kafka, open_later)
    for job_id, request in open_later.items():
        if job_id in refused:
            yield _ended(refused[job_id], request, contents)
        else:
            yield _open("waiting", job_id, request, batch)


def require_sent(batch: BatchSource, settings: Settings, database: Database) -> None:
    """Raises UnknownName for a batch of which nothing was ever sent; StoreError, BrokerError."""
    name, kafka = batch.batch_id, settings.kafka
    if not (
        BatchStore(database).find(name)
        or search(kafka, lambda _, batch_id: batch_id == name, num=1)
        or refusals(kafka, lambda refusal: refusal.batch_id == name)
        or any(pages_of_batch(database, name))  # claimed meanwhile, or not listed yet
    ):
        what = f"{batch.name}, batch {name}: not submitted" if batch.name else f"no batch {name}"
        raise UnknownName(f"{what}: no worker has seen a job of it, none waits in Kafka, and none was refused")


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
    noted: Mapping[str, str | int] | None = None,
) -> SentBatch:
    """Send what no worker has seen or refused, and wait until the broker has it; wrong lines are left out.

    `after_page` is called with the progress each time that the broker has everything so far, and may raise to end it.
    What is `noted` (columns of `batches`) is listed from the first page on.
    Creates missing topics. Raises BrokerError, StoreError, ContentStoreUnavailable.
    """
    done, refused = SentBatch(), refusals(settings.kafka, lambda refusal: refusal.batch_id == batch_id)
    with Client(settings) as client:
        for page in pages(lines):
            unseen = _unseen(page, database, done, refused)
            if noted is not None:
                BatchStore(database).note({"id": batch_id, **noted}, done.num_wrong)
            client.submit(unseen)
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
    """By job_id, the last job that redrives have made of it: itself where it was not redriven. Raises StoreError."""
    followed = {job_id: job_id for job_id in job_ids}
    latest = _looked_up(database, job_ids)
    while ended := {first: latest[first] for first in followed if _may_be_redriven(latest[first])}:
        following = {
            first: next_job_id(job.job_id, is_redriven=bool(job.made_of) or _is_redriven(job))
            for first, job in ended.items()
        }
        jobs = _looked_up(database, following.values())
        sent = RedriveStore(database).among(following.values())
        followed = {}
        for first, job_id in following.items():
            job = jobs[job_id]
            # A job of this name that ended is the next one only where it says so itself.
            before = ended[first]
            is_next = job_id in sent if job.result is None else job.result.redrive_of == before.job_id
            if is_next:
                latest[first] = replace(job, made_of=(*before.made_of, before.job_id))
                followed[first] = job_id
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


def bad_line_row(line: BadRequest) -> dict[str, Any]:
    """A line that was not sent; `line` is its number in the file, because it may have no custom_id."""
    error, name = line.error, f"line-{line.number}"
    row = refused_row(name, error.code, line.message, error.field, custom_id=line.custom_id)
    return {**row, "line": line.number}


def pages(lines: Iterator[BatchLine]) -> Iterator[list[BatchLine]]:
    """As many lines at a time as one query asks for."""
    while page := list(islice(lines, PAGE)):
        yield page


PAGE: Final = 500


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
        for page in pages(islice(reader.read(source.lines), batch.num_lines)):
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
    jobs = {job_id: LatestJob(job_id, is_claimed=False, result=None) for job_id in job_ids}
    for job_id, job in known_jobs(database, list(jobs)).items():
        result = None if job.outcome is None else Result.decode(job.outcome)
        jobs[job_id] = LatestJob(job_id, is_claimed=True, result=result)
    return jobs


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
        result, status = result.model_copy(update={"status": Status.FAILED, "error": failure}), Status.FAILED.value
    is_done = result.status is Status.SUCCEEDED
    row = (output_row if is_done else failed_row)(result, custom_id=custom_id)
    ignored = {"ignored_fields": result.ignored_fields} if result.ignored_fields else {}
    return RequestRow("output" if is_done else "error", status, job_id, row | ignored)


def _open(status: str, job_id: str, asked: _Asked, batch: BatchSource) -> RequestRow:
    """A request without an outcome: it is open, or has ended with its batch."""
    # In a batch of the API only a job that was made of a dead letter has a ~ in its id.
    if batch.end is None or (batch.awaits_redriven and "~" in job_id):
        return RequestRow("open", status, job_id)
    is_cancelled = batch.end is Status.CANCELLED
    why = "cancelled with its batch" if is_cancelled else "not done when the time of its batch was over"
    row = unanswered_row(job_id, batch.end, why, custom_id=asked.custom_id)
    return RequestRow("error", batch.end.value, job_id, row)


def _request(job_id: str) -> str:
    return f"batch_req_{job_id}"
