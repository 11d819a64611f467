"""A job: one text to generate, as it arrives on `jobs.<task>`.

The smallest job is `{"task": "code", "prompt": "…"}`. Top-level `prompt` is the hand-typed shorthand for one user
message, so a chat model answers it; `body.prompt` is OpenAI's raw completion. Other fields of the body may also stand
at the top level (`max_tokens`, `temperature` …) as long as there is no `body`.

A prompt that is too large for a message lies elsewhere, and `body_ref` refers to it: a JSON object with either
`messages` or `prompt`, which the body lacks then.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from alphaloop.messages.body import UNSUPPORTED, Body
from alphaloop.messages.reference import ContentReference
from alphaloop.messages.text import Identifier, Instant, Label, TaskName, without_nulls, wrong_within

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
        None, description="The failed job that this one tries again; set by `alphaloop dlq redrive`, echoed."
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
