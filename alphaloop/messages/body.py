"""The body of a job: what to generate and how to sample it, in the words of OpenAI's requests and of vLLM's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from alphaloop.messages.answer_form import (
    GUIDED,
    RESPONSE_FORMAT_SCHEMA,
    STRUCTURED_OUTPUTS_SCHEMA,
    TOOL_CHOICE_SCHEMA,
    TOOLS_SCHEMA,
    Constraint,
    chosen_tools,
    constraint_of,
    read_response_format,
    read_structured_outputs,
    read_tool_choice,
    read_tools,
)
from alphaloop.messages.conversation import ChatMessage, Prediction
from alphaloop.messages.fields import PlainText, as_json, shown, without_nulls, wrong_within

#: The context of a validation in which the prompt lies elsewhere, so that the body has none.
PROMPT_ELSEWHERE: Final = {"prompt": "elsewhere"}
MAX_BIASED_TOKENS: Final = 1024
MAX_STOP_TOKENS: Final = 64
MAX_ALLOWED_TOKENS: Final = 16_384
MAX_BAD_WORDS: Final = 256
MAX_TEXTS: Final = 16  #: `n`
MAX_LOGPROBS: Final = 20  #: at each place, as OpenAI and vLLM have it
MAX_TEMPLATE_BYTES: Final = 1 << 14  #: of chat_template_kwargs, as JSON
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_ARGUMENT: Final = re.compile(r"[a-z_][A-Za-z0-9_]{0,63}")
#: What the chat template gets from fields of the body, or what would change how it is applied.
# fmt: off
_TEMPLATES_OWN: Final = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})
# fmt: on


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def only_prompt(prompts: Sequence[Any]) -> Any:
    """The prompt of an array of one, as OpenAI's clients of completions send it. Raises `wrong_within` for another."""
    if len(prompts) != 1:
        raise wrong_within("prompt", f"expected one prompt, found an array of {len(prompts)}: send a job for each")
    return prompts[0]


def _token_ids_as_keys(value: object) -> object:
    # Checked before pydantic reads the items, because its error would repeat a wrong key, which may be prompt text.
    if isinstance(value, dict) and not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) for key in value):
        raise ValueError("expected token ids as keys, decimal numbers such as '50256', found another key")
    # In one order, because the digest of a job is taken over its fields as they stand.
    return dict(sorted(without_nulls(value).items())) if isinstance(value, dict) else value


def _arguments(value: object) -> dict[str, Any] | None:
    """Arguments of the chat template, None without any."""
    if not isinstance(value, dict):
        raise ValueError("expected an object, the names and values of the chat template's arguments")
    value = without_nulls(value)
    if not all(isinstance(name, str) and _ARGUMENT.fullmatch(name) for name in value):
        raise ValueError("expected names of the chat template's arguments, such as enable_thinking, found another key")
    if taken := sorted(_TEMPLATES_OWN & value.keys()):
        raise wrong_within(taken[0], "expected an argument of the template's own, found one that the body gives it")
    as_json(value, max_bytes=MAX_TEMPLATE_BYTES)
    return value or None


def _whether_or_how_many(value: object) -> bool | int:
    """logprobs: of a conversation whether, of a prompt how many; which one it is shows with the whole body."""
    if not isinstance(value, bool | int) or not 0 <= value <= MAX_LOGPROBS:
        raise ValueError(f"expected true or false, or of a prompt 0 to {MAX_LOGPROBS}, found {_number(value)}")
    return value


