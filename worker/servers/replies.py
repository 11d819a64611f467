"""From the pieces of a server's reply to the generation that the worker records.

    Piece, Piece … → ReplyReader → Reply → generation_of → Generation

Text, token counts and the reason of the end are checked against each other, because released servers have cut texts
silently. What servers send is OpenAI's form and what each kind adds to it; other fields are ignored. The forms were
read in November 2026 from the documentation and sources of vLLM 0.32, SGLang, llama.cpp and TensorRT-LLM. A whole reply
and an event of a stream are read alike: an event has `delta` in place of `message`, and most fields only at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import ModelNotServed, ReplyCut, ReplyInvalid, ServerFailed
from alphaloop.server_identity import ServerKind
from worker.engine import DrafterCounts, Generation, Served, ServerLoad, SliceCounts
from worker.servers import draft_counts
from worker.servers.draft_counts import DraftCounts


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished text."""

    text: str
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_tokens: int  #: of the text, the token that ended it included where the server counts it
    token_ids: tuple[int, ...]  #: empty where the server does not tell
    drafts: DraftCounts
    times: ServerTimes
    first_text_s: float | None  #: from the request to the first piece with text; None of a reply in one piece
    wall_s: float  #: from the request to the end of the reply


@dataclass(slots=True)
class ReplyReader:
    """Gathers the pieces of one reply."""

    kind: ServerKind
    model: str
    max_tokens: int
    context_length: int | None = None  #: where known, a text that ends there may be shorter than `max_tokens`
    num_draft_tokens: int | None = None  #: k that was asked for, or that of the server's start; None: not known
    finish_reason: str | None = None
    first_text_s: float | None = None
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _usage: TokenUsage | None = None
    _times: ServerTimes | None = None
    _drafts: ToldDrafts | None = None

    def add(self, piece: Piece) -> str:
        """Take a piece in, and return its text. Raises ReplyInvalid, or ModelNotServed where another model answers."""
        if self.kind != "openai" and piece.model is not None and piece.model != self.model:
            # llama.cpp serves its one model whatever name is asked for; OpenAI answers with a name that has a date.
            raise ModelNotServed(
                "expected a text of the model that was asked for, found one of another",
                hint="ask for the name that the server lists at /v1/models",
            )
        self._usage = piece.usage or self._usage
        if len(piece.choices) > 1 or any(choice.index for choice in piece.choices):
            raise ReplyInvalid(f"expected one text, found {len(piece.choices)}")
        self._times = piece.times or self._times
        self._drafts = piece.drafts or self._drafts
        return self._choose(piece.choices[0]) if piece.choices else ""

    def _choose(self, choice: ReplyChoice) -> str:
        if choice.lacks_reasoning:
            raise ReplyInvalid(
                "expected the whole text, found a part of it set apart as reasoning",
                hint="start the server without a reasoning parser",
            )
        self._texts.append(choice.words)
        self._token_ids += choice.token_ids or ()
        self.finish_reason = choice.finish_reason or self.finish_reason
        return choice.words

    def reply(self, wall_s: float) -> Reply:
        """The whole reply. Raises ReplyCut, ReplyInvalid or ServerFailed."""
        if self.finish_reason is None:
            raise ReplyCut("the reply ended without the reason of its end")
        usage, text = self._usage, "".join(self._texts)
        if usage is None:
            raise ReplyInvalid("expected usage in the reply, found none", hint="a proxy between may take it out")
        reason = self._reason(usage)
        if self._token_ids and len(self._token_ids) != usage.completion_tokens:
            raise ReplyInvalid(f"expected {usage.completion_tokens} token ids, found {len(self._token_ids)}")
        if text and not usage.completion_tokens:
            raise ReplyInvalid("expected no text of 0 tokens, found some")
        told = self._times if self.kind == "llama_cpp" else self._drafts
        num, drafts = usage.completion_tokens, draft_counts.NOTHING
        if told is not None and self.kind != "openai":
            drafts = drafts_of(self.kind, told, num, self.num_draft_tokens)
        ids, times = tuple(self._token_ids), self._times or ServerTimes()
        return Reply(text, reason, usage.prompt_tokens, num, ids, drafts, times, self.first_text_s, wall_s)

    def _reason(self, usage: TokenUsage) -> Literal["stop", "length"]:
        found, num = self.finish_reason, usage.completion_tokens
        if found in ("abort", "error"):
            raise ServerFailed("the server gave the request up before its text was finished")
        if num > self.max_tokens:
            raise ReplyInvalid(f"expected at most {self.max_tokens} tokens, found {num}")
        if found == "stop":
            return "stop"
        if found != "length":
            raise ReplyInvalid("expected the reason stop or length for the end of the text, found another")
        at_context = self.context_length is not None and usage.prompt_tokens + num >= self.context_length
        if num < self.max_tokens and not at_context:
            raise ReplyInvalid(f"expected {self.max_tokens} tokens of a text cut at its limit, found {num}")
        return "length"


