"""A sequence in flight: its tokens, who drafts for it, its text and its clock.

A job with n > 1 is as many sequences, which begin with the same prompt and end as one outcome. The engine takes and
returns the job's id: cancelling, drafting in another way and counts are of all of them. Their prompt is read once, as
any prefix that texts share (`network/slots.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import count

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Generation, PreparedJob, SecondChoice, TokenDelta
from alphaloop.errors import AlphaloopError, GrammarConflict
from alphaloop.messages import Purpose
from alphaloop.messages.result import FinishReason
from engine.answer import Answer, TextSpec
from engine.constraint import ConstrainedText
from engine.models import Target
from engine.prompts import bad_word_tokens
from engine.proposal import Ask, Proposal, RoundCounts
from engine.sampling import Barred, TokenChooser
from engine.states import KeptStates
from engine.verdict import DraftVerdict


class Drafting:
    """Who drafts for a sequence, and how its rounds went."""

    def __init__(self) -> None:
        self.drafter: DrafterState | None = None  #: drafts for it, or is paused
        self.num_draft_tokens = 0  #: most tokens that the next round may draft
        self.is_open = False  #: the drafter holds the sequence
        self.states = KeptStates()  #: that the drafter has yet to be given
        self.lost_drafters: set[str] = set()  #: that failed in this text: it never drafts with them again
        self.counts = RoundCounts()
        #: Its first round could draft: only the last token of its prompt was left, the rest was copied.
        self.is_first_drafted = False

    @property
    def name(self) -> str | None:
        """The drafter's name."""
        return None if self.drafter is None else self.drafter.name

    @property
    def of_next_round(self) -> DrafterState | None:
        """The drafter that the next round belongs to; None where that round is vanilla."""
        return self.drafter if self.num_draft_tokens > 0 else None

    def change(self, drafter: DrafterState | None, num_draft_tokens: int) -> None:
        """Draft with `drafter` from now on, at most `num_draft_tokens` a round; the caller closes the one before.

        Vanilla, where that drafter failed in this text.
        """
        drafter = None if drafter is not None and drafter.name in self.lost_drafters else drafter
        if drafter != self.drafter:
            self.states.clear()
        self.drafter = drafter
        self.num_draft_tokens = 0 if drafter is None else min(num_draft_tokens, drafter.max_draft_tokens)

    def has_drafted_throughout(self, drafter: str, num_draft_tokens: int) -> bool:
        """Whether every round after the prefill allowed `drafter` at least `num_draft_tokens`, and there was one."""
        num_prefill_rounds = 0 if self.is_first_drafted else 1
        return self.counts.has_drafted_throughout(drafter, num_draft_tokens, num_prefill_rounds=num_prefill_rounds)

    def count_round(
        self,
        ask: Ask | None,
        proposal: Proposal,
        verdict: DraftVerdict,
        *,
        num_emitted: int,
        num_forced_after: int,
        num_possible: int,
    ) -> None:
        """Count a round that gave `num_emitted` tokens and then `num_forced_after` forced ones.

        `num_possible`: most tokens that it could have drafted without passing the token limit.
        """
        counts = self.counts
        if ask is None or self.drafter is None:
            counts.num_vanilla_rounds += 1
            counts.num_vanilla_forced += num_forced_after
            return
        path = verdict.path
        counts.take_proposers(self.drafter.name, proposal, path, num_emitted=num_emitted)
        forced = proposal.forced_in(path)
        num_forced = sum(place < num_emitted for place in forced)
        counts.take_drafted(
            self.drafter,
            self.num_draft_tokens,
            num_asked=ask.num_tokens,
            num_proposed=max(proposal.trial_depths, default=0),
            num_accepted=verdict.num_accepted - len(forced),
            num_emitted=num_emitted - num_forced,
            num_tested=None if verdict.num_tested is None else verdict.num_tested - len(forced),
            num_forced=num_forced + num_forced_after,
        )
        counts.take_shared(
            self.drafter.name,
            proposal,
            verdict.num_accepted,
            num_emitted=num_emitted,
            num_asked=ask.num_tokens,
            num_possible=num_possible,
        )


