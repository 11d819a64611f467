"""A chunk of a streamed text, on `tokens`: OpenAI's chat.completion.chunk, with its place in Kafka headers.

`attempt` and `seq` order the chunks. Every decode of a job has a higher attempt than the one before, and the chunks of
an attempt are numbered from 0. The last one is final: it is published once the job's outcome is recorded, whatever that
is, and `status` says it. Where a chunk before it may be missing, it has the whole text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from alphaloop.errors import MalformedMessage
from alphaloop.messages.headers import CHUNK_EVENT, event_headers
from alphaloop.messages.reference import ContentReference
from alphaloop.messages.result import Result, Status, Usage

FinishReason = Literal["stop", "length"]
_PLACE: Final = ("job_id", "attempt", "seq", "final")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ChunkDelta(_Part):
    """The text that the chunk adds."""

    role: Literal["assistant"] | None = Field(None, description="In the first chunk of an attempt.")
    content: str | None = None


class ChunkChoice(_Part):
    """The only choice."""

    index: Literal[0] = 0
    delta: ChunkDelta
    finish_reason: FinishReason | None = Field(description="In the final chunk of a job that succeeded.")


class ChunkError(_Part):
    """Why the job has no text, as OpenAI writes it."""

    code: str = Field(description="docs/reference/errors.md, or the status of a job that was not decoded.")
    message: str = Field(description="For the job's sender; never prompt text.")


class ChunkBody(_Part):
    """The value of a chunk."""

    id: str = Field(description="The job's job_id.")
    object: Literal["chat.completion.chunk"]
    created: int = Field(ge=0, description="Seconds since 1970: start of the decode; for a final chunk, its record.")
    model: str = Field(description="Name of the target.")
    choices: tuple[ChunkChoice]
    usage: Usage | None = Field(None, description="In the final chunk of a job that succeeded.")
    error: ChunkError | None = Field(None, description="In the final chunk of a job that did not succeed.")
    text: str | None = Field(None, description="In a final chunk before which others may be missing: the whole text.")
    text_ref: ContentReference | None = Field(None, description="In place of `text`, as in the result.")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk, as a reader needs it. `status` is that of the outcome, in the final chunk only.

    `whole_text` or `text_ref` has the text of the whole stream, in a final chunk before which others may be missing.
    """

    job_id: str
    attempt: int
    seq: int
    text: str = ""
    status: Status | None = None
    finish_reason: FinishReason | None = None
    error: ChunkError | None = None
    whole_text: str | None = None
    text_ref: ContentReference | None = None

    @property
    def is_final(self) -> bool:
        """Whether the stream ends here."""
        return self.status is not None

    @property
    def ends_alone(self) -> bool:
        """Whether the stream ends here even if chunks before it are missing: it has the text, or there is none."""
        has_text = self.whole_text is not None or self.text_ref is not None
        return self.is_final and (has_text or self.status is not Status.SUCCEEDED)


def text_chunk(chunk: Chunk, *, created: int, model: str) -> bytes:
    """The value of a chunk with text."""
    delta = {"role": "assistant", "content": chunk.text} if chunk.seq == 0 else {"content": chunk.text}
    return _value(chunk.job_id, created, model, delta, None)


def final_chunk(result: Result, *, model: str) -> tuple[Chunk, bytes] | None:
    """The chunk that ends the stream of a recorded job, and its value; None for a job that was not streamed.

    It follows from the result alone, so every copy of it is the same one.
    """
    if result.num_chunks is None:
        return None
    extra: dict[str, Any] = {}
    if result.usage:
        extra["usage"] = result.usage.model_dump()
    failure = result.error
    if failure:
        extra["error"] = {"code": failure.code, "message": failure.message}
    whole_text, text_ref = (result.text, result.text_ref) if result.num_unacknowledged_chunks else (None, None)
    if whole_text is not None:
        extra["text"] = whole_text
    if text_ref is not None:
        extra["text_ref"] = text_ref.model_dump()
    value = _value(result.job_id, int(result.recorded_at.timestamp()), model, {}, result.finish_reason, **extra)
    chunk = Chunk(
        result.job_id,
        result.attempt,
        result.num_chunks,
        status=result.status,
        finish_reason=result.finish_reason,
        error=ChunkError(code=failure.code, message=failure.message) if failure else None,
        whole_text=whole_text,
        text_ref=text_ref,
    )
    return chunk, value


def chunk_headers(chunk: Chunk, carried: Mapping[str, str]) -> dict[str, str]:
    """The headers of a chunk; `carried` is what its job's message handed on."""
    place = {
        "job_id": chunk.job_id,
        "attempt": str(chunk.attempt),
        "seq": str(chunk.seq),
        "final": str(int(chunk.is_final)),
    }
    if chunk.status:
        place["status"] = chunk.status.value
    event_id = f"{chunk.job_id}/{chunk.attempt}/{chunk.seq}"
    return event_headers(CHUNK_EVENT, event_id, chunk.job_id, carried) | place


def read_chunk(value: bytes | None, headers: Sequence[tuple[str, bytes]]) -> Chunk:
    """A chunk from a message of `tokens`. Raises MalformedMessage for any other message."""
    named = {name: content.decode("utf-8", "replace") for name, content in headers}
    if missing := [name for name in _PLACE if name not in named]:
        raise MalformedMessage(f"expected a chunk, found no header {missing[0]!r}")
    try:
        body = ChunkBody.model_validate_json(value or b"")
        status = Status(named["status"]) if named["final"] == "1" else None
        attempt, seq = _whole(named["attempt"]), _whole(named["seq"])
    except (ValidationError, ValueError, KeyError) as error:
        raise MalformedMessage(f"expected a chunk, found something else: {type(error).__name__}") from None
    (choice,) = body.choices
    return Chunk(
        named["job_id"],
        attempt,
        seq,
        choice.delta.content or "",
        status,
        choice.finish_reason,
        body.error,
        body.text,
        body.text_ref,
    )


def _whole(digits: str) -> int:
    if not digits.isdecimal():
        raise ValueError
    return int(digits)


def _value(
    job_id: str, created: int, model: str, delta: Mapping[str, str], finish_reason: str | None, **extra: Any
) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    body = {
        "id": job_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": [choice],
        **extra,
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
