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
from alphaloop.messages import Job, Origin, parse_job, payload_digest
from alphaloop.settings import Settings

# Of an OpenAI batch line; they say where a request would go, not what to generate.
_BATCH_ROUTING: Final = ("method", "url")


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the flags say about every job: `body` fields of the body, `top` fields of the job."""

    body: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobLine:
    """A good line. `where` is `file:line`."""

    where: str
    job: Job


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
        """One item a line of UTF-8 that is not blank; a bad one if every line is. `name` is the file's, for reports."""
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
            return JobLine(where, self._job(line, where))
        except MessageError as error:
            return BadLine(where, error)

    def _job(self, line: bytes, where: str) -> Job:
        try:
            fields = json.loads(line.decode())  # of bytes, each line would be guessed at
        except (ValueError, RecursionError):
            fields = None
        if isinstance(fields, dict):
            fields = self._complete(fields)
            task = fields.get("task")
            line = json.dumps(fields).encode()
        else:
            task = self._task
        limits = self._settings.worker
        job = parse_job(
            line,
            Origin("", where, 0, 0),
            task=task if isinstance(task, str) else "",
            max_bytes=self._max_bytes,
            max_depth=limits.max_json_depth,
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

    def _complete(self, given: dict[str, Any]) -> dict[str, Any]:
        fields = {name: value for name, value in given.items() if name not in _BATCH_ROUTING}
        if self._task is not None:
            fields.setdefault("task", self._task)
        if "task" not in fields:
            raise InvalidField("no task", field="task", hint="name it in the line, or for all lines with --task")
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


def _with_overrides(fields: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    if "max_tokens" in overrides:
        fields = {name: value for name, value in fields.items() if name != "max_completion_tokens"}
    return {**fields, **overrides}
