"""From a Kafka message's bytes to a Job, or to the error that explains the refusal and the result that says so."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import uuid
from codecs import BOM_UTF8
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NoReturn

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from alphaloop.errors import InvalidField, JobConflict, MalformedMessage, MessageError
from alphaloop.messages.answer_form import GUIDED
from alphaloop.messages.body import PROMPT_ELSEWHERE, Body
from alphaloop.messages.dead_letter import MAX_FIELD_CHARS, MAX_REASON_CHARS, Origin
from alphaloop.messages.fields import WRONG_WITHIN, depth_of, kind_of, without_nulls
from alphaloop.messages.job import HARMLESS, Identifier, Job, Label, Purpose, refuse_unknown
from alphaloop.messages.result import Failure, RecordPlace, Result, Status
from alphaloop.messages.topics import task_read_from

DEFAULT_MAX_BYTES: Final = 1 << 20
_MAX_DEPTH: Final = 32
# Pydantic names Python's types; the sender wrote JSON.
_SENT_WORDS: Final = {
    "Tuple": "Array",
    "tuple": "array",
    "dictionary or instance of ChatMessage": "object",
    "dictionary or instance of Body": "object",
    "dictionary or instance of Prediction": "object",
    "dictionary or instance of PastToolCall": "object",
    "dictionary or instance of CalledFunction": "object",
    "dictionary": "object",
    **{f"a valid {letter}": f"an {letter}" for letter in "aio"},
    "a valid": "a",
}
_SHOULD: Final = re.compile(r"^\w+ should (be|have|match) ")
_NAMESPACE: Final = uuid.UUID("6f0d8f3e-6c57-5d0a-9d0e-0f6d6d1a5c11")


def parse_job(
    value: bytes | None,
    origin: Origin,
    *,
    task: str,
    max_bytes: int = DEFAULT_MAX_BYTES,
    ignored: Collection[str] = HARMLESS,
) -> Job:
    """Read one job.

    `task` is the topic's; the message may repeat it but not contradict it. A message without `job_id` gets one derived
    from its record, so that a redelivery is the same job. `ignored` are fields of the body that are dropped.

    Raises MalformedMessage for anything that is not a UTF-8 JSON object of at most `max_bytes` bytes and 32
    levels, InvalidField for a wrong or unknown field, which it names as the message does.
    """
    fields = without_nulls(_read_object(value, max_bytes))
    if fields.setdefault("task", task) != task and isinstance(fields["task"], str):
        raise InvalidField(
            f"expected {task!r}, the task of topic {origin.topic}, found {fields['task'][:100]!r}",
            field="task",
            hint="send the job to the topic of its task, or leave the field out",
        )
    if dropped := refuse_unknown(fields, ignored):
        fields.setdefault("ignored_fields", dropped)
    if "job_id" not in fields:
        fields["job_id"] = derived_job_id(origin, value or b"")
    try:
        is_elsewhere = fields.get("body_ref") is not None
        return Job.model_validate(fields, context=PROMPT_ELSEWHERE if is_elsewhere else None)
    except ValidationError as error:
        raise _first_invalid_field(error, fields) from None


def field_as_sent(field: str | None, fields: Mapping[str, Any]) -> str | None:
    """The path of a job's field, such as `body.max_tokens`, in the message that was sent, whose fields are these.

    There it may stand at the top level, have its other name, or be the shorthand for a message.
    """
    if field is None or field.split(".")[0] != "body":
        return field
    body = fields.get("body")
    scope = fields if body is None else body
    if not isinstance(scope, Mapping):
        return "body"
    path = field.split(".")[1:]
    if not path:
        if body is not None:
            return "body"
        path = ["prompt" if scope.get("messages") is None else "messages"]
    if path[0] in ("messages", "prompt") and scope.get(path[0]) is None:
        if fields.get("body_ref") is not None:
            return "body_ref"
        if path[0] == "messages" and scope.get("prompt") is not None:
            path = ["prompt"]
    path = _as_named(path, scope)
    return ".".join(path if body is None else ["body", *path])


#: Names that are read too, where the first one is missing.
_OTHER_NAMES: Final = {"max_tokens": "max_completion_tokens", "reasoning": "reasoning_content"}


def _as_named(path: Sequence[str], body: Mapping[str, Any]) -> list[str]:
    """The path of a field of a body, by the names that this one has, and to where a text stands for what it holds."""
    if path[0] == "structured_outputs" and body.get(path[0]) is None:
        older = [name for name, kind in GUIDED.items() if body.get(name) is not None and path[1:2] in ([], [kind])]
        path = [*older[:1], *path[2:]] if older else path
    form = body.get("response_format")
    is_schema = list(path[:3]) == ["response_format", "json_schema", "schema"]
    if is_schema and isinstance(form, Mapping) and form.get("json_schema") is None and form.get("schema") is not None:
        path = ["response_format", *path[2:]]
    named: list[str] = []
    node: Any = body
    for part in path:
        if isinstance(node, str):  # the model reads it as the only item of an array, or as JSON
            break
        if isinstance(node, Mapping):
            other = _OTHER_NAMES.get(part, part)
            part = other if node.get(part) is None and node.get(other) is not None else part
            node = node.get(part)
        else:
            node = node[int(part)] if isinstance(node, list) and part.isdigit() and int(part) < len(node) else None
        named.append(part)
    return named


def fields_of(value: bytes | None) -> dict[str, Any] | None:
    """The fields of a message, unchecked; None where it is no JSON object."""
    try:
        fields = json.loads((value or b"").decode())  # of bytes, the encoding would be guessed at
    except (ValueError, RecursionError):
        fields = None
    return fields if isinstance(fields, dict) else None


def derived_job_id(origin: Origin, value: bytes) -> str:
    """The job_id of a message without one: the same for every delivery of the same record.

    A place alone is not enough, because offsets begin again in a topic that was made anew, and in a broker that keeps
    nothing. The timestamp distinguishes those records. The digest of the value sees to it that another payload always
    gets another id, also where a sender sets timestamps itself. A record keeps all of this when its topic is compacted
    or its partition moves to another broker. A copy in another topic or cluster is another job.
    """
    where = (origin.cluster, origin.topic, origin.partition, origin.offset, origin.timestamp_ms)
    return str(uuid.uuid5(_NAMESPACE, "/".join((*map(str, where), hashlib.sha256(value).hexdigest()))))


def refused_result(
    error: MessageError | Failure, origin: Origin, value: bytes | None, *, job_id: str | None = None
) -> Result:
    """The answer to a record that became no job. The same record and error give the same bytes, whoever makes it.

    What the record says of itself is repeated as far as it can be read and is valid, so no sender makes the answer
    large. It is answered under its own job_id, unless it has none that can be read, or that id is another's: the job's
    with which it is in conflict, or the scheduler's, which alone sends probes. Then its id is the derived one, or
    `job_id`, where the letter of the record names that.
    """
    try:
        fields = _read_object(value, len(value or b""))
    except MalformedMessage:
        fields = {}
    own = _valid(_IDENTIFIER, fields.get("job_id"))
    is_anothers = error.code == JobConflict.code or fields.get("purpose") not in (None, Purpose.TRAFFIC.value)
    answered = job_id or (derived_job_id(origin, value or b"") if own is None or is_anothers else own)
    labels = {name: _valid(_LABEL, fields.get(name)) for name in ("custom_id", "batch_id", "segment")}
    return Result(
        job_id=answered,
        status=Status.REFUSED,
        origin=RecordPlace(topic=origin.topic, partition=origin.partition, offset=origin.offset),
        claimed_job_id=None if own == answered else own,
        task=task_read_from(origin.topic) or origin.topic,
        redrive_of=_valid(_IDENTIFIER, fields.get("redrive_of")),
        error=Failure(
            code=error.code,
            message=_bounded(error.message, MAX_REASON_CHARS) or "",
            field=_bounded(error.field, MAX_FIELD_CHARS),
            hint=_bounded(error.hint, MAX_REASON_CHARS),
        ),
        attempt=1,
        recorded_at=moment_of(origin.timestamp_ms) or _EPOCH,
        **labels,
    )


_IDENTIFIER: Final = TypeAdapter[str](Identifier)
_LABEL: Final = TypeAdapter[str](Label)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _valid(kind: TypeAdapter[str], value: object) -> str | None:
    try:
        return kind.validate_python(value, strict=True)
    except ValidationError:
        return None


def _bounded(text: str | None, max_chars: int) -> str | None:
    """The beginning of a text, without what UTF-8 cannot encode: an error may name a field as its sender wrote it."""
    return text and text[:max_chars].encode("utf-8", "replace").decode()


def moment_of(timestamp_ms: int | None) -> datetime | None:
    """A message's time; None without one, or with one that no calendar has: producers may set any number."""
    try:
        return None if timestamp_ms is None else _EPOCH + timedelta(milliseconds=timestamp_ms)
    except OverflowError:
        return None


