"""What servers answer, as JSON: replies and events of streams, refusals, and pages about themselves.

OpenAI's form and what each kind of server adds to it; other fields are ignored. The forms were read in November 2026
from the documentation and sources of vLLM 0.32, SGLang, llama.cpp and TensorRT-LLM. A whole reply and an event of a
stream are read alike: an event has `delta` in place of `message`, and most fields only at the end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Annotated, Final, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from alphaloop.engine import StepTimes
from alphaloop.errors import ReplyInvalid
from alphaloop.experiment.observe import SUMS, Phase, Slice, Treatment
from alphaloop.inside_vllm.measuring import MOST_IN_A_REPLY, SLICES, STEPS
from alphaloop.messages.fields import as_json
from alphaloop.messages.result import LEAST_LOGPROB

log = logging.getLogger(__name__)

Count = Annotated[int, Field(ge=0, le=1 << 40)]
_Sum = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
_Number = Annotated[Count, BeforeValidator(lambda number: 0 if number is None else number)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(lambda milliseconds: milliseconds / 1000)]


class Form(BaseModel):
    """A JSON object of a server's."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


AnyForm = TypeVar("AnyForm", bound=Form)


def read_form(form: type[AnyForm], content: bytes) -> AnyForm:
    """The content in its form. Raises ReplyInvalid, which names the field and not what stood there."""
    try:
        return form.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(_said(part) for part in first["loc"]) or "the reply"
        raise ReplyInvalid(f"{path}: {first['type']}", hint="is the server of the kind that was named?") from None


def _said(part: int | str) -> str:
    """A part of a path. The keys of a mapping are the server's words, and may be a text's tokens."""
    return str(part) if isinstance(part, int) or part in _names_of(Form) else "*"


@cache
def _names_of(form: type[Form]) -> frozenset[str]:
    """What the fields of this form and of its subclasses are called, here and by servers."""
    names = {name for field in form.model_fields.values() for name in _words(field.validation_alias)}
    return frozenset(form.model_fields).union(names, *map(_names_of, form.__subclasses__()))


def _words(alias: str | AliasPath | AliasChoices | None) -> Iterator[str]:
    match alias:
        case str():
            yield alias
        case AliasPath():
            yield from (part for part in alias.path if isinstance(part, str))
        case AliasChoices():
            for choice in alias.choices:
                yield from _words(choice)


def _as_text(arguments: object) -> object:
    """SGLang may send the arguments of a call as an object."""
    return as_json(arguments) if isinstance(arguments, dict) else arguments


_Logprob = Annotated[
    float,
    BeforeValidator(lambda logprob: LEAST_LOGPROB if logprob is None else logprob),
    AfterValidator(lambda logprob: logprob if math.isfinite(logprob) else LEAST_LOGPROB),
]


class ReplyFunction(Form):
    """`function` of a call; of an event, a piece of it."""

    name: str | None = None
    arguments: Annotated[str | None, BeforeValidator(_as_text)] = None


class ReplyCall(Form):
    """A call of a tool, or a piece of one."""

    index: Count | None = None  #: among the calls of the text; in events only
    id: str | None = None
    function: ReplyFunction | None = None


class ReplyMessage(Form):
    """`message` of a whole chat reply, `delta` of an event."""

    content: str | None = None
    #: What a parser of reasoning took out of the text: vLLM's name, and that of SGLang and llama.cpp.
    #: TensorRT-LLM has both.
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ReplyCall, ...] | None = None


class ReplyRank(Form):
    """A token that could have stood there."""

    token: str
    logprob: _Logprob
    bytes: tuple[Annotated[int, Field(ge=0, le=255)], ...] | None = None


class ReplyToken(ReplyRank):
    """A token of the text."""

    top_logprobs: tuple[ReplyRank, ...] | None = None


class ReplyLogprobs(Form):
    """`content` is the form of chats, which llama.cpp has in both; the other fields are that of continued prompts."""

    content: tuple[ReplyToken, ...] | None = None
    tokens: tuple[str, ...] | None = None
    token_logprobs: tuple[_Logprob, ...] | None = None
    top_logprobs: tuple[Mapping[str, _Logprob] | None, ...] | None = None


