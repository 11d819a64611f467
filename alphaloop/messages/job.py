"""A job: one text to generate, as it arrives on `jobs.<task>`.

The smallest job is `{"task": "code", "prompt": "…"}`. Top-level `prompt` is the hand-typed shorthand for one user
message, so a chat model answers it; `body.prompt` is OpenAI's raw completion. Other fields of the body may also stand
at the top level (`max_tokens`, `temperature` …) as long as there is no `body`.

A prompt that is too large for a message lies elsewhere, and `body_ref` refers to it: a JSON object with either
`messages` or `prompt`, which the body lacks then. A field that no job has is refused, because a misspelt one would be
decoded with another setting than its sender asked for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from alphaloop.errors import InvalidField

#: The type of `wrong_within`.
WRONG_WITHIN: Final = "wrong_within"


def _encodable(value: str) -> str:
    # JSON's \ud800 escapes decode to lone surrogates, which UTF-8 cannot encode.
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"expected text that UTF-8 can encode, found a lone surrogate at {error.start}") from None
    return value


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """An object's fields but those that are null, as these are left out."""
    if None not in fields.values():
        return fields
    return {name: value for name, value in fields.items() if value is not None}


def wrong_within(field: str, message: str) -> PydanticCustomError:
    """The error of a validator of an object or array about one of its fields; `field` is the path from there."""
    return PydanticCustomError(WRONG_WITHIN, "{message}", {"field": field, "message": message})


def _iso8601(value: object) -> object:
    # Pydantic would also accept seconds since 1970, such as "60".
    if isinstance(value, datetime) or (isinstance(value, str) and "-" in value[1:]):
        return value
    raise ValueError("expected a date and time in ISO 8601 with its offset, such as 2026-01-31T09:00:00Z")


PlainText = Annotated[str, AfterValidator(_encodable)]

#: An identifier from outside: printable ASCII without spaces, so that it is safe in keys, labels and SQL.
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[!-~]+$")]

#: A task: becomes part of topic names, so Kafka's alphabet without the dot that separates a topic's parts.
TaskName = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[a-z0-9][a-z0-9_-]*$")]

#: A caller's free label (customer tier, product).
Label = Annotated[str, StringConstraints(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")]

#: A point in time with its offset from UTC.
Instant = Annotated[AwareDatetime, Field(strict=False), BeforeValidator(_iso8601)]


Address = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[!-~]+$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class ContentReference(BaseModel):
    """Content of a job or a result outside Kafka. Readers refuse content of another length or digest."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    url: Address = Field(description="Where the content lies, below an address that the worker is allowed to read.")
    sha256: Sha256 = Field(description="SHA-256 of the content, in lower-case hexadecimal digits.")
    num_bytes: int = Field(ge=1, description="Length of the content.")

    @classmethod
    def to(cls, url: str, content: bytes) -> Self:
        """The reference to this content at `url`."""
        return cls(url=url, sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content))

    def fits(self, content: bytes) -> bool:
        """Whether this is the content that was referred to."""
        return len(content) == self.num_bytes and hashlib.sha256(content).hexdigest() == self.sha256


#: The context of a validation in which the prompt lies elsewhere, so that the body has none.
PROMPT_ELSEWHERE: Final = {"prompt": "elsewhere"}
MAX_BIASED_TOKENS: Final = 1024
MAX_STOP_TOKENS: Final = 64
#: A kind of content that may be repeated: another one may be prompt text.
_KIND: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,8}")


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def _token_ids_as_keys(value: object) -> object:
    # Checked before pydantic reads the items, because its error would repeat a wrong key, which may be prompt text.
    if isinstance(value, dict) and not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) for key in value):
        raise ValueError("expected token ids as keys, decimal numbers such as '50256', found another key")
    # In one order, because the digest of a job is taken over its fields as they stand.
    return dict(sorted(without_nulls(value).items())) if isinstance(value, dict) else value


def _joined_parts(value: object) -> object:
    """Content as a list of parts, as OpenAI's clients send it, becomes one text, with nothing between the parts."""
    if not isinstance(value, list):
        return value
    if not value:
        raise ValueError("expected text, or parts of it, found an array without a part")
    return "".join(_text_of(number, part) for number, part in enumerate(value))


def _text_of(number: int, part: object) -> str:
    if not isinstance(part, dict):
        raise wrong_within(str(number), 'expected {"type": "text", "text": "…"}, found another value')
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        is_shown = isinstance(kind, str) and _KIND.fullmatch(kind) is not None
        found = repr(kind) if is_shown else "another value"
        raise wrong_within(f"{number}.type", f"expected 'text', the only kind of content that is read, found {found}")
    if not isinstance(text, str):
        raise wrong_within(
            f"{number}.text", "expected a text, found " + ("nothing" if text is None else "another value")
        )
    return text


Temperature = Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
MinP = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
#: vLLM takes any positive factor; beyond a hundredfold it only overflows.
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=10**9)]

