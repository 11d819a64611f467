"""A result: how a job ended, on the `results` topic and in `jobs.outcome`; or why a record became no job.

Counts are reported, not rates: α_i is `accepts[i] / trials[i]`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from alphaloop.errors import MalformedMessage
from alphaloop.messages.headers import CHUNK_EVENT, event_headers
from alphaloop.messages.job import ContentReference, Purpose


class Status(StrEnum):
    """How a job ended, or that a record became none. Every record on a topic of jobs ends in exactly one of these."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    REFUSED = "refused"  #: of a record that became no job: the answer has no row in `jobs`


class Mode(StrEnum):
    """How a job was decoded."""

    VANILLA = "vanilla"
    SPECULATIVE = "speculative"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Usage(_Part):
    """Token counts under OpenAI's names."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)


class Timings(_Part):
    """Seconds spent on the job."""

    queue_s: float = Field(ge=0, description="From the message's Kafka timestamp to the start of decoding.")
    time_to_first_token_s: float | None = Field(None, ge=0, description="From the start of decoding.")
    wall_s: float = Field(ge=0, description="From the start of decoding to the last token.")
    device_s: float = Field(ge=0, description="The job's share of the engine's time: each step's divided by its batch.")


class DecodingReport(_Part):
    """What was decided, why, and what came of it. Lists are by draft position, first position first."""

    mode: Mode
    drafter: str | None = None
    draft_revision: str | None = None
    target_revision: str
    engine: str
    num_draft_tokens: int = Field(ge=0, description="k, the draft length asked for; 0 is vanilla.")
    reason: str
    explanation: str = ""
    rounds: int = Field(ge=0)
    num_empty_rounds: int = Field(ge=0, description="Rounds in which nothing was proposed, the prefill among them.")
    proposed: tuple[int, ...] = ()
    trials: tuple[int, ...] = ()
    accepts: tuple[int, ...] = ()
    num_cropped: int = Field(
        0, ge=0, description="Tokens of the last round behind the end: rounds + accepted - tokens."
    )
    batch_size: int = Field(ge=1)


class Failure(_Part):
    """Why a job failed, in words fit for its sender; never contains prompt text."""

    code: str
    message: str
    field: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class RecordPlace(_Part):
    """Where a record lies on Kafka; of one on a retry topic, where it was first sent to."""

    topic: str
    partition: int
    offset: int


class Result(_Part):
    """What became of a job, or of a record that became none: `refused`."""

    object: Literal["alphaloop.result"] = "alphaloop.result"
    job_id: str
    status: Status
    origin: RecordPlace | None = Field(None, description="Of a refused record: where it lies.")
    claimed_job_id: str | None = Field(
        None, description="Of a refused record whose job_id is another's: that id. `job_id` is derived from the record."
    )
    task: str
    custom_id: str | None = None
    batch_id: str | None = None
    endpoint: Literal["/v1/completions"] | None = Field(
        None, description="Of a job with body.prompt: the endpoint whose form its answer has. Without it, chat's."
    )
    redrive_of: str | None = None
    segment: str | None = None
    purpose: Purpose = Purpose.TRAFFIC
    target: str | None = Field(None, description="Name of the model whose text it is.")
    target_revision: str | None = Field(None, description="Hash of that model's weights.")
    text: str | None = None
    text_ref: ContentReference | None = Field(
        None, description="Where the text lies, as UTF-8, if the result would be too large with it."
    )
    finish_reason: Literal["stop", "length"] | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    decoding: DecodingReport | None = None
    error: Failure | None = None
    attempt: int = Field(ge=1, description="The claim that ended the job; of a refused record 1.")
    num_chunks: int | None = Field(
        None, ge=0, description="Of a streamed job: chunks of this attempt on `tokens` before the final one."
    )
    num_unacknowledged_chunks: int | None = Field(
        None,
        ge=1,
        description="Of these, chunks that Kafka had not acknowledged when the outcome was recorded, if any. The final "
        "chunk then has the whole text.",
    )
    recorded_at: AwareDatetime = Field(
        description="When the outcome was recorded; of a refused record its timestamp, or 1970 if that is no date."
    )

    @property
    def sent_job_id(self) -> str:
        """The job_id that its sender knows."""
        return self.claimed_job_id or self.job_id

    def encode(self) -> bytes:
        """The result as UTF-8 JSON; the recorded bytes are the bytes that are sent."""
        return self.model_dump_json(exclude_none=True).encode()

    @classmethod
    def decode(cls, value: bytes) -> Result:
        """The result from its JSON; raises pydantic's ValidationError on anything else."""
        return cls.model_validate_json(value)