def payload_digest(job: Job) -> bytes:
    """SHA-256 over everything the sender asked for. Equal digests of one job_id are a redelivery, others a conflict.

    Defaults are left out, so that a field added by a later release does not turn old jobs into conflicts. Fields come
    in the order of the model, whatever order the sender wrote them in.
    """
    left_out: Any = _NOT_ASKED if job.body_ref is None else {**dict.fromkeys(_NOT_ASKED, True), **_elsewhere(job)}
    # The model's own method decodes these bytes, only to have them encoded again.
    content = job.__pydantic_serializer__.to_json(job, exclude=left_out, exclude_none=True, exclude_defaults=True)
    return hashlib.sha256(content).digest()


#: Fields of a job that its sender does not ask anything with.
_NOT_ASKED: Final = {"job_id", "ignored_fields"}


def encode_job(job: Job) -> bytes:
    """A job as UTF-8 JSON, defaults left out, and the prompt if it lies elsewhere."""
    return job.model_dump_json(exclude=_elsewhere(job), exclude_none=True, exclude_defaults=True).encode()


def encode_prompt(job: Job) -> bytes:
    """The job's prompt as UTF-8 JSON, for the content that `body_ref` refers to."""
    return job.body.model_dump_json(include={"messages", "prompt"}, exclude_none=True).encode()


