"""What a dead letter becomes when it is sent again.

Why a failed job gets a new job_id: docs/decisions/0014-retries.md.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from alphaloop.errors import ConfigError, InvalidField, MalformedMessage
from alphaloop.letters.reading import Letter
from alphaloop.messages import Origin, derived_job_id, fields_of, parse_job
from alphaloop.messages.dead_letter import SHORTENED, is_reason
from alphaloop.messages.job import SHORTHAND
from alphaloop.messages.topics import jobs_topic, task_of

_AGAIN: Final = re.compile(r"(.*)~([1-9][0-9]{0,8})")
_MAX_ID_CHARS: Final = 200


@dataclass(frozen=True, slots=True)
class Redriven:
    """The message to send."""

    job_id: str
    topic: str
    value: bytes
    headers: tuple[tuple[str, bytes], ...]


def redriven(letter: Letter, corrections: Mapping[str, Any]) -> Redriven:
    """The letter's message, corrected, to the topic it was sent to.

    A job that failed is a new job: its id goes on with ~1, then ~2, and `redrive_of` names the one before. Another
    message keeps its job_id, or gets one that depends on where it was refused. So a letter that is redriven twice is
    one job. Raises MessageError if it would be refused again.
    """
    record = letter.record
    if any(name == SHORTENED for name, _ in record.headers):
        place = ":".join(letter.reason.get(name, "?") for name in ("topic", "partition", "offset"))
        hint = f"the whole message is at {place}, as long as that topic keeps it"
        raise MalformedMessage("the letter does not have its whole message", hint=hint)
    task = task_of(letter.sent_to) or task_of(record.topic.removesuffix(".dlq")) or ""
    topic = letter.sent_to if task_of(letter.sent_to) else jobs_topic(task)
    fields = _fields(record.value)
    if letter.is_failed_job and letter.job_id:
        fields |= {
            "job_id": next_job_id(letter.job_id, is_redriven="redrive_of" in fields),
            "redrive_of": letter.job_id,
        }
    elif "job_id" not in fields:
        partition, offset = _number(letter.reason.get("partition")), _number(letter.reason.get("offset"))
        fields["job_id"] = derived_job_id(Origin("redrive", topic, partition, offset), record.value or b"")
    for path, value in corrections.items():
        _set(fields, path, value)
    value = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
    job = parse_job(value, Origin("redrive", topic, 0, 0), task=task)
    headers = tuple((name, content) for name, content in record.headers if not is_reason(name))
    return Redriven(job.job_id, topic, value, headers)


def corrections_of(settings: Sequence[str], option: str) -> dict[str, Any]:
    """From `body.temperature=0.5` to a path and a value: JSON, or text where it is none.

    Raises ConfigError naming `option`.
    """
    found: dict[str, Any] = {}
    for setting in settings:
        path, is_set, text = setting.partition("=")
        if not is_set or not all(path.split(".")):
            raise ConfigError(
                f"{option}: expected FIELD=VALUE, found {path[:60]!r}", hint="such as body.temperature=0.5"
            )
        try:
            found[path] = json.loads(text)
        except ValueError:
            found[path] = text
    return found


def _fields(value: bytes | None) -> dict[str, Any]:
    fields = fields_of(value)
    if fields is None:
        raise MalformedMessage("not a JSON object, so nothing in it can be corrected", hint="send a new job instead")
    return fields


def next_job_id(job_id: str, *, is_redriven: bool) -> str:
    """The job that a failed one becomes; `is_redriven` says whether it was itself made of a failed one."""
    match = _AGAIN.fullmatch(job_id) if is_redriven else None
    found = f"{match[1]}~{int(match[2]) + 1}" if match else f"{job_id}~1"
    return found if len(found) <= _MAX_ID_CHARS else f"{uuid.uuid5(uuid.NAMESPACE_OID, job_id)}~1"


def _set(fields: dict[str, Any], path: str, value: Any) -> None:
    """Set a field; one of the body stands inside `body` or at the top level, as the sender has it."""
    body = fields.get("body")
    if body is None and path.startswith("body."):
        path = path.removeprefix("body.")
    elif isinstance(body, dict) and path.split(".")[0] in SHORTHAND - fields.keys():
        path = f"body.{path}"
    inner: Any = fields
    while True:
        name, _, path = ("", "", path) if isinstance(inner, dict) and path in inner else path.partition(".")
        if not name or not path:
            _put(inner, name or path, value)
            return
        inner = _within(inner, name)


def _within(inner: Any, name: str) -> Any:
    if isinstance(inner, dict) and isinstance(inner.get(name), dict | list):
        return inner[name]
    if isinstance(inner, list) and name.isdigit() and int(name) < len(inner):
        return inner[int(name)]
    raise InvalidField("no such object in this message", field=name)


def _put(inner: Any, name: str, value: Any) -> None:
    if isinstance(inner, dict):
        inner[name] = value
    elif isinstance(inner, list) and name.isdigit() and int(name) < len(inner):
        inner[int(name)] = value
    else:
        raise InvalidField("no such place in this message", field=name)


def _number(digits: str | None) -> int:
    return int(digits) if digits and digits.isdigit() and len(digits) < 19 else 0
