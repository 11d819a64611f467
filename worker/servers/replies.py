"""From the pieces of a server's reply to the generation that the worker records.

    ReplyPiece, ReplyPiece … → ReplyReader → Reply → generation_of → Generation
    ReplyChoice, ReplyChoice … of one text → GrowingChoice.add → AnswerPiece … → GrowingChoice.choice → Choice

Text, token counts and the reason of the end are checked against each other, because released servers have cut texts
silently; so is that a reply has what was asked for, because servers leave out what they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import (
    AnswerPiece,
    DrafterCounts,
    Generation,
    Sampling,
    Served,
    ServerLoad,
    SliceCounts,
    StepTimes,
)
from alphaloop.errors import ModelNotServed, ReplyCut, ReplyInvalid, RequestRefused, ServerFailed
from alphaloop.experiment.observe import Slice
from alphaloop.messages import Choice
from alphaloop.messages.result import AnswerMessage, ChosenToken, FinishReason, RankedToken, ToolCall, ToolCallFunction
from alphaloop.messages.stream import ToolCallHead
from alphaloop.server_identity import ServerKind
from worker.servers import draft_counts
from worker.servers.draft_counts import DraftCounts
from worker.servers.forms import (
    ReplyCall,
    ReplyChoice,
    ReplyDrafts,
    ReplyLogprobs,
    ReplyMessage,
    ReplyPiece,
    ReplyRank,
    ReplyToken,
    ServerTimes,
    TokenUsage,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished text, or several."""

    text: str  #: the first one's content
    finish_reason: FinishReason  #: the first one's
    num_prompt_tokens: int
    num_tokens: int  #: of all texts, the tokens that ended them included where the server counts them
    token_ids: tuple[int, ...]  #: of all texts; empty where the server does not report them
    drafts: DraftCounts
    times: ServerTimes
    first_text_s: float | None  #: from the request to the first piece with text; None of a reply in one piece
    wall_s: float  #: from the request to the end of the reply
    choices: tuple[Choice, ...] = ()  #: where the reply says more than `text`, all of it
    num_texts: int = 1
    num_reasoning_tokens: int | None = None  #: of all texts; None where the server does not count them
    slices: tuple[Slice, ...] = ()  #: that the server measured of its own rounds
    steps: tuple[StepTimes, ...] = ()  #: that it took


_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


