"""The one thread that owns the consumer: it polls at least once a second, also during long rounds.

Deliveries go into a bounded buffer, one for each lane; completions come back through a queue and move the low
watermark. A partition is paused when the buffer is full, when its watermark lags too far behind, and while the head of
a retry topic is not due; it is resumed when there is room again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import Final

from alphaloop.errors import AlphaloopError, BrokerError, reason_of
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.liveness import Pulse
from worker.intake.assigned import AssignedPartition, commit_finished, deliveries_of, pass_over_gaps, pause_and_resume
from worker.intake.buffer import NO_ROOM, Room
from worker.intake.delivery import Delivery, RecordSource
from worker.intake.handing_over import HandingOver
from worker.intake.lane_buffers import LaneBuffers

__all__ = ["Delivery", "Intake", "RecordSource"]

log = logging.getLogger(__name__)

POLL_S: Final = 0.2
#: Messages taken from the client between two looks at partitions and completions, as far as there is room for them.
MOST_AT_ONCE: Final = 64


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
        most_message_bytes: int,
        hand_over_s: float = 0.0,
        name: str = "intake",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_buffered` and `max_buffered_bytes` are for each lane; `now` says when retries are due.

        A message has about `most_message_bytes` at most.
        """
        self._source = source
        self._patterns = patterns
        self._max_distance = max_distance
        self._commit_interval_s = commit_interval_s
        self._clock = clock
        self._now = now
        self._most_message_bytes = most_message_bytes
        self._partitions: dict[TopicPartition, AssignedPartition] = {}
        self._topics: frozenset[str] = frozenset()
        self._epoch = 0
        self._assignment_number = 0
        self._held_topics: frozenset[str] = frozenset()
        self._told_ids: Mapping[str, str] = {}
        self._lanes = LaneBuffers(max_items=max_buffered, max_bytes=max_buffered_bytes)
        self._finished: SimpleQueue[Sequence[Delivery]] = SimpleQueue()
        self.handing_over = HandingOver(hand_over_s)  #: what is owed when partitions leave
        self._closing = threading.Event()
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
        return self._lanes.take(limit, timeout_s, max_bytes=max_bytes, high=high)

    def wake(self) -> None:
        """Let a waiting `take` return, also without deliveries."""
        self._lanes.wake()

    def finish(self, deliveries: Iterable[Delivery]) -> None:
        """These messages need never be read again."""
        done = list(deliveries)
        self._finished.put(done)
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
    def topics(self) -> frozenset[str]:
        """The topics of the partitions that are or were ours.

        Partitions of a topic that was made anew may be missing in every member's assignment, until one joins again.
        """
        return self._topics

    def tell_topic_ids(self, ids: Mapping[str, str]) -> None:
        """The ids of topics now. If one has changed, the group is left and joined again, and its topic read anew."""
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
        self._lanes.close()

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
        return self._lanes.failure

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
            commit_finished(self._source, self._partitions.values())
        except AlphaloopError as error:
            self._lanes.fail(error)
        except Exception as error:
            self._lanes.fail(BrokerError(f"the polling thread ended: {reason_of(error)}"))
            log.exception("polling thread ended", extra={"action": "intake_failed"})
        finally:
            self._source.close()

    def _turn(self) -> None:
        self.pulse.beat()
        records = self._source.poll_many(self._num_wanted(), POLL_S if self._finished.empty() else 0.0)
        self._last_poll = self._clock()
        self._lanes.put(deliveries_of(records, self._partitions, self._now, self._clock()))
        self._drain_finished()
        if self._told_ids:
            ids, self._told_ids = self._told_ids, {}
            self._source.note_ids(ids)
        self._source.renew_if_made_anew()
        pause_and_resume(self._source, self._partitions, self._lanes, self._max_distance, self._held_topics)
        if self._clock() - self._last_commit >= self._commit_interval_s:
            self._last_commit = self._clock()
            pass_over_gaps(self._source, self._partitions)
            commit_finished(self._source, self._partitions.values())

    def _num_wanted(self) -> int:
        """As many messages as find room in either lane, however large they are; one at least, as polls must go on."""
        room = min(lane.num_sure(self._most_message_bytes) for lane in (self._lanes.high, self._lanes.normal))
        return max(1, min(room, MOST_AT_ONCE))

    def _drain_finished(self) -> None:
        while True:
            try:
                done = self._finished.get_nowait()
            except Empty:
                return
            for delivery in done:
                if self._is_ours(delivery):
                    self._partitions[delivery.partition].watermark.finish(delivery.number)

    def _assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._epoch += 1
        for partition in partitions:
            self._partitions[partition] = AssignedPartition(partition, self._epoch)
        self._topics |= {partition.topic for partition in partitions}
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
        commit_finished(self._source, [self._partitions[one] for one in partitions if one in self._partitions])
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
        self._lanes.drop(gone)