def with_prompt(job: Job, content: bytes) -> Job:
    """A job whose prompt lay elsewhere, with that content. Raises MalformedMessage, InvalidField."""
    prompt = _read_object(content, len(content))
    if others := sorted(prompt.keys() - {"messages", "prompt"}):
        raise InvalidField(f"expected messages or prompt only, found {others[0][:100]!r}", field="body_ref")
    own = job.body.model_dump(exclude_none=True, exclude_defaults=True)
    try:
        return job.model_copy(update={"body": Body.model_validate({**own, **prompt})})
    except ValidationError as error:
        wrong = _first_invalid_field(error, prompt)
        raise InvalidField(
            f"{wrong.field} of the content: {wrong.message}", field="body_ref", hint=wrong.hint
        ) from None


def _elsewhere(job: Job) -> dict[str, Any]:
    """What a message leaves out of a job, because it refers to it."""
    return {} if job.body_ref is None else {"body": {"messages", "prompt"}}


def _read_object(value: bytes | None, max_bytes: int) -> dict[str, Any]:
    if not value:
        raise MalformedMessage("expected a JSON object, found an empty message")
    if len(value) > max_bytes:
        raise MalformedMessage(
            f"expected at most {max_bytes} bytes, found {len(value)}",
            hint="shorten the prompt, or raise worker.max_job_bytes and the topics' max.message.bytes together",
        )
    if value.startswith(BOM_UTF8):
        raise MalformedMessage("expected JSON, found a byte order mark (BOM) before it")
    try:
        fields = from_json(value, allow_inf_nan=False)
    except ValueError:
        fields = _read_again(value)
    if not isinstance(fields, dict):
        raise MalformedMessage(f"expected a JSON object, found {kind_of(fields)}")
    # Every level opens a bracket, so most messages need no count.
    is_flat = value.count(b"{") + value.count(b"[") <= _MAX_DEPTH
    if not is_flat and depth_of(fields, most=_MAX_DEPTH) > _MAX_DEPTH:
        raise _too_deep()
    return fields


def _read_again(value: bytes) -> Any:
    """Read what the fast parser refuses: this one says where it is wrong, and takes a lone surrogate or a deep value.

    What both take, they read alike.
    """
    try:
        return _DECODER.decode(value.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"expected UTF-8, found byte 0x{value[error.start]:02x} at {error.start}") from None
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise MalformedMessage(
            f"expected JSON, found none at character {error.pos}: {error.msg}",
            hint="one JSON object a message, without a trailing comma",
        ) from None
    except ValueError:  # Python converts no longer integer
        most = sys.get_int_max_str_digits()
        raise MalformedMessage(f"expected numbers of at most {most} digits, found a longer one") from None


def _too_deep() -> MalformedMessage:
    # Not how deep: whether a parser gives up before the end depends on how deep its caller stands.
    return MalformedMessage(f"expected at most {_MAX_DEPTH} levels of nesting, found more")


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedMessage(f"expected JSON numbers, found {name}, which JSON does not have")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)


def _first_invalid_field(error: ValidationError, fields: Mapping[str, Any]) -> InvalidField:
    """What is wrong first, with how many other fields are; `fields` are those of the message."""
    errors = error.errors(include_url=False)
    first, *others = ((_path(detail), detail) for detail in errors if not _is_of_its_items(detail, errors))
    path, detail = first
    message, _, _ = detail["msg"].removeprefix("Value error, ").partition(" after validation")
    message = _SHOULD.sub("expected ", message)
    for python, sent in _SENT_WORDS.items():
        message = message.replace(python, sent)
    if detail["type"] == "missing":
        message = f"expected {'prompt, messages or a body' if path == ('body',) else 'a value'}, found nothing"
    elif detail["type"] not in ("value_error", WRONG_WITHIN):
        message = f"{message}, found {kind_of(detail['input'])}"
    num_others = len({_name(other) for other, _ in others} - {_name(path)})
    hint = f"{num_others} more field{'s are' if num_others > 1 else ' is'} wrong too" if num_others else None
    return InvalidField(message, field=field_as_sent(".".join(path) or None, fields), hint=hint)


def _path(error: ErrorDetails) -> tuple[str, ...]:
    within = error["ctx"]["field"].split(".") if error["type"] == WRONG_WITHIN else ()
    return (*map(str, error["loc"]), *within)


def _name(path: tuple[str, ...]) -> tuple[str, ...]:
    """Without the places in arrays: an array whose items are wrong is one field."""
    return tuple(part for part in path if not part.isdigit())


def _is_of_its_items(error: ErrorDetails, errors: Sequence[ErrorDetails]) -> bool:
    """Whether an array is called too short because its items are wrong, as pydantic counts the right ones only."""
    loc = error["loc"]
    return any(len(other["loc"]) > len(loc) and other["loc"][: len(loc)] == loc for other in errors)
