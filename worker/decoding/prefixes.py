"""Beginnings that texts share are read once: their keys and values are copied into the slots of the others.

Jobs of a task mostly begin alike, with a chat template's system message or the task's instructions. What stands at a
position depends on the tokens up to there alone, so a copy is what reading would have given, to within rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from typing import Final, Protocol

from worker.decoding.network.slots import SlotCache
from worker.decoding.sequence import Sequence

#: Tokens that are not worth a copy of their own.
SHORTEST: Final = 8
#: Tokens of prompts that take longer than the least that a pass takes, which is to read all weights: on 2 cores a dozen
#: of SmolLM2's, on a GPU hundreds. Where so many can be copied, texts wait for one that begins like them.
WORTH_A_PASS: Final = {"cpu": 64, "cuda": 512}


def num_shared(a: SequenceOf[int], b: SequenceOf[int], most: int) -> int:
    """Leading tokens that two lists have in common, `most` at most."""
    low, high = 0, min(len(a), len(b), most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


class Reader(Protocol):
    """What reads a text into a slot."""

    slot: int

    @property
    def text(self) -> SequenceOf[int]:
        """The live list."""


def copy_beginnings(cache: SlotCache, unread: SequenceOf[Reader], batch: SequenceOf[Reader]) -> None:
    """Give the slots of `unread` what another slot of `batch` holds of their texts, always short of the last token.

    What slots of `batch` hold has to be their texts, as far as their lengths go.
    """
    copies: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for one in unread:
        begin = cache.lengths[one.slot]
        end, source = max((_shared(one, other, cache.lengths[other.slot]), other.slot) for other in batch)
        if end - begin >= SHORTEST:
            copies[source, begin, end].append(one.slot)
    for (source, begin, end), slots in copies.items():
        cache.copy(source, slots, begin, end)


def who_waits(cache: SlotCache, unread: SequenceOf[Sequence], num_read: int) -> set[str]:
    """Job ids of `unread` sequences that should wait until an earlier one has read a beginning that they share.

    `num_read`: tokens that a pass reads at most. No sequence waits unless all together save a pass's worth.
    """
    readers: list[Sequence] = []
    spared: dict[str, int] = {}
    for sequence in unread:
        held = cache.lengths[sequence.slot]
        shared = max(
            (_shared(sequence, reader, cache.lengths[reader.slot] + num_read) for reader in readers), default=0
        )
        if shared - held >= SHORTEST:
            spared[sequence.job_id] = shared - held
        else:
            readers.append(sequence)
    return set(spared) if sum(spared.values()) >= WORTH_A_PASS.get(cache.device.type, 512) else set()


def _shared(one: Reader, other: Reader, most: int) -> int:
    return num_shared(one.text, other.text, min(most, len(one.text) - 1))
