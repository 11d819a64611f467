"""From lines of JSON to jobs: minimal jobs, OpenAI batch lines, or any object with a task and a prompt.

A line is read by the same contract as a message on Kafka (alphaloop.messages.parse_job), after three conveniences:
`--task` and the overriding flags are filled in, `id` becomes `custom_id` where there is none, and a job without
`job_id` gets a new one.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from alphaloop.errors import InvalidField, JobConflict, MalformedMessage, MessageError, UnknownTask
from alphaloop.messages import Job, Origin, field_as_sent, fields_of, parse_job, payload_digest
from alphaloop.messages.body import SHORTHAND
from alphaloop.messages.fields import without_nulls
from alphaloop.settings import Settings

# Fields of an OpenAI batch line that say where a request would go, not what to generate.
_BATCH_ROUTING: Final = ("method", "url")


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the flags say about every job: `body` fields of the body, `top` fields of the job."""

    body: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, Any] = field(default_factory=dict)
    task_by: str = "--task"  #: what names the task of lines that name none


@dataclass(frozen=True, slots=True)
class JobLine:
    """A good line. `where` is `file:line`, `names` what `named_in_line` needs of it."""

    where: str
    job: Job
    names: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def named_in_line(self, path: str | None) -> str | None:
        """The path of a field of the job, or of the message that was sent for it, in the line."""
        if path is not None and path.split(".")[0] in SHORTHAND:
            path = f"body.{path}"
        return field_as_sent(path, self.names)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no job."""

    where: str
    error: MessageError


class JobReader:
    """Reads lines into jobs, of one file or of several, and remembers job_ids to find conflicts between lines."""

    def __init__(self, settings: Settings, *, task: str | None = None, overrides: Overrides | None = None) -> None:
        self._settings = settings
        self._task = task
        self._overrides = overrides or Overrides()
        self._digests: dict[str, bytes] = {}
        self._max_bytes = settings.worker.max_job_bytes
        if settings.claim_check.url is not None:  # what is too large for a message travels by reference
            self._max_bytes = max(self._max_bytes, settings.claim_check.max_bytes)

    def read(self, lines: Iterable[bytes], name: str) -> Iterator[JobLine | BadLine]:
        """A job or an error for each line of UTF-8 that is not blank; an error if every line is.

        `name` is the file's, for reports.
        """
        is_empty = True
        for number, line in enumerate(lines, 1):
            if content := line.strip():
                is_empty = False
                yield self.read_line(content, f"{name}:{number}")
        if is_empty:
            yield BadLine(name, MalformedMessage("expected one JSON object a line, found no line with text"))

    def read_line(self, line: bytes, where: str) -> JobLine | BadLine:
        """One line that is not blank; `where` is its place, for the reports."""
        try:
            fields = fields_of(line)
            return JobLine(where, self._job(line, fields, where), _names(fields or {}))
        except MessageError as error:
            return BadLine(where, error)

    def _job(self, line: bytes, fields: dict[str, Any] | None, where: str) -> Job:
        if fields is None:
            return self._parsed(line, self._task, where)
        complete = self._complete(without_nulls(fields))
        try:
            return self._parsed(json.dumps(complete).encode(), complete.get("task"), where)
        except MessageError as error:
            if error.field == "custom_id" and fields.get("custom_id") is None:
                error.field = "id"
            raise

    def _parsed(self, line: bytes, task: object, where: str) -> Job:
        limits = self._settings.worker
        job = parse_job(
            line,
            Origin("", where, 0, 0),
            task=task if isinstance(task, str) else "",
            max_bytes=self._max_bytes,
            ignored=limits.ignored_body_fields,
        )
        known = self._settings.tasks
        if known and job.task not in known:
            raise UnknownTask(
                f"no task {job.task!r} in configs/tasks.toml", field="task", hint=f"expected one of {', '.join(known)}"
            )
        if self._digests.setdefault(job.job_id, digest := payload_digest(job)) != digest:
            raise JobConflict("an earlier line has this job_id with another payload", field="job_id")
        return job

    def _complete(self, line: dict[str, Any]) -> dict[str, Any]:
        fields = {name: value for name, value in line.items() if name not in _BATCH_ROUTING}
        if self._task is not None:
            fields.setdefault("task", self._task)
        if "task" not in fields:
            hint = f"name it in the line, or for all lines with {self._overrides.task_by}"
            raise InvalidField("expected a task, found none", field="task", hint=hint)
        identifier = fields.pop("id", None)
        if isinstance(identifier, str | int) and "custom_id" not in fields:
            fields["custom_id"] = str(identifier)
        fields.setdefault("job_id", uuid.uuid4().hex)
        fields.update(self._overrides.top)
        body = fields.get("body")
        if isinstance(body, dict):
            fields["body"] = _with_overrides(body, self._overrides.body)
        elif body is None:
            fields = _with_overrides(fields, self._overrides.body)
        return fields


def _names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The names of a line's fields and of its body's, in place of each text an empty one, so that little is kept."""
    kept = {name: "" if isinstance(value, str) else value is not None or None for name, value in fields.items()}
    body = fields.get("body")
    return kept | ({"body": _names(body)} if isinstance(body, dict) else {})


def _with_overrides(fields: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    if "max_tokens" in overrides:
        fields = {name: value for name, value in fields.items() if name != "max_completion_tokens"}
    return {**fields, **overrides}
