"""A stream: an answer while it is decoded, as chunks on the `tokens` topic, and what a reader makes of them.

A chunk has one piece of one text: of its content, of the reasoning before it, or of a call of a tool. The final one has
none; it says how each text ended.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_jsonable_python

from alphaloop.errors import MalformedMessage
from alphaloop.messages.headers import CHUNK_EVENT, event_headers
from alphaloop.messages.job import ContentReference
from alphaloop.messages.result import (
    AnswerMessage,
    Choice,
    ChosenToken,
    FinishReason,
    Result,
    Status,
    ToolCall,
    ToolCallFunction,
    Usage,
    chat_logprobs,
)

_PLACE: Final = ("job_id", "attempt", "seq", "final")
#: What a text is made of.
Part = Literal["reasoning", "content", "tool_calls"]
#: In the order in which they are shown.
_PARTS: Final[tuple[Part, ...]] = ("reasoning", "content", "tool_calls")
#: Texts of a job that a stream distinguishes; OpenAI allows no more.
_MOST_TEXTS: Final = 128


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ChunkFunction(_Value):
    """The function that a call names, where the call begins, and a piece of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ChunkToolCall(_Value):
    """A piece of a call. `id`, `type` and the name stand where the call begins."""

    index: int = Field(ge=0, description="Among the calls of its text.")
    id: str | None = None
    type: Literal["function"] | None = None
    function: ChunkFunction = ChunkFunction()


class ChunkDelta(_Value):
    """What the chunk adds: of content, reasoning and calls of tools one."""

    role: Literal["assistant"] | None = Field(None, description="In the first chunk of each text of an attempt.")
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ChunkToolCall, ...] | None = Field(None, min_length=1, max_length=1)


class ChunkLogprobs(_Value):
    """Logprobs, as OpenAI's chunks have them."""

    content: tuple[ChosenToken, ...] = Field(description="By token; beside others of the text they are all of it.")


class ChunkChoice(_Value):
    """The text that the chunk adds to."""

    index: int = Field(0, ge=0, lt=_MOST_TEXTS)
    delta: ChunkDelta
    logprobs: ChunkLogprobs | None = Field(
        None, description="If asked for, of the tokens that came since the chunk before; the delta may have none yet."
    )
    finish_reason: FinishReason | None = Field(description="In the final chunk of a job that succeeded.")


class ChunkError(_Value):
    """Why the job has no text, as OpenAI writes it."""

    code: str = Field(description="docs/reference/errors.md, or the status of a job that was not decoded.")
    message: str = Field(description="For the job's sender; never prompt text.")


class ChunkBody(_Value):
    """The value of a chunk."""

    id: str = Field(description="The job's job_id.")
    object: Literal["chat.completion.chunk"]
    created: int = Field(ge=0, description="Seconds since 1970: start of the decode; for a final chunk, its record.")
    model: str = Field(description="Name of the target.")
    choices: tuple[ChunkChoice, ...] = Field(min_length=1, description="One; in the final chunk one a text.")
    usage: Usage | None = Field(None, description="In the final chunk of a job that succeeded.")
    error: ChunkError | None = Field(None, description="In the final chunk of a job that did not succeed.")
    text: str | None = Field(None, description="In a final chunk before which others may be missing: the whole text.")
    text_ref: ContentReference | None = Field(None, description="In place of `text`, as in the result.")
    whole_choices: tuple[Choice, ...] = Field(
        (), description="Beside `text`: the choices of the result, where that has them."
    )
    choices_ref: ContentReference | None = Field(None, description="In place of both, as in the result.")


@dataclass(frozen=True, slots=True)
class ToolCallHead:
    """The call that a piece of arguments belongs to; `id` and `name` where it begins."""

    index: int  #: among the calls of its text
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk, as a reader needs it. `status` is that of the outcome, in the final chunk only.

    `whole_text`, `whole_choices` or a reference have the whole answer, in a final chunk before which others may be
    missing.
    """

    job_id: str
    attempt: int
    seq: int
    text: str = ""  #: a piece of `part`; of tool_calls, of the arguments
    choice: int = 0  #: which of the job's texts it belongs to
    part: Part = "content"
    tool_call: ToolCallHead | None = None  #: of tool_calls
    logprobs: tuple[ChosenToken, ...] = ()  #: of tokens that came since the text's chunk before, if asked for
    status: Status | None = None
    finish_reasons: tuple[FinishReason, ...] = ()  #: by text
    error: ChunkError | None = None
    whole_text: str | None = None
    text_ref: ContentReference | None = None
    whole_choices: tuple[Choice, ...] = ()
    choices_ref: ContentReference | None = None

    @property
    def is_final(self) -> bool:
        """Whether the stream ends here."""
        return self.status is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """The first text's."""
        return self.finish_reasons[0] if self.finish_reasons else None

    @property
    def is_elsewhere(self) -> bool:
        """Whether the answer lies where a reference says."""
        return self.text_ref is not None or self.choices_ref is not None

    @property
    def ends_alone(self) -> bool:
        """Whether the stream ends here even if chunks before it are missing: it has the text, or there is none."""
        has_text = self.whole_text is not None or bool(self.whole_choices) or self.is_elsewhere
        return self.is_final and (has_text or self.status is not Status.SUCCEEDED)