class ReplyDrafts(Form):
    """What servers report about drafts.

    `metrics.speculative_decoding` of vLLM with `--per-request-spec-decode-metrics`, the arrays of rounds with
    `detailed`; `spec_tokens_details` of SGLang's `sglext` with `return_spec_tokens_details`; `speculative_decoding` of
    a choice of TensorRT-LLM's, with `per_request_spec_decode_stats: true`. llama.cpp's are beside its times, and absent
    where nothing was drafted, whatever the server is set to.
    """

    num_rounds: _Number = Field(0, validation_alias=AliasChoices("num_spec_steps", "spec_verify_ct"))
    num_proposed: _Number = Field(
        0,
        validation_alias=AliasChoices("num_draft_tokens", "spec_num_proposed_drafts", "total_draft_tokens", "draft_n"),
    )
    num_accepted: _Number = Field(
        0,
        validation_alias=AliasChoices(
            "num_accepted_draft_tokens",
            "spec_num_correct_drafts",
            "total_accepted_draft_tokens",
            "draft_n_accepted",
        ),
    )
    histogram: tuple[Count, ...] | None = Field(
        None, validation_alias=AliasChoices("acceptance_histogram", "spec_correct_drafts_histogram")
    )
    drafted: tuple[Count, ...] | None = Field(None, validation_alias="per_step_drafted")
    accepted: tuple[Count, ...] | None = Field(None, validation_alias="per_step_accepted")


class ServerTimes(ReplyDrafts):
    """Times that the server measured itself; None where it does not report them.

    vLLM's `metrics`, with `--enable-per-request-metrics`, and llama.cpp's `timings`.
    """

    queue_s: _Seconds | None = Field(None, validation_alias="queue_time_ms")
    #: From the start of work to the first token.
    prefill_s: _Seconds | None = Field(None, validation_alias=AliasChoices("time_to_first_token_ms", "prompt_ms"))
    #: From the first token to the last.
    decode_s: _Seconds | None = Field(None, validation_alias=AliasChoices("generation_time_ms", "predicted_ms"))


_DRAFTS_AT: Final = AliasChoices(
    AliasPath("metrics", "speculative_decoding"),
    AliasPath("sglext", "spec_tokens_details"),
    AliasPath("choices", 0, "speculative_decoding"),
)


class ReplyChoice(Form):
    """One of the texts of a reply."""

    index: Count = 0
    text: str | None = None
    message: ReplyMessage | None = None
    delta: ReplyMessage | None = None
    finish_reason: str | None = None
    logprobs: ReplyLogprobs | None = None
    token_ids: tuple[Count, ...] | None = None  #: vLLM's, asked for with `return_token_ids`


class TokenUsage(Form):
    """Tokens of the prompt, and of all texts together."""

    prompt_tokens: Count
    completion_tokens: Count
    #: OpenAI's and vLLM's place, and SGLang's; None where the server does not count them.
    reasoning_tokens: Count | None = Field(
        None,
        validation_alias=AliasChoices(AliasPath("completion_tokens_details", "reasoning_tokens"), "reasoning_tokens"),
    )


class ServerFailure(Form):
    """`error` of a refusal. Its message may quote the prompt, so it is read and never shown."""

    message: str | None = None
    type: str | None = None
    code: int | str | None = None
    param: str | None = None
    n_prompt_tokens: Count | None = None  #: llama.cpp's, of a prompt that is too long
    n_ctx: Count | None = None


class _ReplySlice(Form):
    """A slice that our scheduler class inside vLLM measured (`alphaloop/inside_vllm/measuring.py`)."""

    model_config = ConfigDict(extra="allow")

    block: str = Field(min_length=1, max_length=64)
    subject: str = Field(min_length=1, max_length=512)
    phase: Phase
    drafter: str
    num_draft_tokens: Count
    started_at: AwareDatetime
    __pydantic_extra__: dict[str, _Sum]

    def slice(self) -> Slice:
        """As the experiment has it. Raises ValueError where a sum is missing."""
        sums = self.__pydantic_extra__
        if missing := [name for name in SUMS if name not in sums]:
            raise ValueError(f"expected {missing}")
        treatment = Treatment(self.drafter, self.num_draft_tokens)
        part = Slice(self.block, self.subject, self.phase, treatment, self.started_at)
        return replace(part, **{name: type(getattr(part, name))(sums[name]) for name in SUMS})


