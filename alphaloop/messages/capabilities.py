"""What an engine can do with a job: one table, for the worker's own engine and for each kind of inference server.

A job goes where all of its features are served; where they are not, it is refused with the field and with who could.
Nothing is left out silently: a text that was made otherwise than it was asked for would be a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

from alphaloop.errors import InvalidField
from alphaloop.messages.body import Body
from alphaloop.server_identity import ServerKind

if TYPE_CHECKING:
    from alphaloop.engine import Sampling


class Feature(StrEnum):
    """What a job asks for, by the field of the body that asks; what every engine can do is none."""

    TOP_K = "top_k"
    MIN_P = "min_p"
    REPETITION_PENALTY = "repetition_penalty"
    FREQUENCY_PENALTY = "frequency_penalty"
    PRESENCE_PENALTY = "presence_penalty"
    LOGIT_BIAS = "logit_bias"
    STOP_TOKEN_IDS = "stop_token_ids"  # noqa: S105 - tokens of text
    MIN_TOKENS = "min_tokens"
    IGNORE_EOS = "ignore_eos"
    BAD_WORDS = "bad_words"
    ALLOWED_TOKEN_IDS = "allowed_token_ids"  # noqa: S105 - tokens of text
    INCLUDE_STOP = "include_stop_str_in_output"
    SPECIAL_TOKENS = "skip_special_tokens"  #: false: they are shown
    N = "n"
    LOGPROBS = "logprobs"
    JSON_OBJECT = "response_format"
    JSON_SCHEMA = "response_format.json_schema"
    REGEX = "structured_outputs.regex"
    CHOICE = "structured_outputs.choice"
    GRAMMAR = "structured_outputs.grammar"
    PROMPT_CONSTRAINT = "a constraint on a prompt"  #: one that is continued as it stands
    TOOLS = "tools"
    TOOL_CHOICE = "tool_choice"  #: a call that has to be made
    ALLOWED_TOOLS = "tool_choice.allowed_tools"
    ONE_CALL = "parallel_tool_calls"  #: false: one call at most
    TOOLS_OR_FORMAT = "tools beside a constraint"  #: the answer is calls, or a text that the constraint allows
    TOOL_TURNS = "messages.tool_calls"  #: earlier calls, and what they gave
    REASONING_TURNS = "messages.reasoning"  #: what the assistant thought earlier
    IMAGES = "messages.content.image_url"
    REASONING_EFFORT = "reasoning_effort"
    TEMPLATE_ARGUMENTS = "chat_template_kwargs"
    CONTINUATION = "continue_final_message"
    NO_ANSWER_BEGUN = "add_generation_prompt"  #: false: the template does not begin the assistant's turn
    TRUNCATION = "truncate_prompt_tokens"


EngineKind = ServerKind | Literal["own"]
F = Feature

_ROWS: Final[Mapping[EngineKind, frozenset[Feature]]] = {
    "own": frozenset(Feature) - {F.IMAGES, F.TOOLS_OR_FORMAT},
    # Beside a constraint no call can be made at any of them but OpenAI's; their probes say what each was started with.
    "vllm": frozenset(Feature) - {F.TOOLS_OR_FORMAT},
    "sglang": frozenset(Feature)
    - {F.TOOLS_OR_FORMAT, F.BAD_WORDS, F.ALLOWED_TOKEN_IDS, F.NO_ANSWER_BEGUN, F.TRUNCATION},
    # Its penalties of frequency and presence count the prompt's tokens too, and OpenAI's form means the text's alone.
    "llama_cpp": frozenset(Feature)
    - {
        *(F.FREQUENCY_PENALTY, F.PRESENCE_PENALTY, F.STOP_TOKEN_IDS, F.MIN_TOKENS, F.BAD_WORDS, F.ALLOWED_TOKEN_IDS),
        *(F.INCLUDE_STOP, F.SPECIAL_TOKENS, F.REGEX, F.TOOLS_OR_FORMAT, F.TRUNCATION),
    },
    "tensorrt_llm": frozenset(Feature)
    - {F.TOOLS_OR_FORMAT, F.BAD_WORDS, F.ALLOWED_TOKEN_IDS, F.ONE_CALL, F.CONTINUATION, F.TRUNCATION},
    "openai": frozenset(
        {
            *(F.FREQUENCY_PENALTY, F.PRESENCE_PENALTY, F.LOGIT_BIAS, F.N, F.LOGPROBS, F.JSON_OBJECT, F.JSON_SCHEMA),
            *(F.TOOLS, F.TOOL_CHOICE, F.ALLOWED_TOOLS, F.ONE_CALL, F.TOOLS_OR_FORMAT, F.TOOL_TURNS, F.IMAGES),
            F.REASONING_EFFORT,
        }
    ),
}
#: What a server cannot do while it drafts. vLLM: vllm/sampling_params.py, _validate_spec_decode.
_NOT_WITH_DRAFTS: Final[Mapping[EngineKind, frozenset[Feature]]] = {"vllm": frozenset({F.MIN_P, F.LOGIT_BIAS})}
_NAMES: Final[Mapping[EngineKind, str]] = {
    "own": "the own engine",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama_cpp": "llama.cpp",
    "tensorrt_llm": "TensorRT-LLM",
    "openai": "OpenAI's form",
}


@dataclass(frozen=True, slots=True)
class EngineFeatures:
    """What one engine, or one inference server, can do with a job."""

    whose: str  #: as an error names it: `vLLM with drafts`
    features: frozenset[Feature]


def served_by(kind: EngineKind, *, drafts: bool = False) -> EngineFeatures:
    """What an engine of this kind can do; `drafts`: a server that was started with speculative decoding."""
    lacks = _NOT_WITH_DRAFTS.get(kind, frozenset()) if drafts else frozenset()
    return EngineFeatures(f"{_NAMES[kind]} with drafts" if drafts and lacks else _NAMES[kind], _ROWS[kind] - lacks)


def features_of(body: Body, sampling: Sampling) -> frozenset[Feature]:
    """What a job asks for. `sampling` are the settings that are used, its task's and its model's included."""
    settings = {feature for feature, neutral in _SETTINGS.items() if getattr(sampling, feature.value) != neutral}
    others = {
        feature
        for name in body.model_fields_set
        for feature, is_asked_for in _ASKING.get(name, ())
        if is_asked_for(body)
    }
    return frozenset(settings | others)


def refusal_of(body: Body, features: Collection[Feature], among: Sequence[EngineFeatures]) -> InvalidField | None:
    """Why none of these engines can serve all that the body asks for; None where one can."""
    asked = frozenset(features)
    if any(asked <= engine.features for engine in among):
        return None
    nearest = min(among, key=lambda engine: len(asked - engine.features))
    lacks = next(feature for feature in Feature if feature in asked - nearest.features)
    able = [name for kind, name in _NAMES.items() if asked <= served_by(kind).features] or [
        name for kind, name in _NAMES.items() if lacks in served_by(kind).features
    ]
    others = f", or let {' or '.join(able)} decode the task" if able else ""
    return InvalidField(
        f"{nearest.whose} does not serve this field, or means something else by it",
        field=place_of(body, lacks),
        hint=f"leave it out{others}",
    )


def place_of(body: Body, feature: Feature) -> str:
    """The path of the field that asks for a feature, from the message's top."""
    match feature:
        case F.JSON_OBJECT | F.JSON_SCHEMA | F.REGEX | F.CHOICE | F.GRAMMAR | F.PROMPT_CONSTRAINT if (
            body.constraint is not None
        ):
            return body.constraint.field
        case F.TOOLS_OR_FORMAT:
            return "body.tools"
        case F.TOOL_TURNS | F.REASONING_TURNS | F.IMAGES:
            number, where = next(_turns_with(body, feature), (0, "content"))
            return f"body.messages.{number}.{where}"
        case _:
            return f"body.{feature.value}"


