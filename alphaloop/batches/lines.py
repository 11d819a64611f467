"""OpenAI batch files: their lines as jobs, and the files that were uploaded.

A batch is named by its content, and a job by its batch and its `custom_id`. So the same file sent twice is the same
jobs, which workers decode once: an interrupted submission is simply repeated, and nothing else has to be remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

from alphaloop.errors import ConfigError, InvalidField, MalformedMessage, MessageError
from alphaloop.files import STANDARD, readable_again, shown_name
from alphaloop.job_lines import BadLine, JobReader, Overrides
from alphaloop.messages import Job, Status
from alphaloop.messages.fields import kind_of, without_nulls
from alphaloop.settings import Settings

#: What OpenAI's batch API calls an endpoint, and the field of the body that it needs.
ENDPOINTS: Final = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that is a job."""

    custom_id: str
    job: Job


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A line that is no job. `number` counts from 1; there is no custom_id where it could not be read."""

    number: int
    custom_id: str | None
    error: MessageError

    @property
    def message(self) -> str:
        """What is wrong, and what to do about it."""
        return f"{self.error.message} ({self.error.hint})" if self.error.hint else self.error.message

    def as_json(self) -> dict[str, Any]:
        """As OpenAI's batch object has the errors of its file."""
        return {"code": self.error.code, "message": self.message, "param": self.error.field, "line": self.number}


BatchLine = BatchRequest | BadRequest


@dataclass(frozen=True, slots=True)
class LineRules:
    """What lines may ask for, where that is not left to whoever wrote them."""

    endpoint: str | None = None  #: the only one
    tasks: tuple[str, ...] = ()  #: the only ones; empty: all
    fixed: Mapping[str, str] = field(default_factory=dict)  #: fields of every job, whatever its line says
    task_by: str = "--task"  #: what names the task of lines that name none


class BatchReader:
    """Reads the lines of one batch. `task` is that of lines that name none; without one each has to."""

    def __init__(
        self,
        settings: Settings,
        batch_id: str,
        *,
        task: str | None,
        ignores_model: bool = False,
        rules: LineRules | None = None,
    ) -> None:
        self._rules = rules or LineRules()
        top = {**self._rules.fixed, "batch_id": batch_id}
        self._jobs = JobReader(settings, task=task, overrides=Overrides(top=top, task_by=self._rules.task_by))
        self._batch_id = batch_id
        self._ignores_model = ignores_model
        self._seen: set[str] = set()

    def read(self, lines: Iterable[bytes]) -> Iterator[BatchLine]:
        """One item a line of UTF-8 that is not blank. A bad line is an item, too, and never ends the batch."""
        for number, line in enumerate(lines, 1):
            if content := line.strip():
                yield self._read_line(content, number)

    def _read_line(self, line: bytes, number: int) -> BatchLine:
        custom_id = None
        try:
            fields = _fields(line)
            custom_id = _custom_id(fields)
            if custom_id in self._seen:
                raise InvalidField("an earlier line has this custom_id", field="custom_id")
            self._seen.add(custom_id)
            item = self._jobs.read_line(json.dumps(self._job_fields(fields, custom_id)).encode(), f"line {number}")
        except MessageError as error:
            return BadRequest(number, custom_id, error)
        if isinstance(item, BadLine):
            if self._rules.endpoint is not None and item.error.field != "task":
                item.error.hint = None  # it speaks of settings to whoever runs the workers
            return BadRequest(number, custom_id, item.error)
        return BatchRequest(custom_id, item.job)

    def _job_fields(self, fields: dict[str, Any], custom_id: str) -> dict[str, Any]:
        if other := next((name for name in fields if name not in _LINE_FIELDS), None):
            problem = f"expected {', '.join(_LINE_FIELDS)}, found {_shown(other)}"
            raise InvalidField(problem, field=other if _URL.fullmatch(other) else None)
        task = fields.get("task")
        if task is not None and self._rules.tasks and task not in self._rules.tasks:
            problem = (
                f"expected one of {', '.join(self._rules.tasks)}, which this key may send to, found {_shown(task)}"
            )
            raise InvalidField(problem, field="task")
        if (method := fields.get("method", "POST")) != "POST":
            raise InvalidField(f"expected POST, found {_shown(method)}", field="method")
        url = fields.get("url")
        needed = ENDPOINTS.get(url) if isinstance(url, str) else None
        if needed is None:
            raise InvalidField(f"expected one of {', '.join(ENDPOINTS)}, found {_shown(url)}", field="url")
        if self._rules.endpoint not in (None, url):
            problem = f"expected {self._rules.endpoint}, the endpoint of the batch, found {url}"
            raise InvalidField(problem, field="url")
        body = fields.get("body")
        if not isinstance(body, dict) or body.get(needed) is None:
            problem = f"expected an object with {needed}, which {url} needs, found {_shown(body)}"
            raise InvalidField(problem, field="body")
        if body.get("stream"):
            problem = "expected false in a batch, whose answers are the rows of a file, found true"
            raise InvalidField(problem, field="body.stream")
        if self._ignores_model:
            body = {name: value for name, value in body.items() if name != "model"}
        digest = hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
        own: dict[str, Any] = {name: fields[name] for name in _OWN_FIELDS if name in fields}
        return {**own, "custom_id": custom_id, "body": body, "job_id": f"{self._batch_id}.{digest}"}