@dataclass(slots=True)
class ReplyReader:
    """Gathers the pieces of one reply."""

    kind: ServerKind
    model: str
    sampling: Sampling
    context_length: int | None = None  #: where known, a text that ends there may be shorter than `max_tokens`
    num_draft_tokens: int | None = None  #: k that was asked for, or that of the server's start; None: not known
    varies_drafts: bool = False  #: whether the server changes k by itself, up to `num_draft_tokens`
    first_text_s: float | None = None
    _choices: dict[int, GrowingChoice] = field(default_factory=dict)
    _usage: TokenUsage | None = None
    _times: ServerTimes | None = None
    _drafts: ReplyDrafts | None = None
    _slices: tuple[Slice, ...] = ()
    _steps: tuple[StepTimes, ...] = ()

    def add(self, piece: ReplyPiece) -> Sequence[AnswerPiece]:
        """Take a piece in, and return what it adds to the texts.

        Raises ReplyInvalid, or ModelNotServed where another model answers.
        """
        if self.kind != "openai" and piece.model is not None and piece.model != self.model:
            # llama.cpp serves its one model whatever name is asked for; OpenAI answers with a name that has a date.
            raise ModelNotServed(
                "expected a text of the model that was asked for, found one of another",
                hint="ask for the name that the server lists at /v1/models",
            )
        self._usage = piece.usage or self._usage
        self._times = piece.times or self._times
        self._drafts = piece.drafts or self._drafts
        self._slices += piece.slices
        self._steps += piece.steps
        added: list[AnswerPiece] = []
        if len({choice.index for choice in piece.choices}) != len(piece.choices):
            raise ReplyInvalid("expected each text once in a part of a reply, found one twice")
        for choice in piece.choices:
            if choice.index not in self._choices:
                if choice.index >= self.sampling.n:
                    raise ReplyInvalid(f"expected texts 0 to {self.sampling.n - 1}, found text {choice.index}")
                self._choices[choice.index] = GrowingChoice(choice.index, self.sampling.num_logprobs)
            added += self._choices[choice.index].add(choice)
        return added

    def reply(self, wall_s: float) -> Reply:
        """The whole reply. Raises ReplyCut, ReplyInvalid, RequestRefused or ServerFailed."""
        texts = [self._choices[index] for index in sorted(self._choices)]
        if not texts or any(text.finish_reason is None for text in texts):
            raise ReplyCut("the reply ended without the reason of its end")
        if (usage := self._usage) is None:
            raise ReplyInvalid("expected usage in the reply, found none", hint="a proxy between may take it out")
        self._refuse_less(texts)
        num = usage.completion_tokens
        if self.kind == "llama_cpp" and len(texts) > 1:
            num = sum(text.num_with_logprobs for text in texts)  # its usage is that of one text
        reasons = self._reasons(texts, usage.prompt_tokens, num)
        ids = [token_id for text in texts for token_id in text.token_ids]
        if ids and len(ids) != num:
            raise ReplyInvalid(f"expected {num} token ids, found {len(ids)}")
        if not num and not all(text.is_empty for text in texts):
            raise ReplyInvalid("expected no text of 0 tokens, found some")
        is_plain = len(texts) == 1 and texts[0].is_plain
        # vLLM counts 0 reasoning tokens of a thought that had no end.
        thought = usage.reasoning_tokens or (
            None if any(text.has_thought for text in texts) else usage.reasoning_tokens
        )
        return Reply(
            text=texts[0].text,
            finish_reason=reasons[0],
            num_prompt_tokens=usage.prompt_tokens,
            num_tokens=num,
            token_ids=tuple(ids),
            drafts=self._reported_drafts(num) if len(texts) == 1 else draft_counts.NOTHING,
            times=self._times or ServerTimes(),
            first_text_s=self.first_text_s,
            wall_s=wall_s,
            choices=() if is_plain else tuple(map(GrowingChoice.choice, texts, reasons)),
            num_texts=len(texts),
            num_reasoning_tokens=None if thought is None else min(thought, num),
            slices=self._slices,
            steps=self._steps,
        )

    def _reported_drafts(self, num_tokens: int) -> DraftCounts:
        """The drafts of a single text. No server reports to which of several texts a round belongs."""
        drafts = self._times if self.kind == "llama_cpp" else self._drafts
        if drafts is None or self.kind == "openai":
            return draft_counts.NOTHING
        if self.varies_drafts:
            return reached_of(drafts, num_tokens, self.num_draft_tokens or 0)
        return drafts_of(self.kind, drafts, num_tokens, self.num_draft_tokens)

    def _refuse_less(self, texts: Sequence[GrowingChoice]) -> None:
        """Raise RequestRefused where the server ignored a field, as servers do with fields that they do not know."""
        if len(texts) != self.sampling.n:
            raise RequestRefused(
                f"body.n: expected {self.sampling.n} texts, found {len(texts)}",
                hint="ask this kind of server for one text a job",
            )
        if any(text.lacks_logprobs for text in texts):
            raise RequestRefused(
                "body.logprobs: the server left them out", hint="route the task to a server that reports them"
            )
        sampling = self.sampling
        must_call = sampling.constraint is not None and sampling.constraint.kind == "tools"
        # What ends a text by the wish of its job may stand before the call, as its limit may.
        if (
            must_call
            and not (sampling.stop or sampling.stop_token_ids)
            and any(text.ends_without_calls for text in texts)
        ):
            raise RequestRefused(
                "body.tool_choice: the server made no call", hint="route the task to a server that makes one"
            )

    def _reasons(self, texts: Sequence[GrowingChoice], num_prompt_tokens: int, num: int) -> list[FinishReason]:
        most = self.sampling.max_tokens
        if any(text.finish_reason in ("abort", "error") for text in texts):
            raise ServerFailed("the server gave the request up before its text was finished")
        if num > most * len(texts):
            raise ReplyInvalid(f"expected at most {most * len(texts)} tokens, found {num}")
        reasons = [_REASONS[text.finish_reason] for text in texts if text.finish_reason in _REASONS]
        if len(reasons) != len(texts):
            raise ReplyInvalid("expected the reason stop, length or tool_calls for the end of a text, found another")
        if any(why == "tool_calls" and not text.has_calls for text, why in zip(texts, reasons, strict=True)):
            raise ReplyInvalid("expected calls of tools in a text that ended with them, found none")
        least = most
        if self.context_length is not None:
            least = max(0, min(most, self.context_length - num_prompt_tokens))
        if num < least * (num_cut := reasons.count("length")):
            raise ReplyInvalid(f"expected {most * num_cut} tokens of texts cut at their limit, found {num}")
        return reasons


