"""The `body` of a job, in OpenAI's form (chat completions with `messages`, completions with `prompt`).

A field that this engine cannot honour exactly is refused, never ignored: one text for a job with `n: 4` would be a
wrong result. A field that does not exist is refused too, by alphaloop.messages.unknown_fields.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from alphaloop.messages.text import PlainText, without_nulls, wrong_within

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
            return self
        for message in self.messages or ():
            if not _is_blank(message.content):
                return self
        raise wrong_within("messages", "expected at least one message with text, found only empty ones")
