"""One round of the engine: propose, read, verify, keep."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Final

from worker.decoding.network.language_model import PREFILL_CHUNK
from worker.decoding.network.passes import Read
from worker.decoding.network.slots import SlotCache
from worker.decoding.open_drafters import OpenDrafters
from worker.decoding.prefixes import copy_beginnings, who_waits
from worker.decoding.proposal import NOTHING, Ask, Proposal
from worker.decoding.sequence import Sequence
from worker.decoding.target import Target
from worker.decoding.verification.verdicts import verdicts
from worker.engine import Generation, Step, TokenDelta

#: Prompt tokens that a pass reads while another text is streamed: enough to keep the processor busy, few enough that
#: the stream does not wait long.
SHARED_CHUNK: Final = 128


class Round:
    """One round of all running sequences with one pass of the target, and its times."""

    def __init__(self, target: Target, drafters: OpenDrafters, cache: SlotCache, batch: list[Sequence]) -> None:
        self._target = target
        self._drafters = drafters
        self._cache = cache
        self._batch = batch
        self._width = self._num_positions = 0
        self._num_prefilled = 0
        self._num_draft_read = 0
        self._draft_s = self._verify_s = 0.0
        self._context = 0
        self._drafter: str | None = None
        self._tokens_by_job = {sequence.job_id: 0 for sequence in batch}
        self._proposed_by_job: dict[str, int] = {}
        self._drafting: tuple[str, ...] = ()

    def run(self) -> None:
        """Raises whatever torch raises; then no sequence has taken anything, and slots hold what their lengths say."""
        if not self._batch:
            return
        cache = self._cache
        copy_beginnings(cache, self._unread(), self._batch)
        began = time.perf_counter()
        pending = [sequence for sequence in self._batch if self._num_unread(sequence) == 1]
        asks = {sequence.job_id: sequence.ask() for sequence in pending}
        proposals = self._propose(pending, asks)
        proposed = time.perf_counter()
        reads = [_verifying(sequence, proposals[sequence.job_id]) for sequence in pending]
        self._proposed_by_job = {job_id: len(one.tokens) for job_id, one in proposals.items() if one.tokens}
        prompts = self._prompts()
        reads += [Read(sequence.slot, tokens, num_logits=int(is_last)) for sequence, tokens, is_last in prompts]
        ended = [sequence for sequence, _, is_last in prompts if is_last]
        logits = self._target.model.read(cache, reads)
        asked = [(sequence, proposals[sequence.job_id]) for sequence in pending]
        asked += [(sequence, NOTHING) for sequence in ended]
        settled = verdicts(logits, asked) if asked else []
        verified = time.perf_counter()
        for sequence, tokens, _ in prompts:
            cache.lengths[sequence.slot] += len(tokens)
        # Texts that were read to their end come first: keeping drafts may fail, and these would not be read again.
        for (sequence, proposal), verdict in reversed(list(zip(asked, settled, strict=True))):
            if self._num_unread(sequence):
                sequence.is_first_drafted |= not sequence.has_begun
                cache.keep(sequence.slot, (0, *(index + 1 for index in verdict.path)))
            num_emitted = sequence.take(proposal, verdict, asks.get(sequence.job_id))
            self._tokens_by_job[sequence.job_id] = num_emitted
        self._width = max((len(read.token_ids) for read in reads[: len(pending)]), default=0)
        self._num_positions = sum(len(read.token_ids) for read in reads[: len(pending)])
        self._num_prefilled = sum(len(tokens) for _, tokens, _ in prompts)
        self._context = sum(cache.lengths[sequence.slot] for sequence in self._batch) // len(self._batch)
        self._draft_s, self._verify_s = proposed - began, verified - proposed

    def report(self, finished: tuple[Generation, ...], deltas: tuple[TokenDelta, ...], wall_s: float) -> Step:
        """What the step did, which took `wall_s` in all."""
        return Step(
            finished=finished,
            deltas=deltas,
            batch=len(self._batch),
            width=max(self._width, 1),
            wall_s=wall_s,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            overhead_s=wall_s - self._draft_s - self._verify_s,
            num_positions=self._num_positions,
            context=self._context,
            num_prefill_tokens=self._num_prefilled,
            num_draft_prefill_tokens=self._num_draft_read,
            drafter=self._drafter,
            tokens_by_job=self._tokens_by_job,
            proposed_by_job=self._proposed_by_job,
            drafting=self._drafting,
        )

    def _num_unread(self, sequence: Sequence) -> int:
        return len(sequence.text) - self._cache.lengths[sequence.slot]

    def _unread(self) -> list[Sequence]:
        """Those whose slot lacks more than the last token."""
        return [sequence for sequence in self._batch if self._num_unread(sequence) > 1]

    def _propose(self, pending: list[Sequence], asks: dict[str, Ask | None]) -> dict[str, Proposal]:
        """A proposal for each sequence whose slot lacks the last token only; `asks` by job_id.

        The round is vanilla for sequences whose drafter fails: it is taken from them, and so is their ask.
        """
        proposals = {sequence.job_id: NOTHING for sequence in pending}
        by_drafter: defaultdict[str, list[Ask]] = defaultdict(list)
        for sequence in pending:
            ask = asks[sequence.job_id]
            if sequence.drafting is not None and ask is not None and ask.num_tokens > 0:
                by_drafter[sequence.drafting.name].append(ask)
        has_failed = False
        for name, wanted in by_drafter.items():
            answers = self._drafters.propose(name, wanted, self._target)
            if answers is None:
                has_failed = True
                continue
            self._num_draft_read += sum(answer.num_read for answer in answers)
            proposals |= {ask.job_id: answer for ask, answer in zip(wanted, answers, strict=True)}
        used = {None if sequence.drafting is None else sequence.drafting.name for sequence in pending}
        # What a failure took is no drafter's time.
        self._drafter = used.pop() if len(used) == 1 and not has_failed else None
        self._drafting = tuple(sequence.job_id for sequence in pending if sequence.drafting is not None)
        asks |= {sequence.job_id: None for sequence in pending if sequence.drafting is None}
        return proposals

    def _prompts(self) -> list[tuple[Sequence, list[int], bool]]:
        """Pieces of the oldest texts that are still to be read: the sequence, the tokens, whether they are its last."""
        unread = self._unread()
        # If most sequences wait for their prompts, reading prompts comes first.
        is_hurried = any(sequence.is_streamed for sequence in self._batch) and 2 * len(unread) <= len(self._batch)
        room = SHARED_CHUNK if is_hurried else PREFILL_CHUNK
        pieces: list[tuple[Sequence, list[int], bool]] = []
        waiting = who_waits(self._cache, unread, room)
        for sequence in unread:
            if not room:
                break
            if sequence.job_id in waiting:
                continue
            length = self._cache.lengths[sequence.slot]
            tokens = sequence.text[length : length + room]
            room -= len(tokens)
            pieces.append((sequence, tokens, length + len(tokens) == len(sequence.text)))
        return pieces


def _verifying(sequence: Sequence, proposal: Proposal) -> Read:
    tokens = [sequence.text[-1], *proposal.tokens]
    parents = None if proposal.parents is None else [-1, *(parent + 1 for parent in proposal.parents)]
    return Read(sequence.slot, tokens, num_logits=len(tokens), parents=parents)