def _number(value: object) -> str:
    """A number as an error may repeat it, or what else was found."""
    return repr(value)[:40] if isinstance(value, int | float) else shown(value)


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
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None,),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "verbosity": (None, "medium"),
    "guided_whitespace_pattern": (None,),
    "thinking_token_budget": (None, -1),
    "include_reasoning": (None, True),
    "spaces_between_special_tokens": (None, True),
    "truncation_side": (None, "left"),
    "chat_template": (None,),
    "typical_p": (None, 1, 1.0),
    "length_penalty": (None, 1, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "use_beam_search": (None, False),
    "num_beams": (None, 1),
}
#: Values of fields that say nothing, so that a job with them is the same job without them.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "tools": ([],),
    "bad_words": ([],),
    "structured_outputs": ({},),
}
#: Fields of a conversation, which a prompt that is continued as it stands has not.
_OF_CONVERSATIONS: Final = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "top_logprobs",
    "reasoning_effort",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
)
#: Fields that have to agree with others.
_JOINT: Final = frozenset(
    {
        *_OF_CONVERSATIONS,
        "response_format",
        "structured_outputs",
        "logprobs",
        "min_tokens",
        "truncate_prompt_tokens",
    }
)
#: Fields that most jobs lack; those that have none of them are not looked at more closely.
_UNUSUAL: Final = frozenset({*_NEUTRAL, *GUIDED, *_OF_CONVERSATIONS, "logprobs"})


