"""A sequence in flight: its tokens, its text, its counts and its clock."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from typing import Literal

from alphaloop.deciding.goodput import DrafterState
from alphaloop.messages import Purpose
from worker.decoding.counts import RoundCounts
from worker.decoding.models import Target
from worker.decoding.proposal import Ask, Proposal
from worker.decoding.sampling import TokenChooser
from worker.decoding.text import TextStream
from worker.decoding.verification import DraftVerdict
from worker.engine import Generation, PreparedJob, SecondChoice, TokenDelta


class Sequence:
    """One admitted job. Its slot lags behind its text: by the prompt at first, later by the last token alone."""

    def __init__(self, prepared: PreparedJob, target: Target, slot: int) -> None:
        self.job_id = prepared.job.job_id
        # A probe asked again would find its own answer among the task's earlier results.
        self.task = prepared.job.task if prepared.job.purpose is Purpose.TRAFFIC else ""
        self.sampling = prepared.sampling
        self.is_streamed = prepared.job.body.stream  #: its text is published while it is decoded
        self.slot = slot
        self.text = list(prepared.token_ids)  #: prompt and output; drafters hold this very list
        self.num_prompt = len(self.text)
        self.choice = TokenChooser(self.job_id, self.sampling, self.num_prompt)
        self.drafter: DrafterState | None = None  #: drafts for it, or is paused
        self.num_draft_tokens = 0  #: most tokens that its next round may draft
        self.is_open = False  #: its drafter holds it
        self.lost_drafters: set[str] = set()  #: that failed in this text: it never drafts with them again
        #: Whether its text is compared with another of the same prompt.
        self.is_watched = prepared.job.purpose is not Purpose.TRAFFIC and self.choice.is_greedy and self.choice.is_plain
        #: A control, if its text is to be scored with drafters.
        is_control = self.is_watched and prepared.job.purpose is Purpose.CONTROL
        self.to_score = prepared if is_control and prepared.job.scored_drafters else None
        self._second_choices: list[SecondChoice] = []
        self.counts = RoundCounts()
        #: Its first round could draft: of its prompt only the last token was left, the rest held by another slot.
        self.is_first_drafted = False
        self.finish_reason: Literal["stop", "length"] | None = None
        self._end_tokens = target.end_tokens | set(self.sampling.stop_token_ids)
        # An answer to messages is a text of its own, also where a template's words stand right before it.
        self._stream = TextStream(
            target.decode,
            self.sampling.stop,
            is_live=self.is_streamed,
            before=prepared.token_ids if prepared.job.body.prompt is not None else (),
            byte_tokens=target.byte_tokens,
            special_tokens=target.special_tokens,
        )
        self._num_deltas = 0
        self.device_s = 0.0
        self._batch_size = 1
        self._admitted = time.perf_counter()
        self._first_token_s: float | None = None

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

    def redraft(self, drafter: DrafterState | None, num_draft_tokens: int) -> None:
        """Draft with `drafter` from now on, so many tokens a round at most; the caller closes the one before.

        Vanilla, where that drafter failed in this text.
        """
        drafter = None if drafter is not None and drafter.name in self.lost_drafters else drafter
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
        return Ask(self.job_id, self.text, min(self.num_draft_tokens, self._room), self.choice)

    @property
    def _room(self) -> int:
        """Most tokens that a round can draft without passing the token limit."""
        return self.num_positions - len(self.text) - 1

    def take(self, proposal: Proposal, verdict: DraftVerdict, ask: Ask | None) -> int:
        """Append a round's tokens, its accepted drafts and the target's own, up to where the text ends; how many.

        The token that ends the text counts, tokens behind it are cropped: the counts' `num_tokens` is always the number
        of output tokens. An end token counts without being text. So does the token that completes a stop string.
        """
        room, num_before = self._room, len(self.text)
        for token in (*(proposal.tokens[index] for index in verdict.path), verdict.next_token):
            self.text.append(token)
            if token in self._end_tokens:
                self._stream.finish()
                self.finish_reason = "stop"
            elif self._stream.push(token):
                self.finish_reason = "stop"
            elif len(self.text) >= self.num_positions:
                self.finish_reason = "stop" if self._stream.finish() else "length"
            if self.finish_reason:
                break
        num_emitted = len(self.text) - num_before
        self._second_choices += verdict.second_choices[:num_emitted]
        if ask is None or self.drafter is None:
            self.counts.num_vanilla_rounds += 1
        else:
            self.counts.take_drafted(
                self.drafter,
                self.num_draft_tokens,
                num_asked=ask.num_tokens,
                num_proposed=max(proposal.depths, default=0),
                num_accepted=verdict.num_accepted,
                num_emitted=num_emitted,
                num_tested=verdict.num_tested,
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
        return num_emitted

    def charge(self, seconds: float, batch: int) -> None:
        """Add this sequence's share of a step."""
        self.device_s += seconds
        self._batch_size = max(self._batch_size, batch)

    def take_delta(self) -> TokenDelta | None:
        """Text added since the last call, if any has become certain."""
        if not (text := self._stream.take_delta()):
            return None
        self._num_deltas += 1
        return TokenDelta(self.job_id, text, self._num_deltas - 1)

    def generation(self) -> Generation:
        """The finished text, its counts and its times."""
        if self.finish_reason is None or self._first_token_s is None:
            raise ValueError(f"{self.job_id} is still running")
        return Generation(
            job_id=self.job_id,
            text=self._stream.text,
            token_ids=tuple(self.output),
            finish_reason=self.finish_reason,
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
            second_choices=tuple(self._second_choices),
        )
