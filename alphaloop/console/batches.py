"""Batches: taking a file, every batch, one with its counts and wrong lines, and its files."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import IO, Any, Final
from urllib.parse import quote, urlencode

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from alphaloop.batches import advancing
from alphaloop.batches.advancing import batch_named, files_of, written
from alphaloop.batches.lines import BatchReader, KeptBatches
from alphaloop.batches.progress import Progress, RequestRow, batch_as_json, count, require_sent, rows_of, send
from alphaloop.claim_check.store import ContentStore
from alphaloop.console.page import Page, WrongRequest, moment, named, text
from alphaloop.console.reading import Sources, errors_of
from alphaloop.console.sessions import Session, is_token_of
from alphaloop.errors import UnknownName
from alphaloop.files import source_of
from alphaloop.store.api import ApiFile, Deed, write_down
from alphaloop.store.known_jobs import BatchStore
from alphaloop.store.lacks import LackStore
from alphaloop.store.spending import SpendingStore, spent_as_json

log = logging.getLogger(__name__)

#: Requests without a text that the page of a batch shows; its error file has them all.
_MAX_ERRORS: Final = 100
_FILES: Final = ("input", "output", "error")
_PAGE_SIZE: Final = 50
_CHUNK_CHARS: Final = 1 << 16
_MAX_FIELD_BYTES: Final = 4096
#: Size of the form around the file.
_FRAME_BYTES: Final = 65_536
_MB: Final = 10**6
#: An uploaded batch file is deleted after it.
_KEPT_FOR: Final = timedelta(days=30)


def batches(sources: Sources, request: Request) -> Page:
    """Every batch, the newest first; a page begins after the batch `behind`, which was made at `at`."""
    at, behind = moment(request, "at"), text(request, "behind")
    known = BatchStore(sources.database).page(_PAGE_SIZE + 1, after=None if at is None else (at, behind))
    shown = known[:_PAGE_SIZE]
    last = shown[-1] if len(known) > _PAGE_SIZE else None
    lacks = LackStore(sources.database).open()
    return Page(
        "batches.html.j2",
        "Batches",
        {
            "batches": [batch_as_json(listed) for listed in shown],
            "lacks": [lack.as_json() for lack in lacks],
            "max_mb": sources.settings.console.max_batch_mb,
        },
        {
            "tasks": list(sources.settings.tasks),
            "lacking": [lack.shown(datetime.now(UTC)) for lack in lacks],
            "is_first": at is None,
            "next": last and urlencode({"behind": last.id, "at": last.created_at.isoformat()}),
        },
    )


def batch(sources: Sources, request: Request) -> Page:
    """The batch `id`: its requests by what became of them, as `alphaloop batch status` counts them, and its files."""
    batch_id = named(request, "batch")
    known = BatchStore(sources.database).find(batch_id)
    reading = sources.remembered.get(("batch", batch_id), lambda: _counted(sources, batch_id))
    spent = SpendingStore(sources.database, sources.settings.prices).of_batches([batch_id]).get(batch_id)
    wrong = [] if reading.value is None else [row.as_wrong() for row in reading.value.wrong]
    # What a scheduler has counted is shown at once, and the requests without a text once they are read.
    now = Progress.of(known) if known is not None and known.status else reading.value
    if known is None and now is not None and not now.by_status:
        raise UnknownName(f"no batch {batch_id[:100]!r}: none was submitted, and no job of it was sent")
    return Page(
        "batch.html.j2",
        "Batch",
        {
            "batch_id": batch_id,
            "file": known and batch_as_json(known),
            "files": {part: _told(file) for part, file in files_of(batch_id, sources.database).items()},
            "batch": now and now.as_json(batch_id),
            "end": now and now.end and now.end.sentence(),
            "spent": spent_as_json(spent, sources.settings.prices.currency),
            "wrong": wrong,
            "max_wrong": _MAX_ERRORS,
            "read_at": reading.read_at,
            "errors": errors_of(batch=reading),
        },
        {
            "asked": text(request, "asked"),
            "num_sent": text(request, "sent"),
            "may_act": sources.shows_texts,
            "num_open": now and now.num_open,
            "took": spent and spent.in_words(sources.settings.prices.currency),
        },
        is_live=now is None or now.num_open > 0,
    )


def file(sources: Sources, request: Request) -> Response:
    """The output or error file so far of the batch `id`, as `alphaloop batch output` and `errors` write them.

    One of the API's has its input file, too.
    """
    if not sources.shows_texts:
        raise WrongRequest("texts of jobs are given to those who sign in", hint="set console.password")
    batch_id, part = named(request, "batch"), text(request, "part")
    if part not in _FILES:
        raise WrongRequest("part: expected input, output or error")
    chunks: Iterator[str | bytes] | None = written(batch_id, part, sources.settings, sources.database)
    if chunks is None and part == "input":
        raise UnknownName("its input file is not kept here")
    parts = _chunks(_rows(sources, batch_id), part) if chunks is None else chunks
    first = next(parts, "")  # so that a server that is away is an error in words, not a file that breaks off
    name = re.sub(r"[^A-Za-z0-9_-]", "_", batch_id)
    headers = {"Content-Disposition": f'attachment; filename="{name}.{part}.jsonl"'}
    return StreamingResponse(chain([first], parts), media_type="application/jsonl", headers=headers)


def cancel(sources: Sources, deed: Deed) -> int:
    """Cancel what has not ended of a batch, as `alphaloop batch cancel` does; returns how many requests that are."""
    with batch_named(deed.subject, sources.settings, sources.database) as source:
        require_sent(source, sources.settings, sources.database)
        write_down(sources.database, deed)
        num_open, _ = advancing.cancel(source, sources.settings, sources.database, None)
    sources.remembered.forget(("batch", deed.subject))
    return num_open


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that arrived with a form of the session of whoever sent it."""

    file: IO[bytes]
    name: str
    task: str  #: of lines that name none