class Body(BaseModel):
    """What to generate and how to sample it; unset fields take the task's defaults from configs/tasks.toml."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    model: str | None = Field(None, max_length=200, description="Name of the target, or of an adapter, that is served.")
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
    prediction: Prediction | None = Field(
        None, description="What the text will probably repeat: look-up proposes it. The text is the same without."
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
    n: int = Field(1, ge=1, le=MAX_TEXTS, description="Texts of the job; text i has the seed `seed + i`.")
    tools: Annotated[tuple[dict[str, Any], ...], BeforeValidator(read_tools), WithJsonSchema(TOOLS_SCHEMA)] | None = (
        None
    )
    tool_choice: (
        Annotated[str | dict[str, Any], BeforeValidator(read_tool_choice), WithJsonSchema(TOOL_CHOICE_SCHEMA)] | None
    ) = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most.")
    response_format: (
        Annotated[dict[str, Any] | None, BeforeValidator(read_response_format), WithJsonSchema(RESPONSE_FORMAT_SCHEMA)]
        | None
    ) = None
    structured_outputs: (
        Annotated[
            dict[str, Any] | None, BeforeValidator(read_structured_outputs), WithJsonSchema(STRUCTURED_OUTPUTS_SCHEMA)
        ]
        | None
    ) = None
    logprobs: (
        Annotated[
            bool | int,
            BeforeValidator(_whether_or_how_many),
            WithJsonSchema(
                {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}]}
            ),
        ]
        | None
    ) = Field(
        None,
        description="Report each token's log-probability; for a prompt: the number of likeliest tokens beside it.",
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="For a conversation: how many of the likeliest tokens are reported."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    min_tokens: int = Field(
        0, ge=0, le=1_000_000, description="Nothing ends the text before it has this number of tokens."
    )
    ignore_eos: bool = Field(False, description="The model's end tokens are text.")
    bad_words: tuple[Annotated[PlainText, Field(min_length=1, max_length=256)], ...] = Field(
        (), max_length=MAX_BAD_WORDS, description="Never written.", strict=False
    )
    allowed_token_ids: tuple[TokenId, ...] | None = Field(
        None, min_length=1, max_length=MAX_ALLOWED_TOKENS, description="No other tokens are written.", strict=False
    )
    include_stop_str_in_output: bool = Field(False, description="The stop string is part of the text.")
    skip_special_tokens: bool = Field(True, description="Special tokens are no part of the text.")
    chat_template_kwargs: (
        Annotated[dict[str, Any] | None, BeforeValidator(_arguments), WithJsonSchema({"type": "object"})] | None
    ) = Field(None, description="Arguments of the chat template, such as enable_thinking.")
    continue_final_message: bool = Field(
        False, description="The last message, the assistant's, is gone on with; no answer begins."
    )
    add_generation_prompt: bool = Field(True, description="The chat template begins the assistant's turn.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=10_000_000, description="The prompt's last tokens that are read; -1: as many as fit."
    )

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
        if isinstance(value.get("prompt"), list):
            value = {**value, "prompt": only_prompt(value["prompt"])}
        return value if _UNUSUAL.isdisjoint(value) else _without_neutral(value)

    @model_validator(mode="after")
    def _agrees_with_itself(self, info: ValidationInfo) -> Self:
        is_elsewhere = info.context == PROMPT_ELSEWHERE
        self._check_prompt(is_elsewhere)
        if not _JOINT.isdisjoint(self.model_fields_set):
            for check in _CHECKS:
                check(self)
            if not is_elsewhere:
                _check_against_prompt(self)
        return self

    def _check_prompt(self, is_elsewhere: bool) -> None:
        if is_elsewhere:
            if self.messages is not None or self.prompt is not None:
                field = "prompt" if self.messages is None else "messages"
                raise wrong_within(field, "expected neither messages nor prompt beside body_ref")
            return
        if (self.messages is None) == (self.prompt is None):
            which = "neither" if self.messages is None else "both"
            raise wrong_within("prompt", f"expected either messages or prompt, found {which}")
        if self.prompt is not None:
            if _is_blank(self.prompt):
                raise wrong_within("prompt", "expected a prompt with text, found only white space")
        elif all(_is_blank(said.text) and not said.num_images and not said.tool_calls for said in self.messages or ()):
            raise wrong_within("messages", "expected at least one message with text, found only empty ones")

    @property
    def callable_tools(self) -> Sequence[dict[str, Any]]:
        """The tools that the model may call, as they were sent."""
        return chosen_tools(self.tools, self.tool_choice)[0]

    @property
    def must_call(self) -> bool:
        """Whether the answer has to call one of `callable_tools`."""
        return chosen_tools(self.tools, self.tool_choice)[1]

    @property
    def constraint(self) -> Constraint | None:
        """What the text has to match; of a call that has to be made, one of the kind `tools`."""
        if self.response_format is None and self.structured_outputs is None and self.tools is None:
            return None
        must_call = self.callable_tools if self.must_call else ()
        is_parallel = self.parallel_tool_calls is not False
        return constraint_of(self.response_format, self.structured_outputs, must_call, is_parallel=is_parallel)

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report at each place; 0: the chosen one's probability alone; None: nothing."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return (self.top_logprobs or 0) if self.logprobs is True else self.logprobs

    @property
    def num_images(self) -> int:
        """Images of all messages."""
        parts = [said for said in self.messages or () if isinstance(said.content, tuple)]
        return sum(said.num_images for said in parts) if parts else 0


def _without_neutral(value: dict[str, Any]) -> dict[str, Any]:
    """The body without what says nothing, and with vLLM's older names of constraints as its newer one."""
    kept = {name: item for name, item in value.items() if item not in _NEUTRAL.get(name, ())}
    for name in sorted(GUIDED.keys() & kept.keys()):
        if "structured_outputs" in kept:
            raise wrong_within(name, "expected one constraint, found another beside it")
        kept["structured_outputs"] = _guided(name, kept.pop(name))
    if "tools" not in kept:  # what OpenAI's clients send beside tools says nothing without any
        if kept.get("tool_choice") in ("none", "auto"):
            del kept["tool_choice"]
        if isinstance(kept.get("parallel_tool_calls"), bool):
            del kept["parallel_tool_calls"]
    _drop_no_logprobs(kept)
    if kept.get("continue_final_message") is True:
        if kept.get("add_generation_prompt") is True:
            message = "expected continue_final_message or add_generation_prompt, found both"
            raise wrong_within("continue_final_message", message)
        kept["add_generation_prompt"] = False
    return kept


def _guided(name: str, value: object) -> dict[str, Any] | None:
    try:
        return read_structured_outputs({GUIDED[name]: value})
    except PydanticCustomError as error:
        within = error.context or {}
        _, _, inner = within["field"].partition(".")
        raise wrong_within(f"{name}.{inner}".rstrip("."), within["message"]) from None


def _drop_no_logprobs(body: dict[str, Any]) -> None:
    given = body.get("logprobs")
    if given is False or (given == 0 and "messages" in body):
        del body["logprobs"]
    if not given and body.get("top_logprobs") == 0:
        del body["top_logprobs"]


