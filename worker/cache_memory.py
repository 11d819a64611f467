"""What the caches of target and drafts take on their devices, and what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

#: Of the memory that the models leave on the target's device, for keys and values of target and drafts there: the rest
#: is for logits and all else.
CACHE_SHARE: Final = 0.5


def target_limit(left: int, target_per_token: int, drafts_per_token: int) -> int:
    """Most bytes that the target's keys and values may take where `models.target.max_cache_bytes` is not set.

    `left` is what the loaded models leave on the target's device, `drafts_per_token` is of the drafts there together.
    """
    return int(CACHE_SHARE * target_per_token / (target_per_token + drafts_per_token) * left)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    free: int  #: can still be taken before the device, or the container around this process, runs out
    held: int  #: by caches now; given back when nothing runs


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """What there is for keys and values, and what they take, in bytes."""

    free: int  #: of the target's device, as in `DeviceMemory`
    held: int  #: on the target's device
    target_limit: int  #: most that the target's may hold; jobs that would need more wait
    target_per_token: int
    drafts_per_token: Mapping[str, int]  #: by drafter; none for those that keep none
    positions_at_once: int  #: a slot grows by so many tokens
    per_row: int  #: of a pass, behind the head: logits, and probabilities of sampled jobs
    elsewhere: Mapping[str, DeviceMemory] = field(default_factory=dict)  #: devices that hold drafts only, by name
    device_of: Mapping[str, str] = field(default_factory=dict)  #: by drafter, which of them; none: the target's device

    def of_target(self, num_slots: int, num_tokens: int) -> int:
        """What the target's keys and values take for so many sequences, the longest of `num_tokens`."""
        return min(self.target_limit, num_slots * self._in_blocks(num_tokens) * self.target_per_token)

    def of_draft(self, drafter: str, num_slots: int, num_tokens: int) -> int:
        """What that drafter's take for them."""
        return num_slots * self._in_blocks(num_tokens) * self.drafts_per_token.get(drafter, 0)

    def left_for_drafts(self, num_slots: int, num_tokens: int, width: int, *, device: str | None = None) -> int:
        """What is left on a device for drafts' keys and values; None: on the target's.

        There the target holds these sequences, and passes are `width` tokens wide:
        free + held - what the target's keys and values take - rows of a pass · bytes a row; below 0 where it is short.
        A device without the target keeps a row of each draft token until it is verified:
        free + held - rows · bytes a row.
        """
        its = DeviceMemory(self.free, self.held) if device is None else self.elsewhere[device]
        of_target = self.of_target(num_slots, num_tokens) if device is None else 0
        return its.free + its.held - of_target - num_slots * width * self.per_row

    def left_elsewhere(self, num_slots: int, num_tokens: int, width: int) -> dict[str, int]:
        """The same for each drafter whose device is not the target's."""
        left = {device: self.left_for_drafts(num_slots, num_tokens, width, device=device) for device in self.elsewhere}
        return {drafter: left[device] for drafter, device in self.device_of.items()}

    def _in_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.positions_at_once) * self.positions_at_once