def batch_id_of(path: Path) -> str:
    """The name of the batch in a file: the same for the same bytes. Raises ConfigError for a file that is not there."""
    try:
        with path.open("rb") as file:
            return f"batch-{hashlib.file_digest(file, 'sha256').hexdigest()[:_DIGITS]}"
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", hint="name a JSONL file of batch requests") from None


@dataclass(frozen=True, slots=True)
class BatchSource:
    """A batch by its file, or by its name alone, by which lines are not known that were never sent."""

    batch_id: str
    path: Path | None
    #: Makes a reader of its lines; None: one that takes whatever anybody may send.
    reader: Callable[[], BatchReader] | None = None
    end: Status | None = None  #: of a batch that is over: with what a request ended that has no outcome
    awaits_redriven: bool = False  #: whether one is open in spite of it whose dead letter was sent again
    name: str = ""  #: of the file, as it was typed
    num_lines: int | None = None  #: as many of them are read; None: all

    @classmethod
    @contextmanager
    def named(cls, name: str) -> Iterator[BatchSource]:
        """`name` is a file, a pipe or - if there is one, else the batch_id that jobs were sent with.

        Raises ConfigError.
        """
        if name == STANDARD or (os.path.exists(name) and not os.path.isdir(name)):
            with readable_again(name) as path:
                yield cls(batch_id_of(path), path, name=shown_name(name))
        else:
            yield cls(name, None)


class KeptBatches:
    """A folder of uploaded files, from which it is read later what became of their lines.

    Threads and processes may share it.

    A file holds prompts: only the account of the process may read it, and it is deleted after some days.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, content: IO[bytes]) -> BatchSource:
        """Keep a file; the same content again is the same batch. Raises ConfigError where it cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as part:  # mode 0600
                path = Path(part.name)
                shutil.copyfileobj(content, part, 1 << 20)
            try:
                kept = BatchSource(batch_id_of(path), path)
                os.replace(path, self._file(kept.batch_id))
            finally:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"{self._folder}: {error.strerror or error}", hint="data_dir must be writable") from None
        return self.batch(kept.batch_id)

    def batch(self, batch_id: str) -> BatchSource:
        """The batch with its file where that is kept, else by its name alone."""
        is_kept = _BATCH_ID.fullmatch(batch_id) and self._file(batch_id).is_file()
        return BatchSource(batch_id, self._file(batch_id) if is_kept else None)

    def drop_before(self, moment: datetime) -> None:
        """Delete files that were uploaded before then."""
        for path in self._folder.glob("batch-*.jsonl"):
            with suppress(OSError):  # another process deletes it
                if path.stat().st_mtime < moment.timestamp():
                    path.unlink()

    def _file(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.jsonl"


#: Fields of alphaloop's jobs that a line may have beside OpenAI's.
_OWN_FIELDS: Final = ("task", "segment", "priority", "deadline", "reuse")
_LINE_FIELDS: Final = ("custom_id", "method", "url", "body", *_OWN_FIELDS)
_DIGITS: Final = 24


_URL: Final = re.compile(r"[A-Za-z0-9/_.-]{1,64}")


def _shown(value: object) -> str:
    is_name = isinstance(value, str) and _URL.fullmatch(value)
    return "nothing" if value is None else str(value) if is_name else kind_of(value)


def _custom_id(fields: dict[str, Any]) -> str:
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidField(f"expected a text that names the request, found {_shown(custom_id)}", field="custom_id")
    return custom_id


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"expected UTF-8, found byte 0x{line[error.start]:02x} at {error.start}") from None
    except (ValueError, RecursionError):
        raise MalformedMessage("expected one JSON object a line, found something else") from None
    if not isinstance(fields, dict):
        raise MalformedMessage("expected one JSON object a line, found another value")
    return without_nulls(fields)


_BATCH_ID: Final = re.compile(r"batch-[0-9a-f]{24}")
