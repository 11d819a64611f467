"""A sequence in flight: its tokens, its text, its counts and its clock; and the sequences of one job.

A job with n > 1 is as many sequences, which begin with the same prompt and end as one outcome. Each has an id of its
own inside the engine, for its slot's keys, its drafters and its random numbers. The engine is told the job's id, and
tells it: cancelling, drafting in another way and counts are of all of them. Their prompt is read once, as any beginning
that texts share (`network/slots.py`). With a seed, text i is the one that a job of its own would have with seed + i.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple, TypeVar

from alphaloop.acceptance import AcceptanceCounts, ProposerCounts, added
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import (
    AnswerPiece,
    DrafterCounts,
    Generation,
    PreparedJob,
    Sampling,
    SecondChoice,
    ShadowCounts,
    TokenDelta,
)
from alphaloop.errors import AlphaloopError, GrammarConflict
from alphaloop.messages import Choice, Purpose
from alphaloop.messages.result import AnswerMessage, ChosenToken, FinishReason, RankedToken
from engine.constraint import ConstrainedText
from engine.models import Target
from engine.prompts import bad_word_tokens
from engine.proposal import Ask, Proposal, RoundCounts
from engine.replies import reader_of
from engine.sampling import Barred, TokenChooser
from engine.states import KeptStates
from engine.text import TextStream, token_bytes
from engine.verification import DraftVerdict, TokenLogprob

_Counts = TypeVar("_Counts", DrafterCounts, ShadowCounts)


class Scope(NamedTuple):
    """Whose jobs may begin with what another one sent."""

    task: str
    segment: str  #: empty: the task's jobs without one


class Sequence:
    """One text of an admitted job. Its slot lags behind its text: by the prompt at first, later by the last token."""

    def __init__(
        self, prepared: PreparedJob, target: Target, number: int = 0, *, numbers: Iterator[int] | None = None
    ) -> None:
        """Text `number` of the job, without a slot. The job's texts share `numbers`, those of its deltas."""
        self.owner = prepared.job.job_id  #: the job's id
        #: Its own: the job's, and behind the first text the text's number too. No job's id has a space.
        self.job_id = f"{self.owner} {number}" if number else self.owner
        self.number = number
        self.num_texts = prepared.sampling.n  #: texts of the job, itself included
        # A probe asked again would find its own answer among the task's earlier results.
        self.task = prepared.job.task if prepared.job.purpose is Purpose.TRAFFIC else ""
        self.segment = prepared.job.segment or ""
        #: Whose jobs' beginnings it may begin with, when these have left; None: nobody's, because it is measured.
        self.scope = Scope(self.task, self.segment) if self.task else None
        self.sampling = _own_sampling(prepared.sampling, number)
        self.is_streamed = prepared.job.body.stream  #: its text is published while it is decoded
        self.slot = -1  #: none yet
        self.text = list(prepared.token_ids)  #: prompt and output; drafters hold this very list
        self.num_prompt = len(self.text)
        sampling = self.sampling
        # As in vLLM, min_tokens bars the model's end tokens even where ignore_eos makes them text.
        ends = target.end_tokens | set(sampling.stop_token_ids)
        bad_words = bad_word_tokens(target.tokenizer, sampling.bad_words) if sampling.bad_words else ()
        barred = Barred(bad_words, frozenset(ends) if sampling.min_tokens else frozenset())
        #: What may follow in its text; None: anything.
        self.constrained = ConstrainedText.of(target.grammars, sampling.constraint) if sampling.constraint else None
        self.choice = TokenChooser(self.job_id, sampling, self.num_prompt, barred=barred, constrained=self.constrained)
        if self.constrained is not None:
            # A token that no pass has judged has no logprob, and other fields may bar the only one that is allowed.
            self.constrained.takes_forced &= not self.choice.is_barring and sampling.num_logprobs is None
        self.drafter: DrafterState | None = None  #: drafts for it, or is paused
        self.num_draft_tokens = 0  #: most tokens that its next round may draft
        self.is_open = False  #: its drafter holds it
        self.states = KeptStates()  #: that its drafter has yet to be given
        self.lost_drafters: set[str] = set()  #: that failed in this text: it never drafts with them again
        is_plain = self.choice.is_greedy and not (sampling.is_adjusted or self.choice.is_barring)
        #: Whether its text is compared with another of the same prompt.
        self.is_watched = prepared.job.purpose is not Purpose.TRAFFIC and is_plain
        #: A control, if its text is to be scored with drafters.
        is_control = self.is_watched and prepared.job.purpose is Purpose.CONTROL
        self.to_score = prepared if is_control and prepared.job.scored_drafters else None
        self._second_choices: list[SecondChoice] = []
        self.counts = RoundCounts()
        #: Its first round could draft: of its prompt only the last token was left, the rest was copied.
        self.is_first_drafted = False
        self.finish_reason: FinishReason | None = None
        self.failure: AlphaloopError | None = None  #: why its text cannot go on
        #: Last tokens of the text that no pass has read: the pending one, behind it those that were forced.
        self.num_fresh = 1
        self._end_tokens = set(sampling.stop_token_ids) if sampling.ignore_eos else ends
        self._logprobs: list[TokenLogprob] = []
        self._told: list[ChosenToken] = []  # of them, as a result says them
        self._num_streamed = 0  # of these
        self._reader = reader_of(target.reply_form, prepared, target.decode_all, self.job_id)
        # An answer to messages is a text of its own, also where a template's words stand right before it.
        self._stream = TextStream(
            target.decode if sampling.skip_special_tokens else target.decode_all,
            sampling.stop,
            is_live=self.is_streamed,
            before=prepared.token_ids if prepared.job.body.prompt is not None else (),
            byte_tokens=target.byte_tokens,
            special_tokens=target.special_tokens if sampling.skip_special_tokens else {},
            shown=self._reader.markers if self._reader else (),
            includes_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        self._numbers = count() if numbers is None else numbers
        self._target = target
        self._is_answer = prepared.job.body.messages is not None
        self.device_s = 0.0
        self._batch_size = 1
        self._admitted = time.perf_counter()
        self._first_token_s: float | None = None
        if self.constrained is not None:
            # One token is left to a pass, because every text has a round.
            for token in self.constrained.take_beginning(self.max_tokens - 1):
                self.text.append(token)
                self._stream.push(token)
                self.counts.num_vanilla_forced += 1
                self._second_choices += [SecondChoice(token, math.inf)] * self.is_watched

    @property
    def output(self) -> SequenceOf[int]:
        """The tokens generated so far."""
        return self.text[self.num_prompt :]

    @property
    def num_positions(self) -> int:
        """Positions that its slot may come to need."""
        return self.num_prompt + self.max_tokens

    @property
    def max_tokens(self) -> int:
        """Most tokens that the output may have."""
        return self.sampling.max_tokens

    @property
    def has_begun(self) -> bool:
        """Whether it has put out a token."""
        return self._first_token_s is not None

    @property
    def drafting(self) -> DrafterState | None:
        """The drafter that its next round belongs to; None where that round is vanilla."""
        return self.drafter if self.num_draft_tokens > 0 else None

    def fit(self, proposal: Proposal, ask: Ask | None) -> Proposal:
        """The proposal as its constraint has it, where it asked for one."""
        if self.constrained is None or self.drafter is None or ask is None:
            return proposal
        return self.constrained.fit(proposal, ask.num_tokens, self.drafter.name)

    def redraft(self, drafter: DrafterState | None, num_draft_tokens: int) -> None:
        """Draft with `drafter` from now on, so many tokens a round at most; the caller closes the one before.

        Vanilla, where that drafter failed in this text.
        """
        drafter = None if drafter is not None and drafter.name in self.lost_drafters else drafter
        if drafter != self.drafter:
            self.states.clear()
        self.drafter = drafter
        self.num_draft_tokens = 0 if drafter is None else min(num_draft_tokens, drafter.max_draft_tokens)

    def has_drafted_throughout(self, drafter: str, num_draft_tokens: int) -> bool:
        """Whether every round behind the prefill allowed `drafter` at least `num_draft_tokens`, and there was one."""
        num_prefill_rounds = 0 if self.is_first_drafted else 1
        return self.counts.has_drafted_throughout(drafter, num_draft_tokens, num_prefill_rounds=num_prefill_rounds)

    def ask(self) -> Ask | None:
        """What it wants from its drafter; None where its next round is vanilla.

        Never so many tokens that the round could pass the token limit, so it may be none.
        """
        if self.drafting is None:
            return None
        num_tokens = min(self.num_draft_tokens, self._room)
        return Ask(self.job_id, self.text, num_tokens, self.choice, states=self.states.take())

    @property
    def _room(self) -> int:
        """Most tokens that a round can draft without passing the token limit."""
        return self.num_positions - len(self.text) - 1

    def take(self, proposal: Proposal, verdict: DraftVerdict, ask: Ask | None) -> int:
        """Append a round's tokens, its accepted drafts and the target's own, up to where the text ends; how many.

        The token that ends the text counts, tokens behind it are cropped: the counts' `num_tokens` is always the number
        of output tokens. An end token counts without being text. So does the token that completes a stop string. Tokens
        that must follow are appended at once.
        """
        room, num_before = self._room, len(self.text)
        tokens = (*(proposal.tokens[index] for index in verdict.path), verdict.next_token)
        dead = self._dead_among(tokens)
        for place, token in enumerate(tokens):
            if place in dead and self.constrained is not None:
                self.failure = self.constrained.conflict()
            else:
                self._append(token)
            if self.finish_reason or self.failure:
                break
        num_emitted = len(self.text) - num_before
        self._second_choices += verdict.second_choices[:num_emitted]
        self._logprobs += verdict.logprobs[:num_emitted]
        self.num_fresh = 1
        num_behind = self._take_forced()
        if self.failure is not None:
            return num_emitted + num_behind
        if ask is None or self.drafter is None:
            self.counts.num_vanilla_rounds += 1
            self.counts.num_vanilla_forced += num_behind
        else:
            self.counts.take_proposers(self.drafter.name, proposal, verdict.path, num_emitted=num_emitted)
            forced = proposal.forced_in(verdict.path)
            self.counts.take_drafted(
                self.drafter,
                self.num_draft_tokens,
                num_asked=ask.num_tokens,
                num_proposed=max(proposal.trial_depths, default=0),
                num_accepted=verdict.num_accepted - len(forced),
                num_emitted=num_emitted - sum(place < num_emitted for place in forced),
                num_tested=None if verdict.num_tested is None else verdict.num_tested - len(forced),
                num_forced=sum(place < num_emitted for place in forced) + num_behind,
            )
            self.counts.take_shared(
                self.drafter.name,
                proposal,
                verdict.num_accepted,
                num_emitted=num_emitted,
                num_asked=ask.num_tokens,
                num_possible=room,
            )
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._admitted
        return num_emitted + num_behind

    def _append(self, token: int) -> None:
        """One more token of the text, which may end it, or be one that it cannot go on behind."""
        self.text.append(token)
        if self.constrained is not None and self._ends_too_early(token):
            self.failure = self.constrained.conflict()
        elif token in self._end_tokens:
            if self.sampling.include_stop_str_in_output:
                self._stream.push(token)
            self._stream.finish()
            self.finish_reason = "stop"
        elif self._stream.push(token):
            self.finish_reason = "stop"
        elif self._is_complete_with(token):
            self._stream.finish()
            self.finish_reason = "stop"
        elif len(self.text) >= self.num_positions:
            self.finish_reason = "stop" if self._stream.finish() else "length"

    def _ends_too_early(self, token: int) -> bool:
        """Whether an end token stands where the constraint does not let the text end."""
        constrained = self.constrained
        return constrained is not None and token in self._target.end_tokens and not constrained.may_end

    def _is_complete_with(self, token: int) -> bool:
        """Whether the constraint lets nothing follow; a text that would have to go on fails."""
        if self.constrained is None:
            return False
        try:
            self.constrained.take(token)
        except GrammarConflict as error:
            self.failure = error
        if not self.constrained.is_complete:
            return False
        if len(self.output) < self.sampling.min_tokens:
            self.failure = self.constrained.conflict()
        return True

    def _dead_among(self, tokens: SequenceOf[int]) -> set[int]:
        """Places of a round's tokens at which nothing was allowed, and the token means nothing."""
        constrained = self.constrained
        if constrained is None:
            return set()
        return {place for place in range(len(tokens)) if constrained.is_dead_behind(tuple(tokens[:place]))}

    def _take_forced(self) -> int:
        """Append the tokens that are the only ones allowed, which the next pass reads; how many."""
        before = len(self.text)
        while self.constrained is not None and not (self.finish_reason or self.failure):
            if (token := self.constrained.forced_token) is None:
                break
            self._append(token)
            self.num_fresh += 1
            self._second_choices += [SecondChoice(token, math.inf)] * self.is_watched
        return len(self.text) - before

    def charge(self, seconds: float, batch: int) -> None:
        """Add this sequence's share of a step."""
        self.device_s += seconds
        self._batch_size = max(self._batch_size, batch)

    def take_deltas(self) -> list[TokenDelta]:
        """Text added since the last call, as far as it has become certain; of an answer with parts, by part."""
        text = self._stream.take_delta()
        if self._reader is None:
            pieces = [AnswerPiece(text)] if text else []
        else:
            pieces = self._reader.take(text, is_last=self.finish_reason is not None)
        if self.is_streamed and self._logprobs:
            logprobs = tuple(self._told_logprobs()[self._num_streamed :])
            self._num_streamed += len(logprobs)
            if logprobs:
                last = pieces.pop() if pieces else AnswerPiece("")
                pieces = [*pieces, replace(last, logprobs=logprobs)]
        return [
            TokenDelta(self.owner, one.text, next(self._numbers), self.number, one.part, one.tool_call, one.logprobs)
            for one in pieces
        ]

    def _told_logprobs(self) -> list[ChosenToken]:
        """Those of the text so far, as a result says them."""
        self._told += _told(self._target.tokenizer, self._logprobs[len(self._told) :])
        return self._told

    def _choices(self) -> tuple[Choice, ...]:
        """The whole answer, where it is more than a text."""
        reader, has_logprobs = self._reader, self.sampling.num_logprobs is not None
        is_whole = reader is None or not (reader.reasoning or reader.calls)
        if self.finish_reason is None or (is_whole and self.num_texts == 1 and not has_logprobs):
            return ()
        text = self._stream.text if reader is None else reader.content
        message, finish_reason = None, self.finish_reason
        calls = reader.calls if reader else []
        if calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        if self._is_answer:
            reasoning = reader.reasoning if reader else ""
            content = None if calls and not text else text
            message = AnswerMessage(content=content, reasoning=reasoning or None, tool_calls=tuple(calls))
        choice = Choice(
            index=self.number,
            message=message,
            text=None if message else text,
            finish_reason=finish_reason,
            logprobs=tuple(self._told_logprobs()) if has_logprobs else None,
        )
        return (choice,)

    def generation(self) -> Generation:
        """The finished text, its counts and its times."""
        if self.finish_reason is None or self._first_token_s is None:
            raise ValueError(f"{self.job_id} is still running")
        choices, reader = self._choices(), self._reader
        return Generation(
            job_id=self.owner,
            text=self._stream.text if reader is None else reader.content,
            token_ids=tuple(self.output),
            finish_reason=choices[0].finish_reason if choices else self.finish_reason,
            num_prompt_tokens=self.num_prompt,
            counts=self.counts.total,
            chances=self.counts.chances,
            time_to_first_token_s=self._first_token_s,
            wall_s=time.perf_counter() - self._admitted,
            device_s=self.device_s,
            batch_size=self._batch_size,
            shadows=self.counts.shared,
            drafted=self.counts.drafted,
            num_vanilla_rounds=self.counts.num_vanilla_rounds,
            proposers=self.counts.proposers,
            second_choices=tuple(self._second_choices),
            choices=choices,
            num_reasoning_tokens=reader.num_reasoning_tokens(self.output) if reader else None,
            num_unparsed_calls=reader.num_unparsed if reader else 0,
        )


def _told(tokenizer: Any, found: SequenceOf[TokenLogprob]) -> tuple[ChosenToken, ...]:
    """Logprobs as a result says them."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        content = token_bytes(tokenizer, token_id)
        return {"token": content.decode(errors="replace"), "logprob": logprob, "bytes": tuple(content)}

    return tuple(
        ChosenToken(
            **named(one.token_id, one.logprob),
            top_logprobs=tuple(RankedToken(**named(token, logprob)) for token, logprob in one.ranked),
        )
        for one in found
    )


def _own_sampling(sampling: Sampling, number: int) -> Sampling:
    """Of text `number`: the seeds of a job's texts are seed, seed + 1, …"""
    if sampling.n == 1:
        return sampling
    return replace(sampling, n=1, seed=None if sampling.seed is None else sampling.seed + number)


def sequences_of(prepared: PreparedJob, target: Target) -> list[Sequence]:
    """One for each of the job's texts, none with a slot."""
    numbers = count()
    return [Sequence(prepared, target, number, numbers=numbers) for number in range(prepared.sampling.n)]


@dataclass(eq=False)
class UnfinishedJobs:
    """Texts that have ended while others of their job go on."""

    _ended: defaultdict[str, dict[int, Generation]] = field(default_factory=lambda: defaultdict(dict))

    def take(self, sequence: Sequence, generation: Generation) -> Generation | None:
        """The generation of a job whose last text this is; None where others go on."""
        if sequence.num_texts == 1:
            return generation
        ended = self._ended[sequence.owner]
        ended[sequence.number] = generation
        if len(ended) < sequence.num_texts:
            return None
        del self._ended[sequence.owner]
        return joined([ended[number] for number in sorted(ended)])

    def drop(self, job_id: str) -> None:
        """Forget a job."""
        self._ended.pop(job_id, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._ended.clear()


def joined(texts: SequenceOf[Generation]) -> Generation:
    """One generation of a job's texts in their order: counts and device time are sums, its times those of all.

    Its text and finish reason are the first one's. The prompt counts once.
    """
    reasoning = [one.num_reasoning_tokens for one in texts if one.num_reasoning_tokens is not None]
    return replace(
        texts[0],
        token_ids=tuple(token for one in texts for token in one.token_ids),
        counts=sum((one.counts for one in texts), AcceptanceCounts()),
        chances=added(*(one.chances for one in texts)),
        time_to_first_token_s=min(one.time_to_first_token_s for one in texts),
        wall_s=max(one.wall_s for one in texts),
        device_s=sum(one.device_s for one in texts),
        batch_size=max(one.batch_size for one in texts),
        shadows=_shadows(texts),
        drafted=_drafted(texts),
        num_vanilla_rounds=sum(one.num_vanilla_rounds for one in texts),
        proposers=_proposers(texts),
        choices=tuple(choice for one in texts for choice in one.choices),
        num_reasoning_tokens=sum(reasoning) if reasoning else None,
        num_unparsed_calls=sum(one.num_unparsed_calls for one in texts),
    )


def by_owner(by_sequence: Mapping[str, int], owners: Mapping[str, str]) -> dict[str, int]:
    """Sums by job; `owners` has the job of each sequence whose id is not the job's."""
    found: Counter[str] = Counter()
    for sequence, num in by_sequence.items():
        found[owners.get(sequence, sequence)] += num
    return dict(found)


def _drafted(texts: SequenceOf[Generation]) -> tuple[DrafterCounts, ...]:
    found: dict[str, DrafterCounts] = {}
    for one in (counts for text in texts for counts in text.drafted):
        before = found.get(one.drafter)
        found[one.drafter] = one if before is None else _sum(before, one)
    return tuple(found.values())


def _proposers(texts: SequenceOf[Generation]) -> tuple[ProposerCounts, ...]:
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for one in (counts for text in texts for counts in text.proposers):
        trials, accepts = found.get(one.proposer, ((), ()))
        found[one.proposer] = added(trials, one.trials), added(accepts, one.accepts)
    return tuple(ProposerCounts(name, *counts) for name, counts in found.items())


def _shadows(texts: SequenceOf[Generation]) -> tuple[ShadowCounts, ...]:
    """Of drafters that were scored on every text: a score of some would stand for the whole job."""
    found: dict[str, list[ShadowCounts]] = {}
    for one in (counts for text in texts for counts in text.shadows):
        found.setdefault(one.drafter, []).append(one)
    whole = []
    for of_texts in found.values():
        if len(of_texts) == len(texts):
            first, *others = of_texts
            for one in others:
                first = _sum(first, one)
            whole.append(first)
    return tuple(whole)


def _sum(one: _Counts, other: _Counts) -> _Counts:
    return replace(
        one,
        num_draft_tokens=max(one.num_draft_tokens, other.num_draft_tokens),
        counts=one.counts + other.counts,
        chances=added(one.chances, other.chances),
    )