@dataclass(frozen=True, slots=True)
class SentRequest:
    """When a request went where, in seconds by one clock."""

    endpoint: str
    drafter: DrafterState | None  #: what drafts there
    admitted_at: float  #: to the engine
    sent_at: float  #: to this endpoint, the last one that it was sent to
    ended_at: float
    num_beside: float  #: our mean requests in flight there meanwhile, itself included
    slice_counts: SliceCounts | None = None  #: of the slice that it ended
    load: ServerLoad | None = None  #: of the whole fleet meanwhile; None for a measurement
    asked_length: int | None = None  #: k that the request asked for and got; None: that of the endpoint's start

    @property
    def num_draft_tokens(self) -> int:
        """The k that it was decoded with; 0 without a drafter."""
        if self.drafter is None:
            return 0
        return self.drafter.max_draft_tokens if self.asked_length is None else self.asked_length


def generation_of(job_id: str, reply: Reply, sent: SentRequest) -> Generation:
    """The text with its counts and times.

    Where the counts are not known they say one thing only, how many tokens the text has: `served.is_counted` is false.
    """
    known = _known(reply, sent.drafter)
    counts = known.counts or draft_counts.of_vanilla(known.granularity, reply.num_tokens).counts or AcceptanceCounts()
    is_counted = known.counts is not None
    num_rounds = counts.rounds if is_counted else None
    if num_rounds is None and sent.slice_counts is not None:
        num_rounds = sent.slice_counts.num_passes(reply.num_tokens)
    waited_s, wall_s = sent.sent_at - sent.admitted_at, sent.ended_at - sent.admitted_at
    if (decode_s := reply.times.decode_s) is None and reply.first_text_s is not None:
        decode_s = reply.wall_s - reply.first_text_s
    return Generation(
        job_id=job_id,
        text=reply.text,
        token_ids=reply.token_ids,
        finish_reason=reply.finish_reason,
        num_prompt_tokens=reply.num_prompt_tokens,
        counts=counts,
        time_to_first_token_s=min(wall_s, waited_s + _first_token_s(reply)),
        wall_s=wall_s,
        device_s=(sent.ended_at - sent.sent_at) / max(1.0, sent.num_beside),
        batch_size=max(1, round(sent.num_beside)),
        drafted=_drafted(counts, sent.drafter, sent.num_draft_tokens) if is_counted and sent.drafter else (),
        num_vanilla_rounds=1 if sent.drafter else counts.rounds,
        served=Served(
            endpoint=sent.endpoint,
            drafter=sent.drafter.name if sent.drafter else None,
            draft_revision=sent.drafter.revision if sent.drafter else "",
            num_draft_tokens=sent.num_draft_tokens,
            num_beside=sent.num_beside,
            num_rounds=num_rounds,
            prefill_s=reply.times.prefill_s,
            decode_s=decode_s,
            queue_s=reply.times.queue_s,
            granularity="counters" if sent.slice_counts is not None else known.granularity,
            num_proposed=known.num_proposed,
            num_accepted=known.num_accepted,
            is_counted=is_counted,
            slice_counts=sent.slice_counts,
            load=sent.load,
        ),
    )