@dataclass(frozen=True, slots=True)
class SentRequest:
    """When a request went where, in seconds by one clock."""

    endpoint: str
    drafter: DrafterState | None  #: what drafts there
    admitted_at: float  #: to the engine
    sent_at: float  #: to this endpoint, the last one that it was sent to
    ended_at: float
    num_beside: float  #: our mean requests in flight there meanwhile, itself included
    is_counted_apart: bool = False  #: whether the server's counters are the evidence, and not what its reply says
    slice_counts: SliceCounts | None = None  #: of the slice that it ended
    load: ServerLoad | None = None  #: of the whole fleet meanwhile; None for a measurement
    requested_k: int | None = (
        None  #: draft tokens that the request asked for and got; None: those of the endpoint's start
    )

    #: Its share of the endpoint's time; None where as many requests were beside it all the time.
    share_s: float | None = None
    own_drafter: str | None = None  #: of the endpoint, whether it drafted for this request or not

    @property
    def num_draft_tokens(self) -> int:
        """The k that it was decoded with; 0 without a drafter."""
        if self.drafter is None:
            return 0
        return self.drafter.max_draft_tokens if self.requested_k is None else self.requested_k


def generation_of(job_id: str, reply: Reply, sent: SentRequest) -> Generation:
    """The text with its counts and times.

    Where the counts are not known they say one thing only, how many tokens the text has; `served.is_counted` is false
    then, and where counters are the evidence.
    """
    known = _known(reply, sent.drafter)
    vanilla = draft_counts.of_vanilla(known.granularity, reply.num_tokens, reply.num_texts)
    counts = known.counts or vanilla.counts or AcceptanceCounts()
    is_counted = known.counts is not None and not sent.is_counted_apart
    num_rounds = counts.rounds if known.counts is not None else None
    if num_rounds is None and sent.slice_counts is not None:
        num_rounds = sent.slice_counts.num_passes(reply.num_tokens)
    waited_s, wall_s = sent.sent_at - sent.admitted_at, sent.ended_at - sent.admitted_at
    request_s = sent.ended_at - sent.sent_at
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
        device_s=request_s / max(1.0, sent.num_beside) if sent.share_s is None else sent.share_s,
        batch_size=max(1, round(sent.num_beside)),
        drafted=_drafted(counts, sent.drafter, sent.num_draft_tokens) if is_counted and sent.drafter else (),
        num_vanilla_rounds=1 if sent.drafter else counts.rounds,
        choices=reply.choices,
        num_reasoning_tokens=reply.num_reasoning_tokens,
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
            request_s=request_s,
            granularity=known.granularity,
            num_proposed=known.num_proposed,
            num_accepted=known.num_accepted,
            is_counted=is_counted,
            slice_counts=sent.slice_counts,
            load=sent.load,
            num_texts=reply.num_texts,
            slices=reply.slices,
            steps=tuple(replace(step, drafter=sent.own_drafter if step.num_drafted else None) for step in reply.steps),
        ),
    )


