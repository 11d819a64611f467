"""Batches: taking a file, those that were uploaded, one with its counts and wrong lines, and its output files."""

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
from urllib.parse import quote

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from alphaloop.batches.lines import BatchReader, KeptBatches
from alphaloop.batches.progress import Part, RequestRow, counted, open_jobs, require_sent, rows_of, send
from alphaloop.claim_check.store import ContentStore
from alphaloop.console.page import NotFound, Page, WrongRequest, named, text
from alphaloop.console.reading import Sources
from alphaloop.console.sessions import Session, is_token_of
from alphaloop.files import source_of
from alphaloop.store.api import Deed, write_down

log = logging.getLogger(__name__)

#: Requests without a text that the page of a batch shows; its error file has them all.
_MAX_ERRORS: Final = 100
_FILES: Final[dict[str, Part]] = {"output": "output", "error": "error"}
_CHUNK_CHARS: Final = 1 << 16
_MAX_FIELD_BYTES: Final = 4096
#: Of the form around the file.
_FRAME_BYTES: Final = 65_536
_MB: Final = 10**6
#: An uploaded batch file is deleted after it.
_KEPT_FOR: Final = timedelta(days=30)


def batches(sources: Sources, request: Request) -> Page:
    """The files that were uploaded here, the newest first."""
    kept = KeptBatches(sources.settings.console_batches).all()
    return Page(
        "batches.html.j2",
        "Batches",
        {"batches": kept, "max_mb": sources.settings.console.max_batch_mb},
        {"tasks": list(sources.settings.tasks)},
        is_live=False,
    )


def batch(sources: Sources, request: Request) -> Page:
    """The batch `id`: its requests by what became of them, as `alphaloop batch status` counts them."""
    batch_id = named(request, "batch")
    found = KeptBatches(sources.settings.console_batches).find(batch_id)
    reading = sources.remembered.get(
        ("batch", batch_id), lambda: counted(_rows(sources, batch_id), most_wrong=_MAX_ERRORS)
    )
    now = reading.value
    if found is None and now is not None and not now.by_status:
        raise NotFound(f"no batch {batch_id[:100]!r}: no file of it is kept here, and no job of it was sent")
    status = None if now is None else now.as_json(batch_id)
    return Page(
        "batch.html.j2",
        "Batch",
        {
            "batch_id": batch_id,
            "file": found,
            "batch": status,
            "wrong": [] if now is None else [_wrong(row) for row in now.wrong],
            "max_wrong": _MAX_ERRORS,
            "read_at": reading.read_at,
            "errors": {"batch": reading.error} if reading.error else {},
        },
        {"asked": text(request, "asked"), "num_sent": text(request, "sent"), "may_act": sources.shows_texts},
        is_live=status is None or status["status"] == "in_progress",
    )


def file(sources: Sources, request: Request) -> Response:
    """The output or error file so far of the batch `id`, as `alphaloop batch output` and `errors` write them."""
    if not sources.shows_texts:
        raise WrongRequest("texts of jobs are given to those who sign in", hint="set console.password")
    batch_id, part = named(request, "batch"), _FILES.get(text(request, "part"))
    if part is None:
        raise WrongRequest("part: expected output or error")
    require_sent(KeptBatches(sources.settings.console_batches).batch(batch_id), sources.settings, sources.database)
    parts = _chunks(_rows(sources, batch_id, with_texts=True), part)
    first = next(parts, "")  # so that a server that is away is told in words, and not by a file that breaks off
    name = re.sub(r"[^A-Za-z0-9_-]", "_", batch_id)
    headers = {"Content-Disposition": f'attachment; filename="{name}.{part}.jsonl"'}
    return StreamingResponse(chain([first], parts), media_type="application/jsonl", headers=headers)


def open_jobs_of(sources: Sources, batch_id: str) -> list[str]:
    """The jobs of a batch that have not ended, those that were never sent among them."""
    return open_jobs(_rows(sources, batch_id))


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
    # A body in chunks may be longer than the length that stands beside it.
    if not announced.isdigit() or "transfer-encoding" in request.headers:
        raise WrongRequest("expected the length of the file", hint="send the form of the page of batches")
    if int(announced) > max_mb * _MB + _FRAME_BYTES:
        told = f"expected a file of at most {max_mb} MB, found {int(announced) / _MB:.0f} MB"
        raise WrongRequest(told, hint="split the file, or raise console.max_batch_mb")


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
    if not sum(bool(line.strip()) for line in source_of(upload.file, upload.name, max_bytes=most).lines):
        raise WrongRequest("expected one request a line, found no line with text")
    kept = KeptBatches(settings.console_batches)
    kept.drop_before(now - _KEPT_FOR)
    upload.file.seek(0)
    found = kept.add(upload.file, name=upload.name, task=upload.task, by=session.username, at=now)
    upload.file.seek(0)
    write_down(sources.database, Deed("login", session.username, "batch_submitted", found.batch_id, address))
    lines = source_of(upload.file, upload.name, max_bytes=most).lines
    reader = BatchReader(settings, found.batch_id, task=found.task)
    sent = send(reader.read(lines), settings, sources.database, found.batch_id)
    told = f"batch {found.batch_id}, {sent.num_sent} requests, by {session.username} in the console"
    log.info(told, extra={"action": "batch_submitted"})
    sources.remembered.forget(("batch", found.batch_id))
    return f"/batch?id={quote(found.batch_id)}&sent={sent.num_sent}"


def _wrong(one: RequestRow) -> dict[str, Any]:
    """A request without a text, from its row of the error file."""
    row = one.row or {}
    told = {name: row.get(name) for name in ("line", "custom_id", "error")}
    answered = ((row.get("response") or {}).get("body") or {}).get("error") or {}
    return {**told, "status": one.status, "job_id": one.job_id, "field": answered.get("param")}


def _rows(sources: Sources, batch_id: str, *, with_texts: bool = False) -> Iterator[RequestRow]:
    settings = sources.settings
    contents = ContentStore.of(settings.claim_check) if with_texts else None
    return rows_of(KeptBatches(settings.console_batches).batch(batch_id), settings, sources.database, contents)


def _chunks(rows: Iterator[RequestRow], part: Part) -> Iterator[str]:
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