def _check_constraint(body: Body) -> None:
    """One constraint at most, which what else the body asks for leaves something of."""
    is_told = body.response_format is not None or body.structured_outputs is not None
    if body.response_format is not None and body.structured_outputs is not None:
        raise wrong_within("structured_outputs", "expected one constraint, found response_format beside it")
    if is_told and body.must_call:
        raise wrong_within("tool_choice", "expected auto or none beside a constraint on the text, found a forced call")
    if not (is_told or body.must_call):
        return
    if body.ignore_eos:
        raise wrong_within("ignore_eos", "expected false beside a constraint, whose text could not end")
    for field, texts in (("stop", body.stop), ("bad_words", body.bad_words)):
        for number, text in enumerate(texts):
            if _is_in_all(text, body):
                message = "expected a text that not every answer has to contain, found one by the constraint"
                raise wrong_within(f"{field}.{number}", message)
    choices = (body.structured_outputs or {}).get("choice")
    if choices and body.min_tokens > (longest := max(len(choice.encode()) for choice in choices)):
        message = f"expected at most {longest}, the bytes of the longest choice, found {body.min_tokens}"
        raise wrong_within("min_tokens", message)


def _is_in_all(text: str, body: Body) -> bool:
    """Whether every text that the constraint allows contains this one, as far as that shows without a grammar."""
    structured = body.structured_outputs or {}
    if choices := structured.get("choice"):
        return all(text in choice for choice in choices)
    schema = structured.get("json") or (body.response_format or {}).get("json_schema", {}).get("schema")
    is_object = bool(structured.get("json_object")) or (body.response_format or {}).get("type") == "json_object"
    return text in ("{", "}") and (is_object or (schema is not None and schema.get("type") == "object"))


def _check_tools(body: Body) -> None:
    if body.tool_choice is not None and body.tools is None:
        raise wrong_within("tool_choice", "expected tools beside it, found none")
    chosen_tools(body.tools, body.tool_choice)


def _check_lengths(body: Body) -> None:
    if body.max_tokens is not None and body.min_tokens > body.max_tokens:
        raise wrong_within("min_tokens", f"expected at most max_tokens, {body.max_tokens}, found {body.min_tokens}")
    if body.truncate_prompt_tokens == 0:
        raise wrong_within("truncate_prompt_tokens", "expected at least 1 token, or -1, found 0")


def _check_tokens(body: Body) -> None:
    if body.min_tokens and body.allowed_token_ids and set(body.allowed_token_ids) <= set(body.stop_token_ids):
        raise wrong_within("min_tokens", "expected 0, because all of allowed_token_ids end the text")


_CHECKS: Final[tuple[Callable[[Body], None], ...]] = (_check_tools, _check_constraint, _check_lengths, _check_tokens)


def _check_against_prompt(body: Body) -> None:
    """What depends on whether a conversation is answered or a prompt continued."""
    if body.messages is None:
        for name in _OF_CONVERSATIONS:
            if getattr(body, name) != Body.model_fields[name].default:
                raise wrong_within(name, f"expected {name} beside messages, found a prompt")
        if body.logprobs is True:
            raise wrong_within("logprobs", f"expected 0 to {MAX_LOGPROBS} likeliest tokens of a prompt, found True")
        return
    if body.logprobs is not None and not isinstance(body.logprobs, bool):
        raise wrong_within("logprobs", f"expected true or false of a conversation, found {body.logprobs}")
    if body.top_logprobs is not None and body.logprobs is not True:
        raise wrong_within("top_logprobs", "expected logprobs: true beside it")
    last = body.messages[-1]
    if body.continue_final_message and (last.role != "assistant" or last.tool_calls or _is_blank(last.text)):
        message = "expected a last message of the assistant with text, which is gone on with, found another one"
        raise wrong_within("continue_final_message", message)


FIELDS: Final = frozenset(Body.model_fields) | {"max_completion_tokens"} | frozenset(UNSUPPORTED) | frozenset(GUIDED)
#: Fields of the body that may also stand beside `task`, where there is no body. Data sets have columns of other names.
SHORTHAND: Final = FIELDS - {"prediction"}
