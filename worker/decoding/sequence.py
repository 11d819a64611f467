"""A sequence in flight: its tokens, its text, its counts and its clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Literal

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.policy import Decision
from alphaloop.messages import Purpose
from worker.decoding.proposal import Ask, Proposal
from worker.decoding.sampling.chooser import TokenChooser
from worker.decoding.shared_weights import SharedWeightCounts
from worker.decoding.target import Target
from worker.decoding.text import TextStream
from worker.decoding.verification.chain import Verdict
from worker.decoding.verification.tree import tree_depths
from worker.engine import Generation, PreparedJob, TokenDelta


class Sequence:
    """One admitted job. Its slot lags behind its text: by the prompt at first, later by the last token alone."""

    def __init__(self, prepared: PreparedJob, decision: Decision, target: Target, slot: int) -> None:
        self.job_id = prepared.job.job_id
        # A probe asked again would find its own answer among the task's earlier results.
        self.task = prepared.job.task if prepared.job.purpose is Purpose.TRAFFIC else ""
        self.sampling = prepared.sampling
        self.is_streamed = prepared.job.body.stream  #: somebody reads the text as it comes
        self.slot = slot
        self.text = list(prepared.token_ids)  #: prompt and output; drafters hold this very list
        self.num_prompt = len(self.text)
        self.choice = TokenChooser(self.job_id, self.sampling, self.num_prompt)
        self.drafter = decision.drafter
        self.marks: Mapping[str, int] = {}  #: worker.decoding.shadow
        self.counts = AcceptanceCounts()
        #: Its first round could draft: of its prompt only the last token was left, the rest held by another slot.
        self.is_first_drafted = False
        self.finish_reason: Literal["stop", "length"] | None = None
        self._num_draft_tokens = decision.num_draft_tokens
        self._by_running = tuple(
            setting.num_draft_tokens if setting.drafter == decision.drafter else 0
            for setting in decision.settings_by_running
        )
        #: Most tokens that a round may draft.
        self.longest_draft = max((decision.num_draft_tokens, *self._by_running))
        self.shared_weights: SharedWeightCounts | None = None  #: of drafters with the same weights as its own
        self._num_asked = self._num_possible = 0
        self._chances: list[int] = []
        self._end_tokens = target.end_tokens | set(self.sampling.stop_token_ids)
        self._stream = TextStream(target.decode, self.sampling.stop, is_live=self.is_streamed)
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

    def ask(self, num_running: int) -> Ask:
        """What it wants from its drafter while so many sequences share a pass.

        Never so many tokens that the round could pass the token limit.
        """
        room = self.num_positions - len(self.text) - 1
        wanted = self._num_draft_tokens
        if self._by_running:
            wanted = self._by_running[min(num_running, len(self._by_running)) - 1]
        self._num_asked, self._num_possible = min(wanted, room), room
        return Ask(self.job_id, self.text, self._num_asked, self.choice)

    def take(self, proposal: Proposal, verdict: Verdict) -> None:
        """Append a round's tokens, its accepted drafts and the target's own, up to where the text ends.

        The token that ends the text counts, tokens behind it are cropped: `counts.num_tokens` is always the number of
        output tokens. An end token counts without being text. So does the token that completes a stop string.
        """
        tokens = [*(proposal.tokens[index] for index in verdict.path), verdict.next_token]
        num_emitted = 0
        for token in tokens:
            num_emitted += 1
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
        depth = len(proposal.tokens) if proposal.parents is None else max(tree_depths(proposal.parents), default=0)
        self.counts = self.counts.with_round(
            depth, verdict.num_accepted, num_emitted=num_emitted, num_tested=verdict.num_tested
        )
        if self.shared_weights is not None:
            self.shared_weights.take(
                proposal,
                verdict.num_accepted,
                num_emitted=num_emitted,
                num_asked=self._num_asked,
                num_possible=self._num_possible,
            )
        self._count_chances(num_emitted)
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._admitted

    def _count_chances(self, num_emitted: int) -> None:
        """One more for each position that was asked for with all before it accepted, as far as the text goes."""
        reached = min(self._num_asked, num_emitted)
        self._chances += [0] * (reached - len(self._chances))
        for position in range(reached):
            self._chances[position] += 1
        self._num_asked = 0

    def charge(self, seconds: float, batch: int) -> None:
        """Add this sequence's share of a step."""
        self.device_s += seconds
        self._batch_size = max(self._batch_size, batch)

    def take_delta(self) -> TokenDelta | None:
        """Text added since the last call, if any has become certain."""
        text = self._stream.take_delta()
        if not text:
            return None
        self._num_deltas += 1
        return TokenDelta(self.job_id, text, self._num_deltas - 1)

    def generation(self) -> Generation:
        """The finished text and what it took."""
        if self.finish_reason is None or self._first_token_s is None:
            raise ValueError(f"{self.job_id} is still running")
        return Generation(
            job_id=self.job_id,
            text=self._stream.text,
            token_ids=tuple(self.output),
            finish_reason=self.finish_reason,
            num_prompt_tokens=self.num_prompt,
            counts=self.counts,
            chances=tuple(self._chances),
            time_to_first_token_s=self._first_token_s,
            wall_s=time.perf_counter() - self._admitted,
            device_s=self.device_s,
            batch_size=self._batch_size,
            shadows=self.shared_weights.shadows() if self.shared_weights is not None else (),
        )
