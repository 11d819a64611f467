"""What became of each request of a batch: rows of the output and the error file, and those that have not ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from alphaloop.batches.lines import BadRequest, BatchLine, BatchReader, Request, batch_id_of
from alphaloop.batches.rows import bad_line_row, failed_row, output_row, refused_row
from alphaloop.claim_check.contents import with_text
from alphaloop.claim_check.store import ContentStore
from alphaloop.errors import ConfigError, ContentError, ContentStoreUnavailable, InvalidField
from alphaloop.messages import Failure, Result, Status
from alphaloop.outcomes.refusals import refusals_of
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import known_jobs, recorded_outcomes, running_jobs

Part = Literal["output", "error", "open"]
_PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch by its file, or by its name alone. By its name only the jobs are known that a worker has claimed."""

    batch_id: str
    path: Path | None

    @staticmethod
    def named(name: str) -> Batch:
        """`name` is a file if there is one, else the batch_id that jobs were sent with."""
        path = Path(name)
        return Batch(batch_id_of(path), path) if path.is_file() else Batch(name, None)


@dataclass(frozen=True, slots=True)
class Row:
    """One request: where it belongs, its status in words, and its row there; none for one that is open."""

    part: Part
    status: str
    job_id: str | None
    row: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The requests of a batch, counted by what became of them."""

    by_status: Mapping[str, int]
    by_part: Mapping[Part, int]

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


def counted(rows: Iterable[Row]) -> Progress:
    """Count them."""
    by_status, by_part = Counter[str](), Counter[Part]()
    for row in rows:
        by_status[row.status] += 1
        by_part[row.part] += 1
    return Progress(by_status, by_part)


def rows_of(
    batch: Batch, settings: Settings, database: Database, contents: ContentStore | None = None
) -> Iterator[Row]:
    """Every request of the batch once; with `contents`, texts that lie there are in the rows.

    A text that is gone or altered makes its request an error. Raises ConfigError, StoreError, BrokerError,
    ContentStoreUnavailable.
    """
    if batch.path is None:
        yield from _by_name(batch.batch_id, settings, database, contents)
        return
    try:
        with batch.path.open("rb") as file:
            # The task only matters where a line is sent.
            reader = BatchReader(settings, batch.batch_id, task=next(iter(settings.tasks), "any"))
            yield from _of_lines(reader.read(file), settings, database, contents)
    except OSError as error:
        raise ConfigError(f"{batch.path}: {error.strerror or error}") from None


def pages(lines: Iterator[BatchLine]) -> Iterator[list[BatchLine]]:
    """So many lines at a time as one query asks for."""
    while page := list(islice(lines, _PAGE)):
        yield page


def _of_lines(
    lines: Iterator[BatchLine], settings: Settings, database: Database, contents: ContentStore | None
) -> Iterator[Row]:
    unseen: dict[str, str | None] = {}
    for page in pages(lines):
        known = known_jobs(database, [line.job.job_id for line in page if isinstance(line, Request)])
        for line in page:
            if isinstance(line, BadRequest):
                yield Row("error", "invalid", None, bad_line_row(line.number, line.error, custom_id=line.custom_id))
            elif (job := known.get(line.job.job_id)) is None:
                unseen[line.job.job_id] = line.custom_id
            elif job.outcome is None:
                yield Row("open", "running", job.job_id)
            else:
                is_chat = line.job.body.prompt is None
                yield _ended(Result.decode(job.outcome), line.custom_id, settings, contents, is_chat=is_chat)
    refused = refusals_of(settings.kafka, unseen)
    for job_id, custom_id in unseen.items():
        if why := refused.get(job_id):
            row = refused_row(job_id, why.code, why.message, why.field, custom_id=custom_id)
            yield Row("error", "refused", job_id, row)
        else:
            yield Row("open", "waiting", job_id)


def _by_name(batch_id: str, settings: Settings, database: Database, contents: ContentStore | None) -> Iterator[Row]:
    for custom_id, outcome in recorded_outcomes(database, batch_id):
        yield _ended(Result.decode(outcome), custom_id, settings, contents, is_chat=True)
    for job_id in running_jobs(database, batch_id):
        yield Row("open", "running", job_id)


def _ended(
    result: Result, custom_id: str | None, settings: Settings, contents: ContentStore | None, *, is_chat: bool
) -> Row:
    status, job_id = result.status.value, result.job_id
    try:
        result = with_text(result, contents)
    except ContentStoreUnavailable:
        raise
    except (ContentError, InvalidField) as error:
        failure = Failure(code=error.code, message=error.message)
        result = result.model_copy(update={"status": Status.FAILED, "error": failure})
    if result.status is Status.SUCCEEDED:
        model = settings.models.target.name
        return Row("output", status, job_id, output_row(result, custom_id=custom_id, model=model, is_chat=is_chat))
    return Row("error", status, job_id, failed_row(result, custom_id=custom_id))
