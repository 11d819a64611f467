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
from alphaloop.engine import AnswerPiece, DrafterCounts, Generation, Sampling, Served, ServerLoad, SliceCounts
from alphaloop.errors import ModelNotServed, ReplyCut, ReplyInvalid, RequestRefused, ServerFailed
from alphaloop.messages import Choice
from alphaloop.messages.result import AnswerMessage, ChosenToken, FinishReason, RankedToken, ToolCall, ToolCallFunction
from alphaloop.messages.stream import ToolCallHead
from alphaloop.server_identity import ServerKind
from worker.servers import draft_counts
from worker.servers.draft_counts import DraftCounts
from worker.servers.forms import (
    ReplyChoice,
    ReplyPiece,
    ServerTimes,
    TokenUsage,
    ToldCall,
    ToldDrafts,
    ToldLogprobs,
    ToldMessage,
    ToldRank,
    ToldToken,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished text, or several."""

    text: str  #: the first one's content
    finish_reason: FinishReason  #: the first one's
    num_prompt_tokens: int
    num_tokens: int  #: of all texts, the tokens that ended them included where the server counts them
    token_ids: tuple[int, ...]  #: of all texts; empty where the server does not tell
    drafts: DraftCounts
    times: ServerTimes
    first_text_s: float | None  #: from the request to the first piece with text; None of a reply in one piece
    wall_s: float  #: from the request to the end of the reply
    choices: tuple[Choice, ...] = ()  #: where the reply says more than `text`, all of it
    num_texts: int = 1
    num_reasoning_tokens: int | None = None  #: of all texts; None where not told


_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


@dataclass(slots=True)
class ReplyReader:
    """Gathers the pieces of one reply."""

    kind: ServerKind
    model: str
    sampling: Sampling
    context_length: int | None = None  #: where known, a text that ends there may be shorter than `max_tokens`
    num_draft_tokens: int | None = None  #: k that was asked for, or that of the server's start; None: not known
    first_text_s: float | None = None
    _choices: dict[int, GrowingChoice] = field(default_factory=dict)
    _usage: TokenUsage | None = None
    _times: ServerTimes | None = None
    _drafts: ToldDrafts | None = None

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
        if not texts or any(one.finish_reason is None for one in texts):
            raise ReplyCut("the reply ended without the reason of its end")
        if (usage := self._usage) is None:
            raise ReplyInvalid("expected usage in the reply, found none", hint="a proxy between may take it out")
        self._refuse_less(texts)
        num = usage.completion_tokens
        if self.kind == "llama_cpp" and len(texts) > 1:
            num = sum(one.num_told for one in texts)  # its usage is that of one text
        reasons = self._reasons(texts, usage.prompt_tokens, num)
        ids = [token_id for one in texts for token_id in one.token_ids]
        if ids and len(ids) != num:
            raise ReplyInvalid(f"expected {num} token ids, found {len(ids)}")
        if not num and not all(one.is_empty for one in texts):
            raise ReplyInvalid("expected no text of 0 tokens, found some")
        is_plain = len(texts) == 1 and texts[0].is_plain
        # vLLM tells 0 of a thought that had no end.
        thought = usage.reasoning_tokens or (None if any(one.has_thought for one in texts) else usage.reasoning_tokens)
        return Reply(
            text=texts[0].text,
            finish_reason=reasons[0],
            num_prompt_tokens=usage.prompt_tokens,
            num_tokens=num,
            token_ids=tuple(ids),
            drafts=self._told(num) if len(texts) == 1 else draft_counts.NOTHING,
            times=self._times or ServerTimes(),
            first_text_s=self.first_text_s,
            wall_s=wall_s,
            choices=() if is_plain else tuple(map(GrowingChoice.choice, texts, reasons)),
            num_texts=len(texts),
            num_reasoning_tokens=None if thought is None else min(thought, num),
        )

    def _told(self, num_tokens: int) -> DraftCounts:
        """Of the drafts of one text. No server tells which rounds are which of several texts."""
        told = self._times if self.kind == "llama_cpp" else self._drafts
        if told is None or self.kind == "openai":
            return draft_counts.NOTHING
        return drafts_of(self.kind, told, num_tokens, self.num_draft_tokens)

    def _refuse_less(self, texts: Sequence[GrowingChoice]) -> None:
        """A server that does not know a field leaves it out without a word: that is a refusal."""
        if len(texts) != self.sampling.n:
            raise RequestRefused(
                f"body.n: expected {self.sampling.n} texts, found {len(texts)}",
                hint="ask this kind of server for one text a job",
            )
        if any(one.lacks_logprobs for one in texts):
            raise RequestRefused(
                "body.logprobs: the server left them out", hint="route the task to a server that tells them"
            )
        sampling = self.sampling
        must_call = sampling.constraint is not None and sampling.constraint.kind == "tools"
        # What ends a text by the wish of its job may stand before the call, as its limit may.
        if (
            must_call
            and not (sampling.stop or sampling.stop_token_ids)
            and any(one.ends_without_calls for one in texts)
        ):
            raise RequestRefused(
                "body.tool_choice: the server made no call", hint="route the task to a server that makes one"
            )

    def _reasons(self, texts: Sequence[GrowingChoice], num_prompt_tokens: int, num: int) -> list[FinishReason]:
        most = self.sampling.max_tokens
        if any(one.finish_reason in ("abort", "error") for one in texts):
            raise ServerFailed("the server gave the request up before its text was finished")
        if num > most * len(texts):
            raise ReplyInvalid(f"expected at most {most * len(texts)} tokens, found {num}")
        reasons = [_REASONS[one.finish_reason] for one in texts if one.finish_reason in _REASONS]
        if len(reasons) != len(texts):
            raise ReplyInvalid("expected the reason stop, length or tool_calls for the end of a text, found another")
        if any(why == "tool_calls" and not one.has_calls for one, why in zip(texts, reasons, strict=True)):
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
    vanilla = draft_counts.of_vanilla(known.granularity, reply.num_tokens, reply.num_texts)
    counts = known.counts or vanilla.counts or AcceptanceCounts()
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
            granularity="counters" if sent.slice_counts is not None else known.granularity,
            num_proposed=known.num_proposed,
            num_accepted=known.num_accepted,
            is_counted=is_counted,
            slice_counts=sent.slice_counts,
            load=sent.load,
            num_texts=reply.num_texts,
        ),
    )


def _known(reply: Reply, drafter: DrafterState | None) -> DraftCounts:
    """What is believed: where nothing drafts each round has one token, unless the server says that it drafted."""
    if drafter is not None:
        return reply.drafts
    if reply.drafts.num_proposed:
        return draft_counts.NOTHING
    return draft_counts.of_vanilla("rounds", reply.num_tokens, reply.num_texts)


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


_MOST_CALLS: Final = 1024  #: of one text


@dataclass(slots=True)
class GrowingChoice:
    """One text. `num_ranked` tokens are told at each place; None: no logprobs were asked for."""

    index: int
    num_ranked: int | None = None
    finish_reason: str | None = None  #: as the server told
    token_ids: list[int] = field(default_factory=list)
    num_told: int = 0  #: tokens whose logprobs were told, asked for or not
    _is_message: bool = False
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[_GrowingCall] = field(default_factory=list)
    _logprobs: list[ChosenToken] = field(default_factory=list)

    def add(self, told: ReplyChoice) -> list[AnswerPiece]:
        """Take a part of the text in: what is new, the last piece with all its logprobs. Raises ReplyInvalid."""
        said = told.message or told.delta
        pieces = [] if said is None else list(self._add_said(said, is_whole=told.message is not None))
        if told.text:
            self._content.append(told.text)
            pieces.append(AnswerPiece(told.text, choice=self.index))
        if told.logprobs is not None:
            self.num_told += len(told.logprobs.content or told.logprobs.tokens or ())
            if self.num_ranked is not None and (new := tuple(_chosen(told.logprobs, self.num_ranked))):
                self._logprobs += new
                last = pieces.pop() if pieces else AnswerPiece("", choice=self.index)
                pieces.append(replace(last, logprobs=new))
        self.token_ids += told.token_ids or ()
        self.finish_reason = told.finish_reason or self.finish_reason
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
        """Whether logprobs were asked for and not told."""
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

    def _add_said(self, said: ToldMessage, *, is_whole: bool) -> Iterator[AnswerPiece]:
        self._is_message = True
        if thought := said.reasoning or said.reasoning_content:
            self._reasoning.append(thought)
            yield AnswerPiece(thought, "reasoning", choice=self.index)
        if said.content:
            self._content.append(said.content)
            yield AnswerPiece(said.content, choice=self.index)
        for told in said.tool_calls or ():
            call = self._call_of(told, is_whole=is_whole)
            head, added = call.add(told, self.index)
            if head.name is not None or added:
                yield AnswerPiece(added, "tool_calls", head, self.index)

    def _call_of(self, told: ToldCall, *, is_whole: bool) -> _GrowingCall:
        """The call that it begins or goes on with. Calls come one behind the other, and some servers number none."""
        last = self._calls[-1] if self._calls else None
        if is_whole or last is None:
            is_new = True
        elif told.index is not None:
            if told.index < last.told_index:
                raise ReplyInvalid("expected calls of tools one behind the other, found a piece of an earlier one")
            is_new = told.index > last.told_index
        else:
            is_new = bool(told.id) and told.id != last.id
        if last is not None and not is_new:
            return last
        if last is not None and not last.name:
            raise ReplyInvalid("expected the name of a function in each call of a tool, found none")
        if len(self._calls) == _MOST_CALLS:
            raise ReplyInvalid(f"expected at most {_MOST_CALLS} calls of tools, found more")
        place = len(self._calls)
        self._calls.append(_GrowingCall(place, told.index if told.index is not None else place))
        return self._calls[-1]


@dataclass(slots=True)
class _GrowingCall:
    """A call of a tool. It begins once the name of its function is known."""

    place: int
    told_index: int
    id: str = ""
    name: str = ""
    _arguments: list[str] = field(default_factory=list)

    def add(self, told: ToldCall, choice: int) -> tuple[ToolCallHead, str]:
        """Take a piece in: the call, with its name where it begins, and the arguments that are new to a reader."""
        self.id = self.id or told.id or ""
        function = told.function
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


def _chosen(told: ToldLogprobs, num_ranked: int) -> Iterator[ChosenToken]:
    """The tokens of the text, with the likeliest `num_ranked` at each place. Raises ReplyInvalid."""
    if told.content is not None:
        yield from (_chosen_token(one, one.top_logprobs or (), num_ranked) for one in told.content)
        return
    tokens, logprobs, ranked = told.tokens or (), told.token_logprobs or (), told.top_logprobs or ()
    if len(tokens) != len(logprobs):
        raise ReplyInvalid(f"expected a logprob for each of {len(tokens)} tokens, found {len(logprobs)}")
    for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        found = (ranked[place] if place < len(ranked) else None) or {}
        others = tuple(ToldRank(token=other, logprob=at) for other, at in found.items())
        yield _chosen_token(ToldToken(token=token, logprob=logprob), others, num_ranked)


def _chosen_token(told: ToldToken, ranked: tuple[ToldRank, ...], num_ranked: int) -> ChosenToken:
    """Servers may add the chosen token to the ranked ones, or tell one where none was asked for."""
    likeliest = sorted(ranked, key=lambda one: -one.logprob)[:num_ranked]
    # Validated already, as what was told; a text of 1,000 tokens may have 20,000 of them.
    top = tuple(RankedToken.model_construct(token=one.token, logprob=one.logprob, bytes=one.bytes) for one in likeliest)
    return ChosenToken.model_construct(token=told.token, logprob=told.logprob, bytes=told.bytes, top_logprobs=top)
