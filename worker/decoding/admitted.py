"""The sequences that an engine has admitted: each has a slot of the cache, or is parked because memory ran out."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from worker.decoding.network.slots import SlotCache
from worker.decoding.sequence import Sequence
from worker.engine import PreparedJob


class AdmittedSequences:
    """Gives out the slots of `cache`, whose keys and values take at most `max_cache_bytes`.

    A parked sequence has no slot. It goes on, behind its own text, when others have ended.
    """

    def __init__(self, cache: SlotCache, num_slots: int, max_cache_bytes: int) -> None:
        self._cache = cache
        self._num_slots = num_slots
        self._max_cache_bytes = max_cache_bytes
        self._most_running = num_slots
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.running) + len(self.parked)

    @property
    def all(self) -> tuple[Sequence, ...]:
        """Those that run, and then those that are parked."""
        return (*self.running, *self.parked)

    def find(self, job_id: str) -> Sequence | None:
        """The sequence of that job; None if it is not here."""
        return next((sequence for sequence in self.all if sequence.job_id == job_id), None)

    def num_bytes_alone(self, prepared: PreparedJob) -> int:
        """Bytes of keys and values of this job, if nothing else ran."""
        return self._cache.num_bytes_with(1, [_num_positions(prepared)])

    def fits(self, prepared: PreparedJob) -> bool:
        """Whether a slot and the memory for the whole of this job are free beside all others."""
        if len(self) >= self._num_slots:
            return False
        return self._num_bytes_with(len(self) + 1, prepared) <= self._max_cache_bytes

    def acquire(self, prepared: PreparedJob) -> int:
        """A slot for this job, which `fits`. The others move together first where gaps would take too much memory."""
        num_rows = max((len(self) + 1, *(sequence.slot + 1 for sequence in self.running)))
        if self._num_bytes_with(num_rows, prepared) > self._max_cache_bytes:
            self._cache.close_gaps(self.running)
        return self._cache.acquire()

    def _num_bytes_with(self, num_rows: int, prepared: PreparedJob) -> int:
        positions = [_num_positions(prepared), *(sequence.num_positions for sequence in self.all)]
        return self._cache.num_bytes_with(num_rows, positions)

    def drop(self, sequence: Sequence) -> None:
        """Let a sequence go; `close_gaps` afterwards."""
        if sequence in self.parked:
            self.parked.remove(sequence)
        else:
            self.running.remove(sequence)
            self._cache.release(sequence.slot)
        if not len(self):
            self._most_running = self._num_slots

    def close_gaps(self) -> None:
        """Let the running sequences move together in the cache, where gaps cost time."""
        if self._cache.computes_gaps:
            self._cache.close_gaps(self.running)

    def park(self, sequences: SequenceOf[Sequence], *, most_running: int) -> None:
        """Take the slots of these running sequences. No more than `most_running` run until the engine was empty."""
        for sequence in sequences:
            self.running.remove(sequence)
            self._cache.release(sequence.slot)
        self.parked += sequences
        self._most_running = most_running
        self._cache.close_gaps(self.running)

    def unpark(self) -> None:
        """Give parked sequences a slot again, as many as may run."""
        if self.parked:
            self._cache.close_gaps(self.running)
        while self.parked and len(self.running) < self._most_running:
            sequence = self.parked.pop(0)
            sequence.slot = self._cache.acquire()
            self.running.append(sequence)

    def clear(self) -> None:
        """Drop every sequence, and the memory of the cache with them."""
        self.running, self.parked = [], []
        self._most_running = self._num_slots
        self._cache.clear()


def _num_positions(prepared: PreparedJob) -> int:
    return len(prepared.token_ids) + prepared.sampling.max_tokens
