"""The sequences that an engine holds: which of them have a slot, and the texts of jobs that go on with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

from alphaloop.acceptance import AcceptanceCounts, ProposerCounts, added
from alphaloop.engine import DrafterCounts, Generation, PreparedJob, ShadowCounts
from engine.network.slots import SlotCache
from engine.sequence import Sequence

_Counts = TypeVar("_Counts", DrafterCounts, ShadowCounts)


class AdmittedSequences:
    """Gives out the slots of `cache`, whose keys and values take at most `max_cache_bytes`.

    A preempted sequence has lost its slot, and goes on where it was when others have ended. A waiting sequence has not
    had a slot yet: it is a further text of an admitted job.
    """

    def __init__(self, cache: SlotCache, num_slots: int, max_cache_bytes: int) -> None:
        self._cache = cache
        self._num_slots = num_slots
        self._max_cache_bytes = max_cache_bytes
        self._most_running = num_slots
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.running) + len(self.preempted)

    @property
    def all(self) -> tuple[Sequence, ...]:
        """Those that run, and then those that are preempted."""
        return (*self.running, *self.preempted)

    @property
    def everyone(self) -> tuple[Sequence, ...]:
        """Those of `all`, and then those that wait."""
        return (*self.all, *self.waiting)

    @property
    def num_bytes(self) -> int:
        """Bytes that the keys and values of `all` come to take at most, in the slots that they have."""
        num_rows = max((len(self), *(sequence.slot + 1 for sequence in self.running)))
        return self._num_bytes_with(num_rows) if num_rows else 0

    def of_job(self, job_id: str) -> list[Sequence]:
        """The sequences of that job; none if it is not here."""
        return [sequence for sequence in self.everyone if sequence.spec.owner == job_id]

    def fits(self, prepared: PreparedJob) -> bool:
        """Whether a slot and the memory for the whole of a text of this job are free beside all others."""
        return self._has_room_for(num_positions(prepared))

    def start_waiting(self) -> None:
        """Give waiting sequences a slot, in their order, as far as slots and memory go."""
        while self.waiting and not self.preempted and self._has_room_for(self.waiting[0].num_positions):
            sequence = self.waiting.pop(0)
            sequence.slot = self._acquire(sequence.num_positions)
            self.running.append(sequence)

    def _has_room_for(self, num_positions: int) -> bool:
        if len(self) >= self._num_slots:
            return False
        return self._num_bytes_with(len(self) + 1, num_positions) <= self._max_cache_bytes

    def _acquire(self, num_positions: int) -> int:
        """A slot for which there is room. The others move together first where gaps would take too much memory."""
        num_rows = max((len(self) + 1, *(sequence.slot + 1 for sequence in self.running)))
        if self._num_bytes_with(num_rows, num_positions) > self._max_cache_bytes:
            self._cache.close_gaps(self.running)
        return self._cache.acquire()

    def _num_bytes_with(self, num_rows: int, *more_positions: int) -> int:
        positions = [*more_positions, *(sequence.num_positions for sequence in self.all)]
        return self._cache.num_bytes_with(num_rows, positions)

    def drop(self, sequence: Sequence) -> None:
        """Let a sequence go; `close_gaps` afterwards."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.preempted:
            self.preempted.remove(sequence)
        else:
            self.running.remove(sequence)
            self._cache.release(sequence.slot)
        if not len(self):
            self._most_running = self._num_slots

    def close_gaps(self) -> None:
        """Let the running sequences move together in the cache, where gaps cost time."""
        if self._cache.computes_gaps:
            self._cache.close_gaps(self.running)

    def preempt(self, sequences: SequenceOf[Sequence], *, most_running: int) -> None:
        """Take the slots of these running sequences. No more than `most_running` run until the engine was empty."""
        for sequence in sequences:
            self.running.remove(sequence)
            self._cache.release(sequence.slot)
        self.preempted += sequences
        self._most_running = most_running
        self._cache.close_gaps(self.running)

    def resume(self) -> None:
        """Give preempted sequences a slot again, as many as may run."""
        if self.preempted:
            self._cache.close_gaps(self.running)
        while self.preempted and len(self.running) < self._most_running:
            sequence = self.preempted.pop(0)
            sequence.slot = self._cache.acquire()
            self.running.append(sequence)

    def clear(self) -> None:
        """Drop every sequence, and the memory of the cache with them."""
        self.running, self.preempted, self.waiting = [], [], []
        self._most_running = self._num_slots
        self._cache.clear()


@dataclass(eq=False)
class UnfinishedJobs:
    """Texts that have ended while others of their job go on."""

    _ended: defaultdict[str, dict[int, Generation]] = field(default_factory=lambda: defaultdict(dict))

    def take(self, sequence: Sequence, generation: Generation) -> Generation | None:
        """The generation of a job whose last text this is; None where others go on."""
        if sequence.spec.num_texts == 1:
            return generation
        ended = self._ended[sequence.spec.owner]
        ended[sequence.spec.number] = generation
        if len(ended) < sequence.spec.num_texts:
            return None
        del self._ended[sequence.spec.owner]
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
    reasoning = [text.num_reasoning_tokens for text in texts if text.num_reasoning_tokens is not None]
    drafted = _by_drafter(counts for text in texts for counts in text.drafted)
    shadows = _by_drafter(counts for text in texts for counts in text.shadows)
    return replace(
        texts[0],
        token_ids=tuple(token for text in texts for token in text.token_ids),
        counts=sum((text.counts for text in texts), AcceptanceCounts()),
        chances=added(*(text.chances for text in texts)),
        time_to_first_token_s=min(text.time_to_first_token_s for text in texts),
        wall_s=max(text.wall_s for text in texts),
        device_s=sum(text.device_s for text in texts),
        batch_size=max(text.batch_size for text in texts),
        # A drafter that was scored on some texts only says nothing of the whole job.
        shadows=tuple(reduce(_sum, counts) for counts in shadows.values() if len(counts) == len(texts)),
        drafted=tuple(reduce(_sum, counts) for counts in drafted.values()),
        num_vanilla_rounds=sum(text.num_vanilla_rounds for text in texts),
        proposers=_proposers(texts),
        choices=tuple(choice for text in texts for choice in text.choices),
        num_reasoning_tokens=sum(reasoning) if reasoning else None,
        num_unparsed_calls=sum(text.num_unparsed_calls for text in texts),
    )


def _by_drafter(all_counts: Iterable[_Counts]) -> dict[str, list[_Counts]]:
    by_drafter: dict[str, list[_Counts]] = {}
    for counts in all_counts:
        by_drafter.setdefault(counts.drafter, []).append(counts)
    return by_drafter


def _sum(counts: _Counts, more: _Counts) -> _Counts:
    return replace(
        counts,
        num_draft_tokens=max(counts.num_draft_tokens, more.num_draft_tokens),
        counts=counts.counts + more.counts,
        chances=added(counts.chances, more.chances),
    )


def _proposers(texts: SequenceOf[Generation]) -> tuple[ProposerCounts, ...]:
    sums: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for counts in (counts for text in texts for counts in text.proposers):
        trials, accepts = sums.get(counts.proposer, ((), ()))
        sums[counts.proposer] = added(trials, counts.trials), added(accepts, counts.accepts)
    return tuple(ProposerCounts(name, *counts) for name, counts in sums.items())


def num_positions(prepared: PreparedJob) -> int:
    """Positions that the slot of each of the job's texts may come to need."""
    return len(prepared.token_ids) + prepared.sampling.max_tokens
