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
from typing import Annotated, Any, Final, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from alphaloop.errors import InvalidField
from alphaloop.messages.body import FIELDS, SHORTHAND, Body, only_prompt
from alphaloop.messages.fields import without_nulls, wrong_within


def _iso8601(value: object) -> object:
    # Pydantic would also accept seconds since 1970, such as "60".
    if isinstance(value, datetime) or (isinstance(value, str) and "-" in value[1:]):
        return value
    raise ValueError("expected a date and time in ISO 8601 with its offset, such as 2026-01-31T09:00:00Z")


#: An identifier from outside: printable ASCII without spaces, so that it is safe in keys, labels and SQL.
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[!-~]+$")]

MAX_PRIORITY: Final = 100  #: of a job; the least is as far below 0

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
    segment: Label | None = Field(
        None, description="Customer tier or product: has its own share of the device, and may split a task's history."
    )
    priority: int = Field(
        0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Jobs of a task with a higher priority start first; waiting raises it.",
    )
    deadline: Instant | None = Field(
        None, description="ISO 8601 with offset; a job that has not ended by then ends as expired, without a text."
    )
    decoding: Decoding = Field(Decoding.AUTO, strict=False)
    reuse: bool | None = Field(
        None,
        description="Whether a greedy job may have the recorded text of an equal one, and give its own; the task's, if "
        "left out.",
    )
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

    ignored_fields: tuple[Label, ...] = Field(
        (), max_length=64, strict=False, description="Fields of its message that nothing reads; set by who reads it."
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
        if isinstance(loose.get("prompt"), list):
            loose["prompt"] = only_prompt(loose["prompt"])
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
    "guided_decoding_backend",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
)

_OF_A_JOB: Final = SHORTHAND | frozenset(Job.model_fields)
#: Columns of data sets are often called like these.
_BESIDE_PROMPT: Final = SHORTHAND - {"model", "messages", "prompt", "suffix", "echo", "n"}
#: A name that may be repeated: another one may be prompt text.
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
#: The ratio of difflib: `tempreature` and `temperature` have .91, `task_id` and `task` .73.
_ALIKE: Final = 0.8
#: Columns beside a prompt that are compared: each new name takes 90 µs, and a message may have thousands.
_MOST_COMPARED: Final = 64


def refuse_unknown(fields: Mapping[str, Any], ignored: Collection[str]) -> list[str]:
    """Refuse a field of the body that does not exist, unless it is null or `ignored` names it.

    Beside a prompt, where data sets have columns of their own, only a name is refused that is almost one of the body's.
    Returns the paths of those that are let pass, sorted. Raises InvalidField.
    """
    dropped, body = list[str](), fields.get("body")
    for name in _unknown(body, FIELDS) if isinstance(body, dict) else ():
        if name not in ignored:
            raise _refusal(name, _nearest(name, FIELDS), within="body.")
        dropped.append(f"body.{name}")
    for name in islice(_unknown(fields, _OF_A_JOB), _MOST_COMPARED):
        if name not in ignored and (nearest := _nearest(name, _BESIDE_PROMPT)) is not None:
            raise _refusal(name, nearest, within="")
        dropped += [name] * (_NAME.fullmatch(name) is not None)
    return sorted(dropped)[:_MOST_COMPARED]


def _unknown(fields: Mapping[str, Any], known: frozenset[str]) -> Collection[str]:
    if fields.keys() <= known:
        return ()
    return [name for name, value in fields.items() if name not in known and value is not None]


@lru_cache(maxsize=4096)  # jobs of a producer have the same names
def _nearest(name: str, known: frozenset[str]) -> str | None:
    matches = get_close_matches(name.lower(), known, n=1, cutoff=_ALIKE)
    return matches[0] if matches else None


def _refusal(name: str, nearest: str | None, *, within: str) -> InvalidField:
    is_shown = _NAME.fullmatch(name) is not None
    shown = repr(name) if is_shown else "a name of other characters"
    return InvalidField(
        f"expected {nearest}, found {shown}, which is no field of a job"
        if nearest
        else f"expected a field of a job, found {shown}",
        field=f"{within}{name}" if is_shown else within.rstrip(".") or None,
        hint="correct it, leave it out, or name it in worker.ignored_body_fields",
    )
