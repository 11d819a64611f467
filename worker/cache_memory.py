"""What the caches of target and drafts take on the device, and what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """What there is for keys and values, and what they take. Bytes of the device."""

    free: int  #: can still be taken before the device, or the container around this process, runs out
    held: int  #: by the caches of target and drafts now; given back when nothing runs
    target_limit: int  #: most that the target's may hold; jobs that would need more wait
    target_per_token: int
    drafts_per_token: Mapping[str, int]  #: by drafter; none for those that keep none
    positions_at_once: int  #: a slot grows by so many tokens
    per_row: int  #: of a pass, behind the head: logits, and probabilities of sampled jobs

    def of_target(self, num_slots: int, num_tokens: int) -> int:
        """What the target's keys and values take for so many sequences, the longest of `num_tokens`."""
        return min(self.target_limit, num_slots * self._in_blocks(num_tokens) * self.target_per_token)

    def of_draft(self, drafter: str, num_slots: int, num_tokens: int) -> int:
        """What that drafter's take for them."""
        return num_slots * self._in_blocks(num_tokens) * self.drafts_per_token.get(drafter, 0)

    def left_for_drafts(self, num_slots: int, num_tokens: int, width: int) -> int:
        """What is left for drafts' once the target holds these sequences and passes are `width` tokens wide.

        free + held - what the target's keys and values take - rows of a pass · bytes a row; below 0 where it is short.
        """
        return self.free + self.held - self.of_target(num_slots, num_tokens) - num_slots * width * self.per_row

    def _in_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.positions_at_once) * self.positions_at_once