def _known(reply: Reply, drafter: DrafterState | None) -> DraftCounts:
    """The counts that are believed: without a drafter a token a round, unless the server says that it drafted."""
    if drafter is not None:
        return reply.drafts
    if reply.drafts.num_proposed:
        return draft_counts.NOTHING
    return draft_counts.of_vanilla("rounds", reply.num_tokens, reply.num_texts)


def _drafted(counts: AcceptanceCounts, drafter: DrafterState, num_draft_tokens: int) -> tuple[DrafterCounts, ...]:
    """The drafter's rounds: all but the one that read the prompt."""
    after_prefill = replace(
        counts,
        rounds=counts.rounds - 1,
        num_empty_rounds=counts.num_empty_rounds - 1,
        num_cropped=min(counts.num_cropped, counts.rounds - 1 + counts.num_accepted),
    )
    return (DrafterCounts(drafter.name, drafter.revision, num_draft_tokens, after_prefill, ()),)


def _first_token_s(reply: Reply) -> float:
    """From the request to the first token; to the whole text where neither the server nor a stream shows it."""
    if reply.times.prefill_s is not None:
        return (reply.times.queue_s or 0.0) + reply.times.prefill_s
    return reply.wall_s if reply.first_text_s is None else reply.first_text_s


def drafts_of(kind: ServerKind, drafts: ReplyDrafts, num_tokens: int, num_draft_tokens: int | None) -> DraftCounts:
    """What that kind of server reported about the drafts of a text; `num_draft_tokens`: k that was asked for."""
    num_rounds, num_proposed, histogram = drafts.num_rounds, drafts.num_proposed, drafts.histogram
    if kind == "vllm" and not num_rounds:  # then there are no arrays, whether they were asked for or not
        return draft_counts.of_vanilla("rounds", num_tokens)
    if kind == "sglang" and not num_rounds:  # nothing drafts, or it does not say
        return draft_counts.NOTHING
    if drafts.drafted is not None and drafts.accepted is not None:
        rounds = draft_counts.from_rounds(drafts.drafted, drafts.accepted, num_tokens)
        sums = num_proposed, drafts.num_accepted
        if rounds.doubt is None and (rounds.num_proposed, rounds.num_accepted) != sums:
            return DraftCounts("rounds", doubt=f"the rounds do not add up to {sums[1]} of {sums[0]} tokens")
        return rounds
    if histogram is None:
        return draft_counts.from_sums(num_proposed, drafts.num_accepted, num_tokens, num_draft_tokens)
    if kind == "vllm":
        # Its list is as long as the k of its start.
        k = num_draft_tokens or 0
        if num_proposed == k * num_rounds and not any(histogram[k + 1 :]):
            histogram = histogram[: k + 1]
    elif kind == "sglang":
        # Every round drafts as much, so what came is counts by position, or by level where drafts are trees. A tree of
        # more tokens than k levels offers k tokens in a row, and its accepted ones are a path in it. SGLang does not
        # report the depth of its trees, so k is that of its start, where it is known.
        num_drafted, rest = divmod(num_proposed, num_rounds)  # in each round
        k = num_drafted if num_draft_tokens is None else num_draft_tokens
        if rest or k > num_drafted or len(histogram) > k + 1:
            counted = f"{num_rounds} rounds drafted {num_proposed} tokens and accepted up to {len(histogram) - 1}"
            return DraftCounts("lengths", doubt=f"{counted}: drafts are not of {k} tokens")
        # Its list ends at the longest that was accepted.
        histogram, num_proposed = (*histogram, *(0,) * (k + 1 - len(histogram))), num_rounds * k
    return draft_counts.from_lengths(histogram, num_proposed, num_tokens, num_rounds)


