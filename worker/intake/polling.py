"""The one thread that owns the consumer: it polls at least once a second, also during long rounds.

Deliveries go into a bounded buffer, one for each lane; completions come back through a queue and move the low
watermark. A partition is paused when the buffer is full, when its watermark lags too far behind, and while the head of
a retry topic is not due; it is resumed when there is room again.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import Final

from alphaloop.errors import AlphaloopError, BrokerError, reason_of
from alphaloop.kafka.records import Record, TopicPartition
from alphaloop.liveness import Pulse
from alphaloop.messages.topics import is_high
from worker.intake.buffer import NO_ROOM, Buffer, Room
from worker.intake.delays import as_sent, due_in_s
from worker.intake.delivery import Delivery, RecordSource
from worker.intake.handing_over import HandingOver
from worker.intake.watermark import Watermark

__all__ = ["Delivery", "Intake", "RecordSource"]

log = logging.getLogger(__name__)

POLL_S: Final = 0.2


@dataclass(slots=True)
class _Assigned:
    watermark: Watermark
    epoch: int
    is_high: bool
    committed: int | None = None
    is_paused: bool = False
    head: tuple[float, Delivery] | None = None  #: of a retry topic: when it is due, by the clock


class Intake:
    """Deliveries out, completions in. `take` is called from one thread, `finish` and `wake` from any."""

    def __init__(
        self,
        source: RecordSource,
        patterns: Sequence[str],
        *,
        max_buffered: int,
        max_buffered_bytes: int,
        max_distance: int,
        commit_interval_s: float,
        now: Callable[[], datetime],
        hand_over_s: float = 0.0,
        name: str = "intake",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_buffered` and `max_buffered_bytes` are for each lane; `now` says when retries are due."""
        self._source = source
        self._patterns = patterns
        self._max_distance = max_distance
        self._commit_interval_s = commit_interval_s
        self._clock = clock
        self._now = now
        self._partitions: dict[TopicPartition, _Assigned] = {}
        self._epoch = 0
        self._assignment_number = 0
        self._held_topics: frozenset[str] = frozenset()
        self._told_ids: Mapping[str, str] = {}
        self._high, self._normal = (Buffer(max_items=max_buffered, max_bytes=max_buffered_bytes) for _ in range(2))
        self._is_woken = False
        self._changed = threading.Condition()
        self._finished: SimpleQueue[Delivery] = SimpleQueue()
        self.handing_over = HandingOver(hand_over_s)  #: what is owed when partitions leave
        self._is_taking = True
        self._closing = threading.Event()
        self._failure: AlphaloopError | None = None
        self._last_commit = self._last_poll = clock()
        self.pulse = Pulse(f"the thread {name}")
        self._thread = threading.Thread(target=self.pulse.around(self._run), name=name, daemon=True)

    def start(self) -> None:
        """Subscribe and begin to poll."""
        self._source.subscribe(self._patterns, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)
        self._thread.start()

    def take(
        self, limit: int, timeout_s: float, *, max_bytes: int | None = None, high: Room = NO_ROOM
    ) -> list[Delivery]:
        """Up to `limit` deliveries, until they reach `max_bytes`; those of the high lane first, for which `high` is.

        Waits up to `timeout_s` for the first or for `wake`. Raises the exception that ended the polling thread.
        """
        normal = Room(limit, sys.maxsize if max_bytes is None else max_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._has_news(normal, high) or self._is_urgent(), timeout_s)
            self._is_woken = False
            if self._failure is not None:
                raise self._failure
            return self._high.take(high) + self._normal.take(normal)

    def wake(self) -> None:
        """Let a waiting `take` return, also without deliveries."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def finish(self, deliveries: Iterable[Delivery]) -> None:
        """These messages need never be read again."""
        done = list(deliveries)
        for delivery in done:
            self._finished.put(delivery)
        self.handing_over.settle(done)

    def hold(self, topic: str) -> None:
        """Read no more of a topic until `release`; what was delivered of it can be finished meanwhile."""
        self._held_topics |= {topic}

    def release(self, topic: str) -> None:
        """Read a topic again."""
        self._held_topics -= {topic}

    def is_paused(self, partition: TopicPartition) -> bool:
        """Whether nothing is read of this partition for now."""
        held = self._partitions.get(partition)
        return held is not None and held.is_paused

    @property
    def topics(self) -> set[str]:
        """The topics of the partitions that are ours."""
        return {partition.topic for partition in list(self._partitions)}

    def tell_topic_ids(self, ids: Mapping[str, str]) -> None:
        """The ids of topics now: one that has changed is read from its beginning. What was delivered is finished."""
        self._told_ids = ids

    def is_current(self, delivery: Delivery) -> bool:
        """Whether its partition is ours under the same assignment, and stays so as far as is known."""
        return self._is_ours(delivery) and not self.handing_over.is_leaving(delivery.partition)

    def _is_ours(self, delivery: Delivery) -> bool:
        held = self._partitions.get(delivery.partition)
        return held is not None and held.epoch == delivery.epoch

    @property
    def assignment_number(self) -> int:
        """Another number after every change of the partitions that are ours."""
        return self._assignment_number

    def stop_taking(self) -> None:
        """Pause everything and hand out nothing more; polling goes on, so that the group keeps this member."""
        with self._changed:
            self._is_taking = False
            self._high.clear()
            self._normal.clear()
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Commit what is finished, leave the group, end the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def poll_age_s(self) -> float:
        """Seconds since the consumer was last polled."""
        return self._clock() - self._last_poll

    @property
    def failure(self) -> AlphaloopError | None:
        """The exception that ended the polling thread."""
        return self._failure

    @property
    def is_assigned(self) -> bool:
        """Whether the group has given this member anything."""
        return bool(self._partitions)

    @property
    def num_in_flight(self) -> int:
        """Messages delivered and not finished."""
        return sum(held.watermark.num_in_flight for held in list(self._partitions.values()))

    @property
    def distance(self) -> int:
        """The largest distance of a watermark behind its newest delivery."""
        return max((held.watermark.distance for held in list(self._partitions.values())), default=0)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
            self._drain_finished()
            self._commit(self._partitions)
        except AlphaloopError as error:
            self._fail(error)
        except Exception as error:
            self._fail(BrokerError(f"the polling thread ended: {reason_of(error)}"))
            log.exception("polling thread ended", extra={"action": "intake_failed"})
        finally:
            self._source.close()

    def _turn(self) -> None:
        self.pulse.beat()
        record = self._source.poll(POLL_S if self._finished.empty() else 0.0)
        self._last_poll = self._clock()
        if record is not None:
            self._deliver(record)
        self._drain_finished()
        if self._told_ids:
            self._begin_anew()
        self._deliver_due()
        self._balance()
        if self._clock() - self._last_commit >= self._commit_interval_s:
            self._last_commit = self._clock()
            self._commit(self._partitions)

    def _deliver(self, record: Record) -> None:
        held = self._partitions.get(TopicPartition(record.topic, record.partition))
        if held is None:
            return
        number, went_back = held.watermark.deliver(record.offset)
        if went_back:
            where = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            log.warning("offsets went back: the topic was made anew or cut", extra={"action": "log_went_back", **where})
        sent = as_sent(record)
        delivery = Delivery(sent, held.epoch, number, None if sent is record else record.topic_partition)
        wait_s = due_in_s(record, self._now())
        if wait_s > 0:
            held.head = (self._clock() + wait_s, delivery)
        else:
            self._hand_out(delivery)

    def _begin_anew(self) -> None:
        """Read topics that were made anew from their beginning."""
        ids, self._told_ids = self._told_ids, {}
        for partition in self._source.rewind_if_made_anew(ids):
            held = self._partitions.get(partition)
            if held is not None:
                held.watermark.begin_anew()
                held.committed = None
                log.warning("%s was made anew", partition.topic, extra={"action": "topic_made_anew"})

    def _deliver_due(self) -> None:
        """Hand out the heads of retry topics that are due."""
        for held in self._partitions.values():
            if held.head is not None and held.head[0] <= self._clock():
                (_, delivery), held.head = held.head, None
                self._hand_out(delivery)

    def _hand_out(self, delivery: Delivery) -> None:
        with self._changed:
            if self._is_taking:
                (self._high if delivery.is_high else self._normal).add(delivery)
                self._changed.notify_all()

    def _drain_finished(self) -> None:
        while True:
            try:
                delivery = self._finished.get_nowait()
            except Empty:
                return
            if self._is_ours(delivery):
                self._partitions[delivery.partition].watermark.finish(delivery.number)

    def _balance(self) -> None:
        pause, resume = [], []
        for partition, held in self._partitions.items():
            buffer = self._high if held.is_high else self._normal
            must_wait = held.watermark.distance >= self._max_distance or held.head is not None or not self._is_taking
            must_wait = must_wait or partition.topic in self._held_topics
            if not held.is_paused and (buffer.is_full or must_wait):
                pause.append(partition)
            elif held.is_paused and buffer.has_room and not must_wait:
                resume.append(partition)
        for partitions, act, state in ((pause, self._source.pause, True), (resume, self._source.resume, False)):
            if partitions:
                act(partitions)
                for partition in partitions:
                    self._partitions[partition].is_paused = state

    def _commit(self, partitions: Iterable[TopicPartition]) -> None:
        offsets = {}
        for partition in partitions:
            held = self._partitions.get(partition)
            if held and held.watermark.committable is not None and held.watermark.committable != held.committed:
                offsets[partition] = held.watermark.committable
        if not offsets:
            return
        try:
            self._source.commit(offsets)
        except BrokerError as error:
            # What is not committed is read again and answered from the record: late, never wrong.
            log.warning("offsets not committed: %s", error, extra={"action": "commit_failed"})
            return
        for partition, offset in offsets.items():
            self._partitions[partition].committed = offset

    def _assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._epoch += 1
        for partition in partitions:
            self._partitions[partition] = _Assigned(Watermark(), self._epoch, is_high(partition.topic))
        self._assignment_number += 1
        log.info("%d partitions assigned", len(partitions), extra={"action": "partitions_assigned"})

    def _revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Let running jobs of these end first, so that their new owner need not decode them again."""
        self.handing_over.begin(partitions)
        self._assignment_number += 1
        self.wake()
        if num_overdue := self.handing_over.wait(self._may_wait):
            log.warning("%d jobs outlast the rebalance", num_overdue, extra={"action": "jobs_overdue"})
        self._drain_finished()
        self._commit(partitions)
        self._forget(partitions)

    def _may_wait(self) -> bool:
        self.pulse.beat()
        return not self._closing.is_set()

    def _lost(self, partitions: Sequence[TopicPartition]) -> None:
        log.warning("%d partitions lost", len(partitions), extra={"action": "partitions_lost"})
        self._forget(partitions)

    def _forget(self, partitions: Sequence[TopicPartition]) -> None:
        gone = set(partitions)
        for partition in gone:
            self._partitions.pop(partition, None)
        self._assignment_number += 1
        with self._changed:
            self._high.drop(gone)
            self._normal.drop(gone)

    def _has_news(self, normal: Room, high: Room) -> bool:
        return bool((normal and self._normal) or (high and self._high))

    def _is_urgent(self) -> bool:
        return self._is_woken or self._failure is not None or self._closing.is_set()

    def _fail(self, error: AlphaloopError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