def _known(reply: Reply, drafter: DrafterState | None) -> DraftCounts:
    """What is believed: where nothing drafts each round has one token, unless the server says that it drafted."""
    if drafter is not None:
        return reply.drafts
    return draft_counts.NOTHING if reply.drafts.num_proposed else draft_counts.of_vanilla("rounds", reply.num_tokens)


def _drafted(counts: AcceptanceCounts, drafter: DrafterState, num_draft_tokens: int) -> tuple[DrafterCounts, ...]:
    """The drafter's rounds: all but the one that read the prompt."""
    behind = AcceptanceCounts(
        counts.rounds - 1,
        counts.num_empty_rounds - 1,
        min(counts.num_cropped, counts.rounds - 1 + counts.num_accepted),
        counts.proposed,
        counts.trials,
        counts.accepts,
    )
    return (DrafterCounts(drafter.name, drafter.revision, num_draft_tokens, behind, ()),)


def _first_token_s(reply: Reply) -> float:
    """From the request to the first token; to the whole text where neither the server nor a stream tells more."""
    if reply.times.prefill_s is not None:
        return (reply.times.queue_s or 0.0) + reply.times.prefill_s
    return reply.wall_s if reply.first_text_s is None else reply.first_text_s


def drafts_of(kind: ServerKind, told: ToldDrafts, num_tokens: int, num_draft_tokens: int | None) -> DraftCounts:
    """What that kind of server reported about the drafts of a text; `num_draft_tokens`: k that was asked for."""
    num_rounds, num_proposed, histogram = told.num_rounds, told.num_proposed, told.histogram
    if kind == "vllm" and not num_rounds:  # then there are no arrays, whether they were asked for or not
        return draft_counts.of_vanilla("rounds", num_tokens)
    if kind == "sglang" and not num_rounds:  # nothing drafts, or it does not tell
        return draft_counts.NOTHING
    if told.drafted is not None and told.accepted is not None:
        rounds = draft_counts.from_rounds(told.drafted, told.accepted, num_tokens)
        sums = num_proposed, told.num_accepted
        if rounds.doubt is None and (rounds.num_proposed, rounds.num_accepted) != sums:
            return DraftCounts("rounds", doubt=f"the rounds do not add up to {sums[1]} of {sums[0]} tokens")
        return rounds
    if histogram is None:
        return draft_counts.from_sums(num_proposed, told.num_accepted, num_tokens)
    if kind == "vllm":
        # Its list is as long as the k of its start.
        k = num_draft_tokens or 0
        if num_proposed == k * num_rounds and not any(histogram[k + 1 :]):
            histogram = histogram[: k + 1]
    elif kind == "sglang":
        # Every round drafts as much, so what came is counts by position, or by level where drafts are trees. A tree of
        # more tokens than k levels offers k tokens in a row, and its accepted ones are a path in it. SGLang does not
        # tell the depth of its trees, so k is that of its start, where it is known.
        num_drafted, rest = divmod(num_proposed, num_rounds)  # in each round
        k = num_drafted if num_draft_tokens is None else num_draft_tokens
        if rest or k > num_drafted or len(histogram) > k + 1:
            found = f"{num_rounds} rounds drafted {num_proposed} tokens and accepted up to {len(histogram) - 1}"
            return DraftCounts("lengths", doubt=f"{found}: drafts are not of {k} tokens")
        # Its list ends at the longest that was accepted.
        histogram, num_proposed = (*histogram, *(0,) * (k + 1 - len(histogram))), num_rounds * k
    return draft_counts.from_lengths(histogram, num_proposed, num_tokens, num_rounds)