def reached_of(drafts: ReplyDrafts, num_tokens: int, longest: int) -> DraftCounts:
    """What a server that changes k by itself reported; `longest`: the largest k that it may take.

    SGLang 0.5.23 computes its proposed tokens from the k of its start (`managers/tokenizer_manager.py`), so they are
    not read. How many rounds accepted how many tokens is its own count.
    """
    if drafts.histogram is None:
        return draft_counts.NOTHING
    return draft_counts.from_reached(drafts.histogram, num_tokens, drafts.num_rounds, longest)


_MOST_CALLS: Final = 1024  #: of one text


@dataclass(slots=True)
class GrowingChoice:
    """One text. Each place has `num_ranked` likeliest tokens; None: no logprobs were requested."""

    index: int
    num_ranked: int | None = None
    finish_reason: str | None = None  #: the server's word
    token_ids: list[int] = field(default_factory=list)
    num_with_logprobs: int = 0  #: tokens that came with logprobs, requested or not
    _is_message: bool = False
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[_GrowingCall] = field(default_factory=list)
    _logprobs: list[ChosenToken] = field(default_factory=list)

    def add(self, part: ReplyChoice) -> list[AnswerPiece]:
        """Take a part of the text in: what is new, the last piece with all its logprobs. Raises ReplyInvalid."""
        message = part.message or part.delta
        pieces = [] if message is None else list(self._add_message(message, is_whole=part.message is not None))
        if part.text:
            self._content.append(part.text)
            pieces.append(AnswerPiece(part.text, choice=self.index))
        if part.logprobs is not None:
            self.num_with_logprobs += len(part.logprobs.content or part.logprobs.tokens or ())
            if self.num_ranked is not None and (new := tuple(_chosen(part.logprobs, self.num_ranked))):
                self._logprobs += new
                last = pieces.pop() if pieces else AnswerPiece("", choice=self.index)
                pieces.append(replace(last, logprobs=new))
        self.token_ids += part.token_ids or ()
        self.finish_reason = part.finish_reason or self.finish_reason
        return pieces

    @property
    def text(self) -> str:
        """Its content."""
        return "".join(self._content)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said."""
        return not (self._content or self._reasoning or self._calls)

    @property
    def is_plain(self) -> bool:
        """Whether its content and its end are all that it says."""
        return not (self._reasoning or self._calls) and self.num_ranked is None

    @property
    def has_thought(self) -> bool:
        """Whether it has reasoning."""
        return bool(self._reasoning)

    @property
    def has_calls(self) -> bool:
        """Whether it calls tools."""
        return bool(self._calls)

    @property
    def ends_without_calls(self) -> bool:
        """Whether it came to an end of its own and calls no tool."""
        return self.finish_reason == "stop" and not self._calls

    @property
    def lacks_logprobs(self) -> bool:
        """Whether logprobs were requested and are missing."""
        return self.num_ranked is not None and not self._logprobs and not self.is_empty

    def choice(self, finish_reason: FinishReason) -> Choice:
        """All of it."""
        logprobs = None if self.num_ranked is None else tuple(self._logprobs)
        if not self._is_message:
            return Choice(index=self.index, text=self.text, finish_reason=finish_reason, logprobs=logprobs)
        calls = tuple(call.whole(self.index) for call in self._calls)
        message = AnswerMessage(
            content=self.text if self._content or not calls else None,
            reasoning="".join(self._reasoning) or None,
            tool_calls=calls,
        )
        return Choice(index=self.index, message=message, finish_reason=finish_reason, logprobs=logprobs)

    def _add_message(self, message: ReplyMessage, *, is_whole: bool) -> Iterator[AnswerPiece]:
        self._is_message = True
        if thought := message.reasoning or message.reasoning_content:
            self._reasoning.append(thought)
            yield AnswerPiece(thought, "reasoning", choice=self.index)
        if message.content:
            self._content.append(message.content)
            yield AnswerPiece(message.content, choice=self.index)
        for part in message.tool_calls or ():
            call = self._call_of(part, is_whole=is_whole)
            head, added = call.add(part, self.index)
            if head.name is not None or added:
                yield AnswerPiece(added, "tool_calls", head, self.index)

    def _call_of(self, part: ReplyCall, *, is_whole: bool) -> _GrowingCall:
        """The call that this part begins or goes on with. Calls come one after the other, some unnumbered."""
        last = self._calls[-1] if self._calls else None
        if is_whole or last is None:
            is_new = True
        elif part.index is not None:
            if part.index < last.server_index:
                raise ReplyInvalid("expected calls of tools one after the other, found a piece of an earlier one")
            is_new = part.index > last.server_index
        else:
            is_new = bool(part.id) and part.id != last.id
        if last is not None and not is_new:
            return last
        if last is not None and not last.name:
            raise ReplyInvalid("expected the name of a function in each call of a tool, found none")
        if len(self._calls) == _MOST_CALLS:
            raise ReplyInvalid(f"expected at most {_MOST_CALLS} calls of tools, found more")
        place = len(self._calls)
        self._calls.append(_GrowingCall(place, part.index if part.index is not None else place))
        return self._calls[-1]


@dataclass(slots=True)
class _GrowingCall:
    """A call of a tool. It begins once the name of its function is known."""

    place: int
    server_index: int
    id: str = ""
    name: str = ""
    _arguments: list[str] = field(default_factory=list)

    def add(self, part: ReplyCall, choice: int) -> tuple[ToolCallHead, str]:
        """Take a part in: the call, with its name where it begins, and the arguments that are new to a reader."""
        self.id = self.id or part.id or ""
        function = part.function
        added = (function.arguments if function else None) or ""
        if added:
            self._arguments.append(added)
        if self.name or not (function and function.name):
            return ToolCallHead(self.place), added if self.name else ""
        self.name = function.name
        return ToolCallHead(self.place, self._id(choice), self.name), "".join(self._arguments)

    def whole(self, choice: int) -> ToolCall:
        """All of it. Raises ReplyInvalid where no name came."""
        if not self.name:
            raise ReplyInvalid("expected the name of a function in each call of a tool, found none")
        return ToolCall(
            id=self._id(choice), function=ToolCallFunction(name=self.name, arguments="".join(self._arguments))
        )

    def _id(self, choice: int) -> str:
        """The server's; where it gives none, one that no other call of the reply has."""
        return self.id or f"call_{choice}_{self.place}"


