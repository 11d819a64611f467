"""A sequence in flight: its tokens, its text, its counts and its clock."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from typing import Literal

from alphaloop.acceptance import AcceptanceCounts
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.sampling import job_generator
from worker.decoding.target import Target
from worker.decoding.text import TextStream
from worker.engine import Generation, PreparedJob, TokenDelta


class Sequence:
    """One admitted job. The cache holds all of its tokens but the last, which the next pass reads."""

    def __init__(
        self, prepared: PreparedJob, target: Target, slot: int, drafter: LookupDrafter | None, num_draft_tokens: int
    ) -> None:
        self.job_id = prepared.job.job_id
        self.sampling = prepared.sampling
        self.slot = slot
        self.prompt = prepared.token_ids
        self.output: list[int] = []
        self.counts = AcceptanceCounts()
        self.finish_reason: Literal["stop", "length"] | None = None
        self.generator = job_generator(self.job_id, self.sampling.seed) if self.sampling.temperature > 0 else None
        self.device_s = 0.0
        self.batch_size = 1
        self._end_tokens = target.end_tokens
        self._text = TextStream(target.decode, self.sampling.stop)
        self._draft = drafter.start(self.prompt) if drafter else None
        self._num_draft_tokens = num_draft_tokens
        self._num_deltas = 0
        self._admitted = time.perf_counter()
        self._first_token_s: float | None = None

    def propose(self) -> list[int]:
        """This round's drafts: never so many that the round could pass the token limit."""
        num = min(self._num_draft_tokens, self.sampling.max_tokens - len(self.output) - 1)
        return self._draft.propose(num) if self._draft and num > 0 else []

    def take(self, tokens: SequenceOf[int], num_proposed: int) -> None:
        """Append a round's tokens, its accepted drafts and the target's own, up to where the text ends.

        The token that ends the text counts, tokens behind it are cropped: `counts.num_tokens` is always the number of
        output tokens. An end token counts without being text. So does the token that completes a stop string.
        """
        num_emitted = 0
        for token in tokens:
            num_emitted += 1
            self.output.append(token)
            if token in self._end_tokens:
                self._text.finish()
                self.finish_reason = "stop"
            elif self._text.push(token):
                self.finish_reason = "stop"
            elif len(self.output) >= self.sampling.max_tokens:
                self.finish_reason = "stop" if self._text.finish() else "length"
            if self.finish_reason:
                break
        self.counts = self.counts.with_round(num_proposed, len(tokens) - 1, num_emitted=num_emitted)
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._admitted
        if self._draft and not self.finish_reason:
            self._draft.extend(tokens)

    def charge(self, seconds: float, batch: int) -> None:
        """Add this sequence's share of a step."""
        self.device_s += seconds
        self.batch_size = max(self.batch_size, batch)

    def take_delta(self) -> TokenDelta | None:
        """Text added since the last call, if any has become certain."""
        text = self._text.take_delta()
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
            text=self._text.text,
            token_ids=tuple(self.output),
            finish_reason=self.finish_reason,
            num_prompt_tokens=len(self.prompt),
            counts=self.counts,
            time_to_first_token_s=self._first_token_s,
            wall_s=time.perf_counter() - self._admitted,
            device_s=self.device_s,
            batch_size=self.batch_size,
        )