def _turns_with(body: Body, feature: Feature) -> Iterator[tuple[int, str]]:
    """Places of messages, and of their fields, that ask for the feature."""
    for number, turn in enumerate(body.messages or ()):
        if feature is F.IMAGES and isinstance(turn.content, tuple):
            yield (
                number,
                f"content.{next(i for i, part in enumerate(turn.content) if part['type'] == 'image_url')}.type",
            )
        elif feature is F.REASONING_TURNS and turn.reasoning is not None:
            yield number, "reasoning"
        elif feature is F.TOOL_TURNS and (turn.tool_calls or turn.tool_call_id is not None):
            yield number, "tool_calls" if turn.tool_calls else "tool_call_id"


_Asking = tuple[Feature, Callable[[Body], bool]]


def _form(body: Body) -> str:
    """The kind of the constraint on the text; empty without one."""
    if body.response_format is not None:
        return str(body.response_format["type"])
    name = next(iter(body.structured_outputs or ()), "")
    return "json_schema" if name == "json" else name


def _turns(feature: Feature) -> _Asking:
    return feature, lambda body: any(True for _ in _turns_with(body, feature))


_OF_CONSTRAINTS: Final[tuple[_Asking, ...]] = (
    (F.JSON_OBJECT, lambda body: _form(body) == "json_object"),
    (F.JSON_SCHEMA, lambda body: _form(body) == "json_schema"),
    (F.REGEX, lambda body: _form(body) == "regex"),
    (F.CHOICE, lambda body: _form(body) == "choice"),
    (F.GRAMMAR, lambda body: _form(body) == "grammar"),
    (F.PROMPT_CONSTRAINT, lambda body: bool(_form(body)) and body.messages is None),
    (F.TOOLS_OR_FORMAT, lambda body: bool(_form(body) and body.callable_tools)),
)
#: Settings of `Sampling` that ask for something, by the value that asks for nothing.
_SETTINGS: Final[Mapping[Feature, object]] = {
    F.TOP_K: 0,
    F.MIN_P: 0,
    F.REPETITION_PENALTY: 1,
    F.FREQUENCY_PENALTY: 0,
    F.PRESENCE_PENALTY: 0,
    F.LOGIT_BIAS: (),
    F.STOP_TOKEN_IDS: (),
    F.MIN_TOKENS: 0,
    F.IGNORE_EOS: False,
    F.BAD_WORDS: (),
    F.ALLOWED_TOKEN_IDS: (),
    F.INCLUDE_STOP: False,
    F.SPECIAL_TOKENS: True,
    F.N: 1,
}
#: By the field of the body: what else it may ask for, and whether it does.
_ASKING: Final[Mapping[str, tuple[_Asking, ...]]] = {
    "messages": (_turns(F.TOOL_TURNS), _turns(F.REASONING_TURNS), _turns(F.IMAGES)),
    "logprobs": ((F.LOGPROBS, lambda body: body.num_logprobs is not None),),
    "response_format": _OF_CONSTRAINTS,
    "structured_outputs": _OF_CONSTRAINTS,
    "tools": ((F.TOOLS, lambda body: body.tools is not None),),
    "tool_choice": (
        (F.TOOL_CHOICE, lambda body: body.must_call),
        (F.ALLOWED_TOOLS, lambda body: isinstance(body.tool_choice, dict) and "allowed_tools" in body.tool_choice),
    ),
    "parallel_tool_calls": ((F.ONE_CALL, lambda body: body.parallel_tool_calls is False),),
    "reasoning_effort": ((F.REASONING_EFFORT, lambda body: body.reasoning_effort is not None),),
    "chat_template_kwargs": ((F.TEMPLATE_ARGUMENTS, lambda body: body.chat_template_kwargs is not None),),
    "continue_final_message": ((F.CONTINUATION, lambda body: body.continue_final_message),),
    "add_generation_prompt": (
        (F.NO_ANSWER_BEGUN, lambda body: not (body.add_generation_prompt or body.continue_final_message)),
    ),
    "truncate_prompt_tokens": ((F.TRUNCATION, lambda body: body.truncate_prompt_tokens is not None),),
}
