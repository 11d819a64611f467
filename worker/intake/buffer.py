"""Deliveries that wait to be taken, each lane bounded for itself: a backlog of jobs keeps out none of the high lane."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from alphaloop.kafka.offsets import TopicPartition
from worker.intake.delivery import Delivery


@dataclass(frozen=True, slots=True)
class Room:
    """What the caller takes at most."""

    num: int
    num_bytes: int

    def __bool__(self) -> bool:
        return self.num > 0 and self.num_bytes > 0

    def without(self, num: int, num_bytes: int) -> Room:
        """What is left of it beside these."""
        return Room(self.num - num, self.num_bytes - num_bytes)


NO_ROOM: Final = Room(0, 0)


class Buffer:
    """The deliveries of one lane."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._waiting: deque[Delivery] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether its partitions are to be paused."""
        return len(self._waiting) >= self._max_items or self._num_bytes >= self._max_bytes

    @property
    def has_room(self) -> bool:
        """Whether they may be resumed: half is used up. A paused partition throws away what the client fetched."""
        return len(self._waiting) <= self._max_items // 2 and self._num_bytes <= self._max_bytes // 2

    def num_sure(self, most_message_bytes: int) -> int:
        """How many more messages of at most this size fit for sure."""
        room_bytes = self._max_bytes - self._num_bytes
        return max(0, min(self._max_items - len(self._waiting), room_bytes // most_message_bytes))

    def add(self, delivery: Delivery) -> None:
        """Let a delivery wait."""
        self._waiting.append(delivery)
        self._num_bytes += delivery.num_bytes

    def take(self, room: Room) -> list[Delivery]:
        """Take out the first deliveries, until they fill the room."""
        taken: list[Delivery] = []
        num_bytes = 0
        while self._waiting and len(taken) < room.num and num_bytes < room.num_bytes:
            taken.append(self._waiting.popleft())
            num_bytes += taken[-1].num_bytes
        self._num_bytes -= num_bytes
        return taken

    def drop(self, partitions: Set[TopicPartition]) -> None:
        """Forget what came from these."""
        self._waiting = deque(delivery for delivery in self._waiting if delivery.partition not in partitions)
        self._num_bytes = sum(delivery.num_bytes for delivery in self._waiting)

    def clear(self) -> None:
        """Forget everything."""
        self._waiting.clear()
        self._num_bytes = 0
