"""A result: how a job ended, on the `results` topic and in `jobs.outcome`; or why a record became no job.

Counts are reported, not rates: α_i is `accepts[i] / trials[i]`.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from enum import StrEnum
from operator import not_
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field
from pydantic_core import to_json

from alphaloop.errors import AlphaloopError
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


class CompletionTokensDetails(_Part):
    """What the tokens of an answer were spent on."""

    reasoning_tokens: int = Field(ge=0)


class PromptTokensDetails(_Part):
    """What was read of a prompt."""

    cached_tokens: int = Field(ge=0)


class Usage(_Part):
    """Token counts under OpenAI's names. Those of an answer are of all its texts together."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: PromptTokensDetails | None = Field(
        None, description="For a reused text: no token of the prompt was read."
    )
    completion_tokens_details: CompletionTokensDetails | None = Field(
        None, description="Where the engine reports how many tokens are reasoning."
    )


FinishReason = Literal["stop", "length", "tool_calls"]


class ToolCallFunction(_Part):
    """Which function a call names, and its arguments as the model wrote them."""

    name: str
    arguments: str = Field(description="JSON, as text.")


class ToolCall(_Part):
    """One call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: ToolCallFunction


class AnswerMessage(_Part):
    """An assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(None, description="null where the turn is calls of tools alone.")
    reasoning: str | None = Field(None, description="What the model thought before it answered.")
    tool_calls: tuple[ToolCall, ...] = Field((), exclude_if=not_)


#: What OpenAI and vLLM write of a token that is impossible: JSON has no infinity.
LEAST_LOGPROB: Final = -9999.0


def _finite(logprob: float) -> float:
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB  # NaN too


class RankedToken(_Part):
    """A token that could have stood there, with its logarithm of probability."""

    token: str
    logprob: Annotated[float, AfterValidator(_finite)] = Field(description="-9999 is the least.")
    bytes: tuple[int, ...] | None = Field(None, description="Its UTF-8, where `token` may be a part of a character.")


class ChosenToken(RankedToken):
    """A token of the text, and the likeliest ones at its place."""

    top_logprobs: tuple[RankedToken, ...] = ()


class Choice(_Part):
    """One of a job's texts: `message` answers messages, `text` continues a prompt."""

    index: int = Field(ge=0)
    message: AnswerMessage | None = None
    text: str | None = None
    finish_reason: FinishReason
    logprobs: tuple[ChosenToken, ...] | None = Field(None, description="By token, if they were asked for.")

    @property
    def said(self) -> AnswerMessage:
        """What it says, also where it continues a prompt."""
        return self.message or AnswerMessage(content=self.text)

    @property
    def is_plain(self) -> bool:
        """Whether it is a text and nothing else."""
        said = self.said
        return said.content is not None and said.reasoning is None and not said.tool_calls and self.logprobs is None