def text_chunk(chunk: Chunk, *, created: int, model: str, is_first: bool = False) -> bytes:
    """The value of a chunk with text; `is_first`: the first of a later text; `seq` shows the first of all."""
    delta: dict[str, Any] = {"role": "assistant"} if chunk.seq == 0 or is_first else {}
    match chunk.part:
        case "content":
            delta["content"] = chunk.text
        case "reasoning":
            delta["reasoning_content"] = chunk.text
        case "tool_calls":
            delta["tool_calls"] = [_call_delta(chunk)]
    choice: dict[str, Any] = {"index": chunk.choice, "delta": delta, "finish_reason": None}
    if chunk.logprobs:
        choice["logprobs"] = chat_logprobs(chunk.logprobs)
    return _value(chunk.job_id, created, model, [choice])


def final_chunk(result: Result, *, model: str) -> tuple[Chunk, bytes] | None:
    """The chunk that ends the stream of a recorded job, and its value; None for a job that was not streamed.

    It follows from the result alone, so every copy of it is the same one. `model` stands in where that names none.
    """
    if result.num_chunks is None:
        return None
    # Where chunks may be missing, and where there are none, because the text was there already.
    failure, is_needed = result.error, bool(result.num_unacknowledged_chunks) or result.reused_from is not None
    reasons = tuple(choice.finish_reason for choice in result.choices) or (result.finish_reason,)
    chunk = Chunk(
        result.job_id,
        result.attempt,
        result.num_chunks,
        status=result.status,
        finish_reasons=tuple(reason for reason in reasons if reason is not None),
        error=ChunkError(code=failure.code, message=failure.message) if failure else None,
        whole_text=result.text if is_needed else None,
        text_ref=result.text_ref if is_needed else None,
        whole_choices=result.choices if is_needed else (),
        choices_ref=result.choices_ref if is_needed else None,
    )
    choices: list[dict[str, Any]] = [
        {"index": index, "delta": {}, "finish_reason": reason} for index, reason in enumerate(reasons)
    ]
    parts = {
        "usage": result.usage,
        "error": chunk.error,
        "text": chunk.whole_text,
        "text_ref": chunk.text_ref,
        "whole_choices": chunk.whole_choices or None,
        "choices_ref": chunk.choices_ref,
    }
    extra = {name: to_jsonable_python(part, exclude_none=True) for name, part in parts.items() if part is not None}
    created = int(result.recorded_at.timestamp())
    return chunk, _value(chunk.job_id, created, result.target or model, choices, **extra)


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
    first = body.choices[0]
    part, text, head = _piece_of(first.delta)
    return Chunk(
        named["job_id"],
        attempt,
        seq,
        text,
        choice=first.index,
        part=part,
        tool_call=head,
        logprobs=first.logprobs.content if first.logprobs else (),
        status=status,
        finish_reasons=tuple(choice.finish_reason for choice in body.choices if choice.finish_reason is not None),
        error=body.error,
        whole_text=body.text,
        text_ref=body.text_ref,
        whole_choices=body.whole_choices,
        choices_ref=body.choices_ref,
    )


def _whole(digits: str) -> int:
    if not digits.isdecimal():
        raise ValueError
    return int(digits)


def _call_delta(chunk: Chunk) -> dict[str, Any]:
    head = chunk.tool_call or ToolCallHead(0)
    if head.name is None:
        return {"index": head.index, "function": {"arguments": chunk.text}}
    function = {"name": head.name, "arguments": chunk.text}
    return {"index": head.index, "id": head.id, "type": "function", "function": function}


def _piece_of(delta: ChunkDelta) -> tuple[Part, str, ToolCallHead | None]:
    if delta.tool_calls:
        call = delta.tool_calls[0]
        return "tool_calls", call.function.arguments or "", ToolCallHead(call.index, call.id, call.function.name)
    if delta.reasoning_content is not None:
        return "reasoning", delta.reasoning_content, None
    return "content", delta.content or "", None


