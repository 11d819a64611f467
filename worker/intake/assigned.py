"""The partitions that are ours: what their messages are delivered as, when they pause, what is committed of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime

from alphaloop.errors import BrokerError
from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.messages.topics import is_high, retry_delay_s
from worker.intake.delays import as_sent, due_in_s
from worker.intake.delivery import Delivery, RecordSource
from worker.intake.lane_buffers import LaneBuffers
from worker.intake.watermark import Watermark

log = logging.getLogger(__name__)


@dataclass(slots=True)
class AssignedPartition:
    """A partition during one assignment, whose number is `epoch`.

    The messages of a retry topic become due in their order. The first that is not due and all behind it wait in
    `not_due`, each with its time by the intake's clock.
    """

    partition: TopicPartition
    epoch: int
    watermark: Watermark = field(default_factory=Watermark)
    committed: int | None = None
    is_paused: bool = False
    not_due: deque[tuple[float, Delivery]] = field(default_factory=deque)
    is_high: bool = field(init=False)
    is_retry: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_high = is_high(self.partition.topic)
        self.is_retry = retry_delay_s(self.partition.topic) is not None

    def deliver(self, record: Record, now: Callable[[], datetime], at_s: float) -> Delivery | None:
        """The delivery of a message, unless it has to wait; `at_s` is the intake's clock."""
        number, went_back = self.watermark.deliver(record.offset)
        if went_back:
            where = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            log.warning("offsets went back: the topic was made anew or cut", extra={"action": "log_went_back", **where})
        if not self.is_retry:
            return Delivery(record, self.epoch, number)
        sent = as_sent(record)
        delivery = Delivery(sent, self.epoch, number, None if sent is record else self.partition)
        wait_s = due_in_s(record, now())
        if wait_s > 0 or self.not_due:
            self.not_due.append((at_s + wait_s, delivery))
            return None
        return delivery

    def take_due(self, at_s: float) -> list[Delivery]:
        """Take out the deliveries that are due now."""
        due = []
        while self.not_due and self.not_due[0][0] <= at_s:
            due.append(self.not_due.popleft()[1])
        return due

    @property
    def to_commit(self) -> int | None:
        """The next offset to read after a restart, unless that is committed."""
        offset = self.watermark.committable
        return None if offset == self.committed else offset


def pass_over_gaps(source: RecordSource, partitions: Mapping[TopicPartition, AssignedPartition]) -> None:
    """Note how far each is read, also over offsets without a message.

    Only while every polled message is delivered: the watermark would pass over a message that is not.
    """
    for partition, position in source.positions(list(partitions)).items():
        partitions[partition].watermark.pass_over(position)


def commit_finished(source: RecordSource, partitions: Iterable[AssignedPartition]) -> None:
    """Commit how far each of these is finished. A commit that fails is logged: the next one says the same or more."""
    wanted = [(held, offset) for held in partitions if (offset := held.to_commit) is not None]
    if not wanted:
        return
    try:
        source.commit({held.partition: offset for held, offset in wanted})
    except BrokerError as error:
        # What is not committed is read again and answered from the record: late, never wrong.
        log.warning("offsets not committed: %s", error, extra={"action": "commit_failed"})
        return
    for held, offset in wanted:
        held.committed = offset


def deliveries_of(
    records: Sequence[Record],
    partitions: Mapping[TopicPartition, AssignedPartition],
    now: Callable[[], datetime],
    at_s: float,
) -> list[Delivery]:
    """Those of the messages, and of earlier ones of retry topics, that are due; `at_s` is the intake's clock."""
    found = []
    for record in records:
        held = partitions.get(record.topic_partition)
        if held is not None and (delivery := held.deliver(record, now, at_s)) is not None:
            found.append(delivery)
    for held in partitions.values():
        if held.not_due:
            found += held.take_due(at_s)
    return found


def pause_and_resume(
    source: RecordSource,
    partitions: Mapping[TopicPartition, AssignedPartition],
    lanes: LaneBuffers,
    max_distance: int,
    held_topics: Set[str],
) -> None:
    """Pause each partition whose messages have no room or have to wait, and resume it later."""
    pause, resume = [], []
    for partition, held in partitions.items():
        buffer = lanes.of(is_high=held.is_high)
        must_wait = held.watermark.distance >= max_distance or bool(held.not_due) or not lanes.is_open
        must_wait = must_wait or partition.topic in held_topics
        if not held.is_paused and (buffer.is_full or must_wait):
            pause.append(partition)
        elif held.is_paused and buffer.has_room and not must_wait:
            resume.append(partition)
    for chosen, act, state in ((pause, source.pause, True), (resume, source.resume, False)):
        if chosen:
            act(chosen)
            for partition in chosen:
                partitions[partition].is_paused = state
