"""The `body` of a job, in OpenAI's form (chat completions with `messages`, completions with `prompt`).

A field that this engine cannot honour exactly is refused, never ignored: a job that asked for `n: 4` and got one text
would be a wrong result. Fields nobody here has heard of are allowed, as OpenAI's clients send many.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from alphaloop.messages.text import PlainText

Temperature = Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]

# The neutral value of each field that would change the output and is not honoured yet.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: PlainText


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
    top_k: int | None = Field(None, ge=0, description="Sample from the k likeliest tokens; 0 is all.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Same seed, same job: same text.")
    stop: tuple[Annotated[PlainText, Field(min_length=1, max_length=256)], ...] = Field(
        (), max_length=4, description="Generation ends before the first of these.", strict=False
    )
    stream: bool = Field(False, description="Also emit tokens on the `tokens` topic while decoding.")

    @model_validator(mode="before")
    @classmethod
    def _accept_openai_spellings(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, neutral in UNSUPPORTED.items():
            if name in value and value[name] not in neutral:
                raise ValueError(f"{name} is not supported; leave it out")
        if (newer := value.get("max_completion_tokens")) is not None:
            if value.get("max_tokens") not in (None, newer):
                raise ValueError("expected max_tokens or max_completion_tokens, found both with different values")
            value = {**value, "max_tokens": newer}
        if isinstance(value.get("stop"), str):
            value = {**value, "stop": (value["stop"],)}
        if value.get("stop", ()) is None or value.get("stream", False) is None:
            value = {k: v for k, v in value.items() if not (k in ("stop", "stream") and v is None)}
        return value

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.messages is None) == (self.prompt is None):
            found = "neither" if self.messages is None else "both"
            raise ValueError(f"expected either messages or prompt, found {found}")
        if self.messages is not None and not any(message.content.strip() for message in self.messages):
            raise ValueError("expected at least one message with text, found only empty ones")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("expected a prompt with text, found only white space")
        return self