class _ReplySteps(Form):
    """Steps of one shape, added up (`StepTimes` of `alphaloop/inside_vllm/measuring.py`)."""

    batch: Annotated[int, Field(ge=1, le=1 << 20)]
    num_drafted: Count
    num_steps: Annotated[int, Field(ge=1, le=1 << 40)]
    num_positions: Count
    context: _Sum
    wall_s: _Sum
    drafter_s: _Sum

    def times(self) -> StepTimes:
        """The means."""
        num = self.num_steps
        return StepTimes(
            batch=self.batch,
            num_drafted=self.num_drafted,
            num_steps=num,
            width=self.num_positions / num / self.batch,
            context=self.context / num,
            wall_s=self.wall_s / num,
            drafter_s=self.drafter_s / num,
        )


_STEPS: Final = TypeAdapter(Annotated[list[_ReplySteps], Field(max_length=MOST_IN_A_REPLY)])
_SLICES: Final = TypeAdapter(Annotated[list[_ReplySlice], Field(max_length=MOST_IN_A_REPLY)])


def _readable(slices: object) -> tuple[Slice, ...]:
    """Slices that cannot be read are dropped: the text beside them is worth more."""
    try:
        return tuple(part.slice() for part in _SLICES.validate_python(slices))
    except ValueError:
        log.warning("a server's slices cannot be read", extra={"action": "slices_dropped"})
        return ()


def _readable_steps(steps: object) -> tuple[StepTimes, ...]:
    try:
        return tuple(each.times() for each in _STEPS.validate_python(steps))
    except ValueError:
        log.warning("a server's times cannot be read", extra={"action": "steps_dropped"})
        return ()


class ReplyPiece(Form):
    """A whole reply, or an event of a stream."""

    model: str | None = None
    choices: tuple[ReplyChoice, ...] = ()
    usage: TokenUsage | None = None
    times: ServerTimes | None = Field(None, validation_alias=AliasChoices("metrics", "timings"))
    drafts: ReplyDrafts | None = Field(None, validation_alias=_DRAFTS_AT)
    #: That our scheduler class inside vLLM measured.
    slices: Annotated[tuple[Slice, ...], BeforeValidator(_readable)] = Field(
        (), validation_alias=AliasPath("kv_transfer_params", SLICES)
    )
    steps: Annotated[tuple[StepTimes, ...], BeforeValidator(_readable_steps)] = Field(
        (), validation_alias=AliasPath("kv_transfer_params", STEPS)
    )
    error: ServerFailure | str | None = None


class RefusalBody(Form):
    """The body of a reply that is not 200. SGLang has the fields of `error` at the top."""

    error: ServerFailure | str | None = None
    message: str | None = None
    type: str | None = None
    code: int | str | None = None
    detail: str | list[object] | None = None


class ModelCard(Form):
    """A model of `GET /v1/models`."""

    id: str
    root: str | None = None
    parent: str | None = None  #: of an adapter, the model that it belongs to
    #: Tokens of prompt and text together, of vLLM and SGLang, and of llama.cpp; None where the server does not say.
    context_length: Annotated[Count, AfterValidator(lambda length: length or None)] | None = Field(
        None, validation_alias=AliasChoices("max_model_len", AliasPath("meta", "n_ctx"))
    )


class Version(Form):
    """`/version` of vLLM and TensorRT-LLM, `/server_info` of SGLang, `/props` of llama.cpp."""

    name: str | None = Field(None, validation_alias=AliasChoices("version", "build_info"))
    speculative_adaptive: bool | None = None  #: of SGLang: whether it changes k by itself; None where it does not say


class Tokenized(Form):
    """vLLM's `POST /tokenize`."""

    count: Count
    max_model_len: Count


class ModelList(Form):
    """`GET /v1/models`."""

    data: tuple[ModelCard, ...]