Count = Annotated[int, Field(ge=0, le=1 << 40)]
_Number = Annotated[Count, BeforeValidator(lambda told: 0 if told is None else told)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(lambda told_ms: told_ms / 1000)]


class Form(BaseModel):
    """A JSON object of a server's."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


AnyForm = TypeVar("AnyForm", bound=Form)


def read_form(form: type[AnyForm], content: bytes) -> AnyForm:
    """The content in its form. Raises ReplyInvalid, which names the field and not what stood there."""
    try:
        return form.model_validate_json(content)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = ".".join(str(part) for part in found["loc"]) or "the reply"
        raise ReplyInvalid(f"{path}: {found['type']}", hint="is the server of the kind that was named?") from None


class Said(Form):
    """`message` of a whole chat reply, `delta` of an event."""

    content: str | None = None
    #: What a parser of reasoning took out of the text: vLLM's name, and SGLang's, llama.cpp's and its own older one.
    reasoning: str | None = None
    reasoning_content: str | None = None


class ToldDrafts(Form):
    """What servers say of drafts.

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


class ServerTimes(ToldDrafts):
    """Times that the server measured itself; None where it does not tell.

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
    """The one text of a reply."""

    index: int = 0
    text: str | None = None
    message: Said | None = None
    delta: Said | None = None
    finish_reason: str | None = None
    token_ids: tuple[Count, ...] | None = None  #: vLLM's, asked for with `return_token_ids`

    @property
    def words(self) -> str:
        """The text in it."""
        said = self.message or self.delta
        return self.text or (said.content if said else None) or ""

    @property
    def lacks_reasoning(self) -> bool:
        """Whether a part of the text was taken out of it."""
        said = self.message or self.delta
        return said is not None and bool(said.reasoning or said.reasoning_content)


class TokenUsage(Form):
    """Tokens of prompt and text."""

    prompt_tokens: Count
    completion_tokens: Count


class ServerFailure(Form):
    """`error` of a refusal. Its message may quote the prompt, so it is read and never shown."""

    message: str | None = None
    type: str | None = None
    code: int | str | None = None
    param: str | None = None
    n_prompt_tokens: Count | None = None  #: llama.cpp's, of a prompt that is too long
    n_ctx: Count | None = None


class Piece(Form):
    """A whole reply, or an event of a stream."""

    model: str | None = None
    choices: tuple[ReplyChoice, ...] = ()
    usage: TokenUsage | None = None
    times: ServerTimes | None = Field(None, validation_alias=AliasChoices("metrics", "timings"))
    drafts: ToldDrafts | None = Field(None, validation_alias=_DRAFTS_AT)
    error: ServerFailure | str | None = None


class RefusalBody(Form):
    """The body of a reply that is not 200. vLLM's old form and SGLang's have the fields of `error` at the top."""

    error: ServerFailure | str | None = None
    message: str | None = None
    type: str | None = None
    code: int | str | None = None
    detail: str | list[object] | None = None


class ModelCard(Form):
    """A model of `GET /v1/models`."""

    id: str
    root: str | None = None
    #: Tokens of prompt and text together, of vLLM and SGLang, and of llama.cpp; None where the server does not say.
    context_length: Annotated[Count, AfterValidator(lambda told: told or None)] | None = Field(
        None, validation_alias=AliasChoices("max_model_len", AliasPath("meta", "n_ctx"))
    )


class Version(Form):
    """`/version` of vLLM and TensorRT-LLM, `/server_info` of SGLang, `/props` of llama.cpp."""

    name: str | None = Field(None, validation_alias=AliasChoices("version", "build_info"))


class Tokenized(Form):
    """vLLM's `POST /tokenize`."""

    count: Count
    max_model_len: Count


class ModelList(Form):
    """`GET /v1/models`."""

    data: tuple[ModelCard, ...]
