"""A result: how a job ended, on the `results` topic and in `jobs.outcome`.

Counts are reported, not rates: α_i is `accepts[i] / trials[i]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from pydantic_core import to_json

from alphaloop.messages.job import Purpose
from alphaloop.messages.reference import ContentReference


class Status(StrEnum):
    """How a job ended. Every job ends in exactly one of these."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


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


class Result(_Part):
    """What became of a job."""

    object: Literal["alphaloop.result"] = "alphaloop.result"
    job_id: str
    status: Status
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
    attempt: int = Field(ge=1)
    num_chunks: int | None = Field(
        None, ge=0, description="Of a streamed job: chunks of this attempt on `tokens` before the final one."
    )
    num_unacknowledged_chunks: int | None = Field(
        None,
        ge=1,
        description="Of these, chunks that Kafka had not acknowledged when the outcome was recorded, if any. The final "
        "chunk then has the whole text.",
    )
    recorded_at: AwareDatetime

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
