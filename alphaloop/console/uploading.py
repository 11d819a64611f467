"""Taking a batch file: who may send one, how large it may be, and what is done with it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import IO, Final
from urllib.parse import quote

from starlette.datastructures import UploadFile
from starlette.requests import Request

from alphaloop.batches.lines import BatchReader, KeptBatches
from alphaloop.batches.progress import send
from alphaloop.console.page import WrongRequest
from alphaloop.console.sessions import Session, is_token_of
from alphaloop.console.sources import Sources
from alphaloop.files import source_of

log = logging.getLogger(__name__)

_MAX_FIELD_BYTES: Final = 4096
#: Of the form around the file.
_FRAME_BYTES: Final = 65_536
_MB: Final = 10**6
#: An uploaded batch file is deleted after it.
_KEPT_FOR: Final = timedelta(days=30)


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


def submit(sources: Sources, session: Session, upload: Upload) -> str:
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
    lines = source_of(upload.file, upload.name, max_bytes=most).lines
    sent = send(BatchReader(settings, found.batch_id, task=found.task).read(lines), settings, sources.database)
    told = f"batch {found.batch_id}, {sent.num_sent} requests, by {session.username} in the console"
    log.info(told, extra={"action": "batch_submitted"})
    sources.remembered.forget(("batch", found.batch_id))
    return f"/batch?id={quote(found.batch_id)}&sent={sent.num_sent}"
