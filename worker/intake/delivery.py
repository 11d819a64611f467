"""A message as the intake hands it out, and what the intake reads messages from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.messages.topics import is_high

#: Partition, epoch and number.
DeliveryKey: TypeAlias = tuple[TopicPartition, int, int]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message, and the assignment under which it came: completions of an earlier assignment are void."""

    record: Record  #: the message as it was sent, also of a job that is tried again
    epoch: int
    number: int = 0  #: of the deliveries of its partition in this assignment
    retried_from: TopicPartition | None = None  #: the partition of the retry topic, if it comes from there
    partition: TopicPartition = field(init=False, compare=False)  #: where it lies

    def __post_init__(self) -> None:
        object.__setattr__(self, "partition", self.retried_from or self.record.topic_partition)

    @property
    def key(self) -> DeliveryKey:
        """Names the delivery in this process."""
        return self.partition, self.epoch, self.number

    @property
    def is_high(self) -> bool:
        """Whether it goes before others of its task."""
        return is_high(self.record.topic)

    @property
    def num_bytes(self) -> int:
        """What it takes in a buffer."""
        return self.record.num_bytes


class RecordSource(Protocol):
    """What the intake needs of alphaloop.kafka.consumer.Consumer."""

    def subscribe(
        self,
        patterns: Sequence[str],
        *,
        on_assign: Callable[[Sequence[TopicPartition]], None],
        on_revoke: Callable[[Sequence[TopicPartition]], None],
        on_lost: Callable[[Sequence[TopicPartition]], None],
    ) -> None: ...
    def poll_many(self, limit: int, timeout_s: float) -> list[Record]: ...
    def positions(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]: ...
    def pause(self, partitions: Sequence[TopicPartition]) -> None: ...
    def resume(self, partitions: Sequence[TopicPartition]) -> None: ...
    def commit(self, offsets: dict[TopicPartition, int]) -> None: ...
    def note_ids(self, ids: Mapping[str, str]) -> None: ...
    def renew_if_made_anew(self) -> None: ...
    def close(self) -> None: ...
