"""Outcomes of streamed jobs that must not be recorded yet, because chunks of their streams are not settled.

Once an outcome is recorded, the relay of any worker may end the stream. If this worker then dies with chunks that no
broker has, they are lost, because the job is not decoded again. Then the final chunk has to have the whole text, which
costs a reader the wait for the end; so an outcome waits for its chunks, but not for long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from worker.jobs.streaming import JobStream

#: An outcome waits no longer for its stream, because a `tokens` topic that is away must not hold up results.
MOST_HELD_S: Final = 1.0
#: Half of what one transaction takes at most, so that what is held and what has just come fit in one.
MOST_HELD: Final = 256
MOST_HELD_BYTES: Final = 4 << 20

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Held(Generic[Item]):
    item: Item
    stream: JobStream
    until: float  #: by the clock: when it waits no longer


class UnsettledStreams(Generic[Item]):
    """Holds items until every chunk of their streams was acknowledged or dropped. The recorder's thread owns it.

    An item whose stream is not settled goes on nevertheless after `MOST_HELD_S`, when the worker is told to hurry, and
    if it is among the oldest when too much is held. Its result then tells of the chunks that may be missing.
    """

    def __init__(
        self,
        *,
        stream_of: Callable[[Item], JobStream | None],
        num_bytes_of: Callable[[Item], int],
        is_hurried: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._stream_of = stream_of
        self._num_bytes_of = num_bytes_of
        self._is_hurried = is_hurried
        self._clock = clock
        self._held: list[_Held[Item]] = []  # the oldest first
        self._num_bytes = 0
        self._num_in_hand = 0

    def __len__(self) -> int:
        """Items that are held, and those of streams in the last answer of `pass_on`, which may be in hand."""
        return len(self._held) + self._num_in_hand

    @property
    def num_held(self) -> int:
        """Items that are held."""
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Bytes of the items that are held."""
        return self._num_bytes

    def pass_on(self, items: Sequence[Item]) -> list[Item]:
        """What may be recorded now, of what was held and of `items`. The rest is held."""
        ready: list[Item] = []
        streamed = self._held.copy()
        for item in items:
            if (stream := self._stream_of(item)) is None:
                ready.append(item)
            else:
                streamed.append(_Held(item, stream, self._clock() + MOST_HELD_S))
        held, num_bytes = self._unsettled(streamed) if streamed else ([], 0)
        kept = {id(one) for one in held}
        ready.extend(one.item for one in streamed if id(one) not in kept)
        self._num_in_hand = len(streamed) - len(held)  # first, because another thread may ask for the length
        self._held, self._num_bytes = held, num_bytes
        return ready

    def _unsettled(self, streamed: Sequence[_Held[Item]]) -> tuple[list[_Held[Item]], int]:
        """What has to be held, as far as there is room for it, the newest before older ones; and how many bytes."""
        held: list[_Held[Item]] = []
        num_bytes, now = 0, self._clock()
        if self._is_hurried():
            return held, num_bytes
        for one in reversed(streamed):
            size = self._num_bytes_of(one.item)
            has_room = not held or (len(held) < MOST_HELD and num_bytes + size <= MOST_HELD_BYTES)
            if has_room and now < one.until and not one.stream.is_settled:
                held.append(one)
                num_bytes += size
        return held[::-1], num_bytes