def _chosen(part: ReplyLogprobs, num_ranked: int) -> Iterator[ChosenToken]:
    """The tokens of the text, with the likeliest `num_ranked` at each place. Raises ReplyInvalid."""
    if part.content is not None:
        yield from (_chosen_token(token, token.top_logprobs or (), num_ranked) for token in part.content)
        return
    tokens, logprobs, ranked = part.tokens or (), part.token_logprobs or (), part.top_logprobs or ()
    if len(tokens) != len(logprobs):
        raise ReplyInvalid(f"expected a logprob for each of {len(tokens)} tokens, found {len(logprobs)}")
    for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        likeliest = (ranked[place] if place < len(ranked) else None) or {}
        others = tuple(ReplyRank(token=other, logprob=at) for other, at in likeliest.items())
        yield _chosen_token(ReplyToken(token=token, logprob=logprob), others, num_ranked)


def _chosen_token(chosen: ReplyToken, ranked: tuple[ReplyRank, ...], num_ranked: int) -> ChosenToken:
    """Servers may add the chosen token to the ranked ones, or send one where none was requested."""
    likeliest = sorted(ranked, key=lambda rank: -rank.logprob)[:num_ranked]
    # The forms have validated them; a text of 1,000 tokens may have 20,000 of them.
    top = tuple(RankedToken.model_construct(token=r.token, logprob=r.logprob, bytes=r.bytes) for r in likeliest)
    return ChosenToken.model_construct(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top)