def _value(job_id: str, created: int, model: str, choices: Sequence[Mapping[str, Any]], **extra: Any) -> bytes:
    body = {
        "id": job_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": choices,
        **extra,
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class AnswerPlace(NamedTuple):
    """Where in an answer a piece belongs."""

    choice: int
    part: Part
    call: int = 0  #: of tool_calls: which one


FIRST_CONTENT: Final = AnswerPlace(0, "content")


@dataclass(frozen=True, slots=True)
class SaidSoFar:
    """What an answer says so far at one place; of a call `id` and `name` are there, and `text` is its arguments."""

    text: str
    id: str | None = None
    name: str | None = None


class AnswerSoFar:
    """What an answer says so far: of each text its reasoning, its content, its calls of tools."""

    def __init__(self, messages: Sequence[AnswerMessage] = ()) -> None:
        self.said: dict[AnswerPlace, SaidSoFar] = {}
        for choice, message in enumerate(messages):
            if message.reasoning is not None:
                self.add(choice, "reasoning", message.reasoning)
            if message.content is not None:
                self.add(choice, "content", message.content)
            for index, call in enumerate(message.tool_calls):
                head = ToolCallHead(index, call.id, call.function.name)
                self.add(choice, "tool_calls", call.function.arguments, head)

    @property
    def text(self) -> str:
        """The content of the first text."""
        first = self.said.get(FIRST_CONTENT)
        return first.text if first else ""

    @property
    def messages(self) -> tuple[AnswerMessage, ...]:
        """What each text says, in order; empty where none says anything yet."""
        messages: list[AnswerMessage] = []
        for choice in range(1 + max((place.choice for place in self.said), default=-1)):
            reasoning = self.said.get(AnswerPlace(choice, "reasoning"))
            content = self.said.get(AnswerPlace(choice, "content"))
            calls = [
                ToolCall(id=said.id or "", function=ToolCallFunction(name=said.name or "", arguments=said.text))
                for place, said in self.in_order()
                if place.choice == choice and place.part == "tool_calls"
            ]
            messages.append(
                AnswerMessage(
                    content=content.text if content else None,
                    reasoning=reasoning.text if reasoning else None,
                    tool_calls=tuple(calls),
                )
            )
        return tuple(messages)

    def in_order(self) -> list[tuple[AnswerPlace, SaidSoFar]]:
        """By text, and within it reasoning, content, calls."""
        return sorted(
            self.said.items(), key=lambda placed: (placed[0].choice, _PARTS.index(placed[0].part), placed[0].call)
        )

    def add(self, choice: int, part: Part, text: str, head: ToolCallHead | None = None) -> None:
        """Another piece. A call that goes on keeps its id and its name."""
        if not (text or head):
            return  # of a chunk that has logprobs alone
        place = AnswerPlace(choice, part, head.index if head else 0)
        before = self.said.get(place)
        if before is not None:
            self.said[place] = SaidSoFar(before.text + text, before.id, before.name)
        else:
            self.said[place] = SaidSoFar(text, head.id, head.name) if head else SaidSoFar(text)


class StreamReader:
    """One job's stream. Give it every chunk of the job; `answer` is what is certain so far, `text` the first text's.

    A chunk of a lower attempt, or one that was taken before, changes nothing. A higher attempt decodes the job from its
    start, so the answer begins again with it. A chunk whose predecessors are missing waits for them. `end` is the final
    chunk, once every chunk before it is here, or at once if it has the whole answer or the job has none.
    """

    def __init__(self) -> None:
        self.attempt = 0  #: the highest seen; 0 before the first chunk
        self.answer = AnswerSoFar()  #: of that attempt, up to the first gap
        self.news: tuple[Chunk, ...] = ()  #: the chunks that the last `take` made certain
        self.end: Chunk | None = None
        self._next_seq = 0
        self._waiting: dict[int, Chunk] = {}

    @property
    def text(self) -> str:
        """The content of the first text, as far as it is certain."""
        return self.answer.text

    def take(self, chunk: Chunk) -> str:
        """What this chunk makes certain of the first text's content: of a new attempt from its start, often empty.

        `news` also has reasoning, calls of tools and other texts.
        """
        self.news = ()
        if chunk.attempt < self.attempt or self.end is not None:
            return ""
        if chunk.attempt > self.attempt:
            self.attempt, self.answer, self._next_seq = chunk.attempt, AnswerSoFar(), 0
            self._waiting.clear()
        if chunk.ends_alone:
            return self._end_alone(chunk)
        if chunk.seq >= self._next_seq:
            self._waiting.setdefault(chunk.seq, chunk)
        certain = list[Chunk]()
        while (following := self._waiting.pop(self._next_seq, None)) is not None:
            self._next_seq += 1
            certain.append(following)
            if following.is_final:
                self.end = following
            else:
                self.answer.add(following.choice, following.part, following.text, following.tool_call)
        self.news = tuple(certain)
        return "".join(piece.text for piece in certain if (piece.choice, piece.part) == (0, "content"))

    def _end_alone(self, chunk: Chunk) -> str:
        self.end, before = chunk, self.text
        self._waiting.clear()
        if chunk.whole_choices:
            self.answer = AnswerSoFar([choice.said for choice in chunk.whole_choices])
        elif chunk.whole_text is not None:
            self.answer = AnswerSoFar([AnswerMessage(content=chunk.whole_text)])
        return self.text[len(before) :]


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