def choices_to_write(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices as a result has them: none where they are one text, which `text` and `finish_reason` say."""
    return () if len(choices) == 1 and choices[0].is_plain else tuple(choices)


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
    reason: str = Field(
        description="Why. For an expected gain: expected_faster, or not_surely_faster. Where the mode that was decided "
        "did not stay: decided_otherwise."
    )
    explanation: str = Field("", description="The reason that was decided by, with its figures.")
    rounds: int | None = Field(
        None, ge=0, description="Absent, like the counts below, where the task has round_counts_in_results = false."
    )
    num_empty_rounds: int | None = Field(
        None, ge=0, description="Rounds in which nothing was proposed, the prefill among them."
    )
    positions: Literal["estimated", "reached"] | None = Field(
        None,
        exclude_if=not_,
        description="Where the server did not report them: estimated from its sums, which are those of the lists; or "
        "reached, every position that a round came to counted as tested, because the server changes k by itself. "
        "Absent: as tested.",
    )
    proposed: tuple[int, ...] = ()
    trials: tuple[int, ...] = ()
    accepts: tuple[int, ...] = ()
    num_cropped: int = Field(
        0, ge=0, description="Tokens of the last round after the end: rounds + accepted + forced - tokens."
    )
    num_forced: int = Field(
        0,
        ge=0,
        exclude_if=not_,
        description="Tokens that were the only ones allowed at their place; they are taken without a trial. Absent: 0.",
    )
    batch_size: int = Field(ge=1)


class Failure(_Part):
    """Why a job failed, in words fit for its sender; never contains prompt text."""

    code: str
    message: str
    field: str | None = None
    hint: str | None = None

    @classmethod
    def of(cls, error: AlphaloopError) -> Self:
        """Because of an error."""
        return cls(code=error.code, message=error.message, hint=error.hint)

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
    origin: RecordPlace | None = Field(None, description="For a refused record: where it lies.")
    claimed_job_id: str | None = Field(
        None,
        description="For a refused record whose job_id is another's: that id. `job_id` is then derived.",
    )
    task: str
    custom_id: str | None = None
    batch_id: str | None = None
    endpoint: Literal["/v1/completions"] | None = Field(
        None, description="For a job with body.prompt: the endpoint whose form its answer has. Without it, chat's."
    )
    redrive_of: str | None = None
    segment: str | None = None
    purpose: Purpose = Purpose.TRAFFIC
    ignored_fields: tuple[str, ...] = Field(
        (), exclude_if=not_, description="Fields of the job's message that nothing reads, at most 64."
    )
    target: str | None = Field(None, description="Name of the model whose text it is.")
    target_revision: str | None = Field(None, description="Hash of that model's weights.")
    text: str | None = Field(
        None, description="The content of the first text; left out where that is calls of tools alone."
    )
    text_ref: ContentReference | None = Field(
        None, description="Where the text lies, as UTF-8, if the result would be too large with it."
    )
    choices: tuple[Choice, ...] = Field(
        (),
        exclude_if=not_,
        description="Every text, in order, where they say more than `text` and `finish_reason`: several texts, "
        "reasoning, calls of tools, logprobs.",
    )
    choices_ref: ContentReference | None = Field(
        None,
        description="Where text and choices lie, as the JSON array of `choices`, if the result would be too large.",
    )
    finish_reason: FinishReason | None = Field(None, description="The first text's.")
    usage: Usage | None = None
    timings: Timings | None = None
    decoding: DecodingReport | None = None
    reused_from: str | None = Field(
        None,
        description="The equal job whose recorded text this is: nothing was decoded, so `decoding` is absent and no "
        "device time was spent.",
    )
    error: Failure | None = None
    attempt: int = Field(ge=1, description="The claim that ended the job; of a refused record 1.")
    num_chunks: int | None = Field(
        None, ge=0, description="For a streamed job: chunks of this attempt on `tokens` before the final one."
    )
    num_unacknowledged_chunks: int | None = Field(
        None,
        ge=1,
        description="Those of them that Kafka had not acknowledged when the outcome was recorded, if any. The final "
        "chunk then has the whole text.",
    )
    erased_at: AwareDatetime | None = Field(
        None, description="When its texts were erased (`alphaloop erase`): it has none since then."
    )
    recorded_at: AwareDatetime = Field(
        description="When the outcome was recorded; of a refused record its timestamp, or 1970 if that is no date."
    )

    @property
    def sent_job_id(self) -> str:
        """The job_id that its sender knows."""
        return self.claimed_job_id or self.job_id

    @property
    def is_elsewhere(self) -> bool:
        """Whether its texts lie where a reference says."""
        return self.text_ref is not None or self.choices_ref is not None

    @property
    def messages(self) -> tuple[AnswerMessage, ...]:
        """What each of its texts says; empty where it has none, or where they lie elsewhere."""
        return tuple(choice.said for choice in self._all_choices())

    @property
    def response(self) -> dict[str, Any] | None:
        """The answer as OpenAI's object: a `chat.completion`, or a `text_completion` for a job with body.prompt.

        None where the result has no text: `error` says why, or a reference says where the texts lie.
        """
        if not (choices := self._all_choices()):
            return None
        is_chat = self.endpoint is None
        return {
            "id": self.job_id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(self.recorded_at.timestamp()),
            "model": self.target or "",
            "choices": [_chat_choice(choice) if is_chat else _completion_choice(choice) for choice in choices],
            "usage": self.usage.model_dump(exclude_none=True) if self.usage else None,
        }

    def without_texts(self) -> Self:
        """The same result, but of its texts neither the words nor where they lie."""
        return self.model_copy(update={"text": None, "choices": (), "text_ref": None, "choices_ref": None})

    def _all_choices(self) -> tuple[Choice, ...]:
        if self.status is not Status.SUCCEEDED or (self.text is None and not self.choices):
            return ()
        only: dict[str, Any] = {"index": 0, "text": self.text, "finish_reason": self.finish_reason}
        return self.choices or (Choice.model_construct(**only),)  # a finish_reason may be missing

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


def chat_logprobs(tokens: Sequence[ChosenToken]) -> dict[str, Any]:
    """As OpenAI's chats and their chunks have them."""
    return {"content": [token.model_dump(mode="json") for token in tokens], "refusal": None}


def _chat_choice(choice: Choice) -> dict[str, Any]:
    said, tokens = choice.said, choice.logprobs
    logprobs = None if tokens is None else chat_logprobs(tokens)
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = [call.model_dump() for call in said.tool_calls]
    return {"index": choice.index, "logprobs": logprobs, "finish_reason": choice.finish_reason, "message": message}


def _completion_choice(choice: Choice) -> dict[str, Any]:
    logprobs = None if choice.logprobs is None else _completion_logprobs(choice.logprobs)
    text = choice.said.content or ""
    return {"index": choice.index, "logprobs": logprobs, "finish_reason": choice.finish_reason, "text": text}


def _completion_logprobs(tokens: Sequence[ChosenToken]) -> dict[str, Any]:
    """Lists by token. `text_offset` is in characters of the text: one that is not complete has not begun.

    The likeliest tokens of a place are an object by their text; of two with one text the likelier counts. The chosen
    one is among them.
    """
    decoder, num_characters = codecs.getincrementaldecoder("utf-8")("replace"), 0
    offsets, ranked = list[int](), list[dict[str, float]]()
    for token in tokens:
        offsets.append(num_characters)
        num_characters += len(token.token if token.bytes is None else decoder.decode(bytes(token.bytes)))
        by_logprob = sorted((token, *token.top_logprobs), key=lambda candidate: candidate.logprob)
        ranked.append({candidate.token: candidate.logprob for candidate in by_logprob})
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": ranked,
        "text_offset": offsets,
    }