def check_size(request: Request, max_mb: int) -> None:
    """Refuse a body by the length that it announces, before it is read; the server takes no more.

    Raises WrongRequest.
    """
    announced = request.headers.get("content-length", "")
    if not announced.isdigit():
        raise WrongRequest("expected the length of the file", hint="send the form of the page of batches")
    if int(announced) > max_mb * _MB + _FRAME_BYTES:
        problem = f"expected a file of at most {max_mb} MB, found {int(announced) / _MB:.0f} MB"
        raise WrongRequest(problem, hint="split the file, or raise console.max_batch_mb")


@asynccontextmanager
async def received(request: Request, session: Session) -> AsyncIterator[Upload | None]:
    """The file, until the end of the block; None where the form is not the session's.

    Raises WrongRequest without a file.
    """
    async with request.form(max_files=1, max_fields=5, max_part_size=_MAX_FIELD_BYTES) as form:
        file = form.get("file")
        if not is_token_of(session, str(form.get("token", ""))):
            yield None
        elif not isinstance(file, UploadFile) or not file.filename:
            raise WrongRequest("expected a file")
        else:
            yield Upload(file.file, file.filename[:200], str(form.get("task", "")))


def submit(sources: Sources, session: Session, upload: Upload, address: str | None) -> str:
    """Keep the file and send its requests, as `alphaloop batch submit` does; returns the address of its page.

    Raises WrongRequest, BrokerError, StoreError, ContentStoreUnavailable.
    """
    settings, now = sources.settings, datetime.now(UTC)
    if upload.task not in settings.tasks:
        raise WrongRequest(f"no task {upload.task[:100]!r}", hint=f"expected one of {', '.join(settings.tasks)}")
    most = sources.settings.console.max_batch_mb * _MB  # of what a small compressed file may grow to
    num_lines = sum(bool(line.strip()) for line in source_of(upload.file, upload.name, max_bytes=most).lines)
    if not num_lines:
        raise WrongRequest("expected one request a line, found no line with text")
    kept = KeptBatches(settings.console_batches)
    kept.drop_before(now - _KEPT_FOR)
    upload.file.seek(0)
    source, num_bytes = kept.add(upload.file), upload.file.tell()
    upload.file.seek(0)
    write_down(sources.database, Deed("login", session.username, "batch_submitted", source.batch_id, address))
    lines = source_of(upload.file, upload.name, max_bytes=most).lines
    noted: dict[str, str | int] = {"source": "console", "by": session.username, "name": upload.name}
    noted |= {"task": upload.task, "num_bytes": num_bytes, "num_total": num_lines}
    reader = BatchReader(settings, source.batch_id, task=upload.task)
    sent = send(reader.read(lines), settings, sources.database, source.batch_id, noted=noted)
    event = f"batch {source.batch_id}, {sent.num_sent} requests, by {session.username} in the console"
    log.info(event, extra={"action": "batch_submitted"})
    sources.remembered.forget(("batch", source.batch_id))
    return f"/batch?id={quote(source.batch_id)}&sent={sent.num_sent}"


def _told(file: ApiFile) -> dict[str, Any]:
    return {"id": file.id, "name": file.filename, "num_bytes": file.num_bytes}


def _counted(sources: Sources, batch_id: str) -> Progress:
    with batch_named(batch_id, sources.settings, sources.database) as source:
        return count(source, sources.settings, sources.database, most_wrong=_MAX_ERRORS)


def _rows(sources: Sources, batch_id: str) -> Iterator[RequestRow]:
    with batch_named(batch_id, sources.settings, sources.database) as source:
        require_sent(source, sources.settings, sources.database)
        yield from rows_of(source, sources.settings, sources.database, ContentStore.of(sources.settings.claim_check))


def _chunks(rows: Iterator[RequestRow], part: str) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    for row in rows:
        if row.part == part:
            lines.append(json.dumps(row.row) + "\n")
            size += len(lines[-1])
        if size >= _CHUNK_CHARS:
            yield "".join(lines)
            lines, size = [], 0
    yield "".join(lines)