def encode_fields(fields: Mapping[str, Any]) -> bytes:
    """What `Result.encode` returns of a result with these fields, in a quarter of the time: nothing is validated.

    The caller gives every field of the model that is not None, enums as their values.
    """
    return to_json(fields)


FinishReason = Literal["stop", "length"]
_PLACE: Final = ("job_id", "attempt", "seq", "final")


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
    failure, is_needed = result.error, bool(result.num_unacknowledged_chunks)
    chunk = Chunk(
        result.job_id,
        result.attempt,
        result.num_chunks,
        status=result.status,
        finish_reason=result.finish_reason,
        error=ChunkError(code=failure.code, message=failure.message) if failure else None,
        whole_text=result.text if is_needed else None,
        text_ref=result.text_ref if is_needed else None,
    )
    parts = {"usage": result.usage, "error": chunk.error, "text": chunk.whole_text, "text_ref": chunk.text_ref}
    extra = {
        name: part.model_dump() if isinstance(part, BaseModel) else part
        for name, part in parts.items()
        if part is not None
    }
    return chunk, _value(chunk.job_id, int(result.recorded_at.timestamp()), model, {}, chunk.finish_reason, **extra)


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


class StreamReader:
    """One job's stream. Give it every chunk of the job; `text` is what is certain so far.

    A chunk of a lower attempt, or one that was taken before, changes nothing. A higher attempt decodes the job from its
    start, so `text` begins again with it. A chunk whose predecessors are missing waits for them. `end` is the final
    chunk, once every chunk before it is here, or at once if it has the whole text or the job has none.
    """

    def __init__(self) -> None:
        self.attempt = 0  #: the highest seen; 0 before the first chunk
        self.text = ""  #: of that attempt, up to the first gap
        self.end: Chunk | None = None
        self._next_seq = 0
        self._waiting: dict[int, Chunk] = {}

    def take(self, chunk: Chunk) -> str:
        """The text that this chunk makes certain: of a new attempt from its start, often empty."""
        if chunk.attempt < self.attempt or self.end is not None:
            return ""
        if chunk.attempt > self.attempt:
            self.attempt, self.text, self._next_seq = chunk.attempt, "", 0
            self._waiting.clear()
        if chunk.ends_alone:
            self.end = chunk
            self._waiting.clear()
            before, self.text = self.text, self.text if chunk.whole_text is None else chunk.whole_text
            return self.text[len(before) :]
        if chunk.seq >= self._next_seq:
            self._waiting.setdefault(chunk.seq, chunk)
        added = []
        while (following := self._waiting.pop(self._next_seq, None)) is not None:
            self._next_seq += 1
            added.append(following.text)
            if following.is_final:
                self.end = following
        self.text += (new := "".join(added))
        return new


class StreamReaders:
    """The streams of several jobs on one topic."""

    def __init__(self, job_ids: Collection[str]) -> None:
        self._by_job = {job_id: StreamReader() for job_id in job_ids}

    def __getitem__(self, job_id: str) -> StreamReader:
        return self._by_job[job_id]

    def take(self, chunk: Chunk) -> str:
        """Give the chunk to its job's reader; a chunk of another job is passed over."""
        reader = self._by_job.get(chunk.job_id)
        return reader.take(chunk) if reader else ""