# The neutral values of each field (OpenAI, vLLM, transformers) that would change the output and is not honoured.
UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None, {}),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "typical_p": (None, 1, 1.0),
    "length_penalty": (None, 1, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "use_beam_search": (None, False),
    "num_beams": (None, 1),
}


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[PlainText, BeforeValidator(_joined_parts)]


class Body(BaseModel):
    """What to generate and how to sample it; unset fields take the task's defaults from configs/tasks.toml."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    model: str | None = Field(None, max_length=200, description="Name of the target; must be the one served, if given.")
    messages: tuple[ChatMessage, ...] | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description="A conversation; the target's chat template is applied.",
        strict=False,
    )
    prompt: PlainText | None = Field(None, min_length=1, description="Raw text to continue; no template is applied.")
    max_tokens: int | None = Field(
        None, ge=1, le=1_000_000, description="Upper bound on generated tokens; max_completion_tokens is read too."
    )
    temperature: Temperature | None = Field(None, description="0 is greedy.")
    top_p: TopP | None = Field(None, description="Nucleus: smallest set of tokens with at least this probability.")
    top_k: int | None = Field(None, ge=-1, description="Sample from the k likeliest tokens; 0 or -1 is all.")
    min_p: MinP | None = Field(
        None, description="Sample from tokens with at least this share of the likeliest one's probability."
    )
    repetition_penalty: RepetitionPenalty | None = Field(
        None, description="Scores of tokens in prompt or output are divided by it, negative ones multiplied; 1 is none."
    )
    frequency_penalty: Penalty | None = Field(
        None, description="Subtracted from a token's score for each time it stands in the output."
    )
    presence_penalty: Penalty | None = Field(None, description="Subtracted once from scores of tokens in the output.")
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_token_ids_as_keys)] | None = Field(
        None, max_length=MAX_BIASED_TOKENS, description="Token id to what is added to its score."
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="Same seed, same job: same text, however it is decoded."
    )
    stop: tuple[Annotated[PlainText, Field(min_length=1, max_length=256)], ...] = Field(
        (), max_length=4, description="Generation ends before the first of these.", strict=False
    )
    stop_token_ids: tuple[TokenId, ...] = Field(
        (), max_length=MAX_STOP_TOKENS, description="Tokens that end the text as its end token does.", strict=False
    )
    stream: bool = Field(False, description="Also emit tokens on the `tokens` topic while decoding.")

    @model_validator(mode="before")
    @classmethod
    def _accept_openai_spellings(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = without_nulls(value)
        if not UNSUPPORTED.keys().isdisjoint(value):
            for name in sorted(UNSUPPORTED.keys() & value.keys()):
                if value[name] not in UNSUPPORTED[name]:
                    raise wrong_within(name, f"{name} is not supported; leave it out")
        if (newer := value.get("max_completion_tokens")) is not None:
            if value.get("max_tokens") not in (None, newer):
                message = "expected max_tokens or max_completion_tokens, found both with different values"
                raise wrong_within("max_completion_tokens", message)
            value = {**value, "max_tokens": newer}
        if isinstance(value.get("stop"), str):
            value = {**value, "stop": (value["stop"],)}
        return value

    @model_validator(mode="after")
    def _one_prompt(self, info: ValidationInfo) -> Self:
        if info.context == PROMPT_ELSEWHERE:
            if self.messages is not None or self.prompt is not None:
                found = "prompt" if self.messages is None else "messages"
                raise wrong_within(found, "expected neither messages nor prompt beside body_ref")
            return self
        if (self.messages is None) == (self.prompt is None):
            found = "neither" if self.messages is None else "both"
            raise wrong_within("prompt", f"expected either messages or prompt, found {found}")
        if self.prompt is not None:
            if _is_blank(self.prompt):
                raise wrong_within("prompt", "expected a prompt with text, found only white space")
        elif all(_is_blank(message.content) for message in self.messages or ()):
            raise wrong_within("messages", "expected at least one message with text, found only empty ones")
        return self


#: Fields of the body that may also stand beside `task`, where there is no body.
SHORTHAND: Final = frozenset(Body.model_fields) | {"max_completion_tokens"} | frozenset(UNSUPPORTED)


class Decoding(StrEnum):
    """How the caller wants the job decoded."""

    AUTO = "auto"  #: decided from history
    VANILLA = "vanilla"  #: never speculate
    SPECULATIVE = "speculative"  #: always speculate, with the best drafter known


class Purpose(StrEnum):
    """Why the job exists."""

    TRAFFIC = "traffic"  #: a user wants the text
    PROBE = "probe"  #: measures α again on a fixed probe set
    CONTROL = "control"  #: a probe's prompt, decoded vanilla


class Job(BaseModel):
    """One text to generate. Wrong fields are refused with their path."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    job_id: Identifier = Field(
        description="The producer's, or derived from cluster, topic, partition, offset, timestamp and value."
    )
    task: TaskName = Field(description="Kind of prompt; the topic's, if left out.")
    body: Body
    body_ref: ContentReference | None = Field(
        None, description="Where the prompt lies that the body lacks: a JSON object with either messages or prompt."
    )
    custom_id: Label | None = Field(None, description="The caller's own name for the job, echoed in the result.")
    batch_id: Label | None = Field(None, description="The caller's group of jobs, echoed in the result.")
    redrive_of: Identifier | None = Field(
        None, description="The failed or refused one that this job tries again; set by `alphaloop dlq redrive`, echoed."
    )
    segment: Label | None = Field(None, description="Label that may split a task's history (customer tier, product).")
    priority: int = Field(
        0, ge=-100, le=100, description="Jobs of a task with a higher priority start first; waiting raises it."
    )
    deadline: Instant | None = Field(
        None, description="ISO 8601 with offset; a job that has not ended by then ends as expired, without a text."
    )
    decoding: Decoding = Field(Decoding.AUTO, strict=False)
    purpose: Purpose = Field(Purpose.TRAFFIC, strict=False)
    probe_drafter: Label | None = Field(None, description="The drafter a probe measures (purpose=probe only).")
    probe_num_draft_tokens: int | None = Field(
        None, ge=1, le=64, description="The k a probe uses, or scored_drafters are scored at."
    )
    scored_drafters: tuple[Label, ...] = Field(
        (),
        max_length=64,
        strict=False,
        description="Drafters whose counts a control's text gives without decoding with them (purpose=control only).",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = without_nulls(value)
        loose: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, item in value.items():
            (loose if name in SHORTHAND else others)[name] = item
        if not loose:
            return {"body": {}, **value} if "body_ref" in value else value
        if "body" in value:
            raise wrong_within(min(loose), f"{min(loose)} stands beside body; expected it inside body")
        if isinstance(loose.get("prompt"), str) and "messages" not in loose:
            loose["messages"] = [{"role": "user", "content": loose.pop("prompt")}]
        return others | {"body": loose}

    @property
    def is_elsewhere(self) -> bool:
        """Whether the prompt was not read yet from where `body_ref` says it lies."""
        return self.body_ref is not None and self.body.messages is None and self.body.prompt is None

    def is_expired(self, now: datetime) -> bool:
        """Whether the deadline has passed at `now` (aware)."""
        return self.deadline is not None and now >= self.deadline


#: Fields of OpenAI's requests, and of clients of vLLM, that change nothing in the text of a job.
HARMLESS: Final = (
    "function_call",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "tool_choice",
    "user",
)

_OF_A_JOB: Final = SHORTHAND | frozenset(Job.model_fields)
#: Columns of data sets are often called like these.
_BESIDE_PROMPT: Final = SHORTHAND - {"model", "messages", "prompt", "suffix", "echo", "n"}
#: A name that may be repeated: another one may be prompt text.
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
#: Of difflib: `tempreature` and `temperature` have .91, `task_id` and `task` .73.
_ALIKE: Final = 0.8
#: Columns beside a prompt that are compared: each new name takes 90 µs, and a message may have thousands.
_MOST_COMPARED: Final = 64


def refuse_unknown(fields: Mapping[str, Any], ignored: Collection[str]) -> None:
    """Refuse a field of the body that does not exist, unless it is null or `ignored` names it.

    Beside a prompt, where data sets have columns of their own, only a name is refused that is almost one of the body's.
    Raises InvalidField.
    """
    body = fields.get("body")
    if isinstance(body, dict):
        for name in _unknown(body, ignored):
            raise _refusal(name, _nearest(name, SHORTHAND), within="body.")
    if fields.keys() <= _OF_A_JOB:
        return
    for name in islice(_unknown(fields, ignored), _MOST_COMPARED):
        if (nearest := _nearest(name, _BESIDE_PROMPT)) is not None:
            raise _refusal(name, nearest, within="")


def _unknown(fields: Mapping[str, Any], ignored: Collection[str]) -> Collection[str]:
    if fields.keys() <= SHORTHAND:
        return ()
    return [
        name for name, value in fields.items() if name not in SHORTHAND and name not in ignored and value is not None
    ]


@lru_cache(maxsize=4096)  # jobs of a producer have the same names
def _nearest(name: str, known: frozenset[str]) -> str | None:
    found = get_close_matches(name.lower(), known, n=1, cutoff=_ALIKE)
    return found[0] if found else None


def _refusal(name: str, nearest: str | None, *, within: str) -> InvalidField:
    is_shown = _NAME.fullmatch(name) is not None
    found = repr(name) if is_shown else "a name of other characters"
    return InvalidField(
        f"expected {nearest}, found {found}, which is no field of a job"
        if nearest
        else f"expected a field of a job, found {found}",
        field=f"{within}{name}" if is_shown else within.rstrip(".") or None,
        hint="correct it, leave it out, or name it in worker.ignored_body_fields",
    )