class Sequence:
    """One text of an admitted job, without a slot. The slot has fewer tokens: none at first, later all but the last.

    The texts of a job share `indices`, those of its deltas.
    """

    def __init__(self, spec: TextSpec, target: Target, indices: Iterator[int]) -> None:
        prepared, sampling = spec.prepared, spec.sampling
        self.spec = spec
        self.job_id = spec.job_id  #: the text's own id
        self.slot = -1  #: none yet
        self.text = list(prepared.token_ids)  #: prompt and output; drafters hold this very list
        self.num_prompt = len(self.text)
        self.max_tokens = sampling.max_tokens  #: most tokens that the output may have
        self.num_positions = self.num_prompt + self.max_tokens  #: that its slot may come to need
        #: Last tokens of the text that no pass has read: the pending one, and those that were forced after it.
        self.num_fresh = 1
        #: What may follow in its text; None: anything.
        self.constrained = ConstrainedText.of(target.grammars, sampling.constraint) if sampling.constraint else None
        # As in vLLM, min_tokens bars the model's end tokens even where ignore_eos makes them text.
        ends = target.end_tokens | set(sampling.stop_token_ids)
        bad_words = bad_word_tokens(target.tokenizer, sampling.bad_words) if sampling.bad_words else ()
        barred = Barred(bad_words, frozenset(ends) if sampling.min_tokens else frozenset())
        self.choice = TokenChooser(self.job_id, sampling, self.num_prompt, barred=barred, constrained=self.constrained)
        #: Whether its text is compared with another of the same prompt.
        self.is_watched = (
            prepared.job.purpose is not Purpose.TRAFFIC and self.choice.takes_likeliest and not sampling.is_adjusted
        )
        self.drafting = Drafting()
        self.answer = Answer(spec, target, indices)
        self.finish_reason: FinishReason | None = None
        self.failure: AlphaloopError | None = None  #: why its text cannot go on
        self.device_s = 0.0
        self._model_end_tokens = target.end_tokens
        self._end_tokens = set(sampling.stop_token_ids) if sampling.ignore_eos else ends
        self._second_choices: list[SecondChoice] = []
        self._batch_size = 1
        self._admitted = time.perf_counter()
        self._first_token_s: float | None = None
        if self.constrained is not None:
            self._begin_constrained(self.constrained)

    def _begin_constrained(self, constrained: ConstrainedText) -> None:
        """Append the tokens that every text under its constraint begins with."""
        # A token that no pass has judged has no logprob, and other fields may bar the only one that is allowed.
        constrained.takes_forced &= not self.choice.is_barring and self.spec.sampling.num_logprobs is None
        # One token is left to a pass, because every text has a round.
        for token in constrained.take_beginning(self.max_tokens - 1):
            self.text.append(token)
            self.answer.push(token)
            self.drafting.counts.num_vanilla_forced += 1
            self._second_choices += [SecondChoice(token, math.inf)] * self.is_watched

    @property
    def output(self) -> SequenceOf[int]:
        """The tokens generated so far."""
        return self.text[self.num_prompt :]

    @property
    def has_begun(self) -> bool:
        """Whether it has put out a token."""
        return self._first_token_s is not None

    @property
    def to_score(self) -> PreparedJob | None:
        """The job, if it is a control whose text is to be scored with drafters."""
        job = self.spec.prepared.job
        is_scored = self.is_watched and job.purpose is Purpose.CONTROL and job.scored_drafters
        return self.spec.prepared if is_scored else None

    def fit(self, proposal: Proposal, ask: Ask | None) -> Proposal:
        """The proposal as its constraint has it, where it asked for one."""
        if self.constrained is None or self.drafting.drafter is None or ask is None:
            return proposal
        return self.constrained.fit(proposal, ask.num_tokens, self.drafting.drafter.name)

    def ask(self) -> Ask | None:
        """What it wants from its drafter; None where its next round is vanilla.

        Never more tokens than the token limit leaves to the round, so it may be none.
        """
        if self.drafting.of_next_round is None:
            return None
        num_tokens = min(self.drafting.num_draft_tokens, self._room)
        return Ask(self.job_id, self.text, num_tokens, self.choice, states=self.drafting.states.take())

    @property
    def _room(self) -> int:
        """Most tokens that a round can draft without passing the token limit."""
        return self.num_positions - len(self.text) - 1

    def take(self, proposal: Proposal, verdict: DraftVerdict, ask: Ask | None) -> int:
        """Append a round's tokens, its accepted drafts and the target's own, up to where the text ends; how many.

        The token that ends the text counts, later ones are cropped: the counts' `num_tokens` is always the number of
        output tokens. An end token counts without being text. So does the token that completes a stop string. Tokens
        that must follow are appended at once.
        """
        room, num_before = self._room, len(self.text)
        accepted = [proposal.tokens[index] for index in verdict.path] if verdict.num_accepted else []
        tokens = (*accepted, verdict.next_token)
        dead = self._dead_among(tokens)
        for place, token in enumerate(tokens):
            if self.constrained is not None and place in dead:
                self.failure = self.constrained.conflict()
            else:
                self._append(token)
            if self.finish_reason or self.failure:
                break
        num_emitted = len(self.text) - num_before
        if verdict.second_choices:
            self._second_choices += verdict.second_choices[:num_emitted]
        if verdict.logprobs:
            self.answer.add_logprobs(verdict.logprobs[:num_emitted])
        self.num_fresh = 1
        num_forced_after = self._take_forced()
        if self.failure is not None:
            return num_emitted + num_forced_after
        self.drafting.count_round(
            ask,
            proposal,
            verdict,
            num_emitted=num_emitted,
            num_forced_after=num_forced_after,
            num_possible=room,
        )
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._admitted
        return num_emitted + num_forced_after

    def _append(self, token: int) -> None:
        """One more token of the text, which may end it, or be one after which it cannot go on."""
        self.text.append(token)
        if self.constrained is not None and token in self._model_end_tokens and not self.constrained.may_end:
            self.failure = self.constrained.conflict()
        elif token in self._end_tokens:
            if self.spec.sampling.include_stop_str_in_output:
                self.answer.push(token)
            self.answer.finish()
            self.finish_reason = "stop"
        elif self.answer.push(token):
            self.finish_reason = "stop"
        elif self.constrained is not None and self._is_complete_with(self.constrained, token):
            self.answer.finish()
            self.finish_reason = "stop"
        elif len(self.text) >= self.num_positions:
            self.finish_reason = "stop" if self.answer.finish() else "length"

    def _is_complete_with(self, constrained: ConstrainedText, token: int) -> bool:
        """Whether the constraint lets nothing follow; a text that would have to go on fails."""
        try:
            constrained.take(token)
        except GrammarConflict as error:
            self.failure = error
        if not constrained.is_complete:
            return False
        if len(self.output) < self.spec.sampling.min_tokens:
            self.failure = constrained.conflict()
        return True

    def _dead_among(self, tokens: SequenceOf[int]) -> Collection[int]:
        """Places of a round's tokens at which nothing was allowed, and the token means nothing."""
        constrained = self.constrained
        if constrained is None:
            return ()
        return {place for place in range(len(tokens)) if constrained.is_dead_after(tuple(tokens[:place]))}

    def _take_forced(self) -> int:
        """Append the tokens that are the only ones allowed, which the next pass reads; how many."""
        if self.constrained is None:
            return 0
        before = len(self.text)
        while not (self.finish_reason or self.failure):
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
        """Text added since the last call, as far as it has become certain."""
        return self.answer.take_deltas(is_last=self.finish_reason is not None)

    def generation(self) -> Generation:
        """The finished text, its counts and its times."""
        if self.finish_reason is None or self._first_token_s is None:
            raise ValueError(f"{self.job_id} is still running")
        answer, counts = self.answer, self.drafting.counts
        choices = answer.choices(self.finish_reason)
        return Generation(
            job_id=self.spec.owner,
            text=answer.text,
            token_ids=tuple(self.output),
            finish_reason=choices[0].finish_reason if choices else self.finish_reason,
            num_prompt_tokens=self.num_prompt,
            counts=counts.total,
            chances=counts.chances,
            time_to_first_token_s=self._first_token_s,
            wall_s=time.perf_counter() - self._admitted,
            device_s=self.device_s,
            batch_size=self._batch_size,
            shadows=counts.shared,
            drafted=counts.drafted,
            num_vanilla_rounds=counts.num_vanilla_rounds,
            proposers=counts.proposers,
            second_choices=tuple(self._second_choices),
            choices=choices,
            num_reasoning_tokens=answer.num_reasoning_tokens(self.output),
            num_unparsed_calls=answer.num_unparsed_calls,
        )


def sequences_of(prepared: PreparedJob, target: Target) -> list[Sequence]:
    """One for each of the job's texts, none with a slot."""
    indices = count()
    return [Sequence(TextSpec.of(prepared, number), target, indices) for number in range(prepared.sampling.n)]
