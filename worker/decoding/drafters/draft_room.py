"""Whether memory is left for a draft model to take another sequence in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from alphaloop.deciding.goodput import DrafterState
from worker.engine import CacheMemory


class DraftedSequence(Protocol):
    """What is needed of a running sequence."""

    drafter: DrafterState | None
    num_draft_tokens: int
    is_open: bool  #: its drafter holds it, and has memory for it

    @property
    def num_positions(self) -> int:
        """Positions that it may come to need."""


class DraftRoom:
    """Bytes that the sequences running leave for drafts' keys and values on each device.

    Each sequence is taken to be as long as the longest. The same arithmetic as in a decision
    (`CacheMemory.left_for_drafts`), for the sequences that run now.
    """

    def __init__(self, memory: CacheMemory, running: Sequence[DraftedSequence]) -> None:
        self._memory = memory
        self._longest = max((one.num_positions for one in running), default=0)
        width = 1 + max((one.num_draft_tokens for one in running), default=0)
        devices = (None, *memory.elsewhere)
        self._left = {
            device: memory.left_for_drafts(len(running), self._longest, width, device=device) for device in devices
        }
        for one in running:
            if one.is_open:
                self._left[self._device(one.drafter)] -= self._needed(one.drafter)

    def take(self, sequence: DraftedSequence) -> bool:
        """Whether its drafter can take it in; then its share is taken. Always, where its drafter keeps nothing."""
        needed, device = self._needed(sequence.drafter), self._device(sequence.drafter)
        if needed > max(self._left[device], 0):
            return False
        self._left[device] -= needed
        return True

    def _needed(self, drafter: DrafterState | None) -> int:
        return 0 if drafter is None else self._memory.of_draft(drafter.name, 1, self._longest)

    def _device(self, drafter: DrafterState | None) -> str | None:
        return None if drafter is None else self._memory.device_of.get(drafter.name)
