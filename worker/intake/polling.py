"""The one thread that owns the consumer: it polls at least once a second, also during long rounds.

Deliveries go into a bounded queue, one for each lane, so that a backlog of jobs keeps out none of the high lane.
Completions come back through a queue and move the low watermark. A partition is paused when its lane is full, when its
watermark lags too far, and while the head of a retry topic is not due; it is resumed when there is room again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from alphaloop.errors import BrokerError, BrokerUnavailable
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import Record, TopicPartition
from alphaloop.kafka.topics import WORKER_CLIENT, ensure_topics
from alphaloop.settings import Settings
from worker.background import BackgroundThread, BoundedQueue
from worker.intake.partitions import AssignedPartition, Delivery, HandingOver

if TYPE_CHECKING:
    from worker.foundation import Foundation

log = logging.getLogger(__name__)

POLL_S: Final = 0.2
#: Messages taken from the client between two looks at partitions and completions, as far as there is room for them.
MOST_AT_ONCE: Final = 64
#: Jobs of a lane that are read ahead, however small: enough for any share between segments, and little to read again.
MAX_BUFFERED: Final = 4096
#: Between two commits of offsets: what ended in between is read again after a crash, and answered from its record.
COMMIT_INTERVAL_S: Final = 1.0
#: Offsets between the oldest unfinished job and the newest taken: what is read again after a restart. Enough for a
#: week in which jobs without a deadline, which wait, and jobs with deadlines, which overtake them, share a topic.
MAX_WATERMARK_DISTANCE: Final = 50_000
#: How soon a topic is noticed that was deleted and made again.
TOPIC_CHECK_S: Final = 30.0
#: The next list of topics waits at most this long for the group to take this member in with the one before, and for
#: the broker to know new topics.
MAX_LIST_S: Final = 60.0
#: How long a rebalance may wait, of max.poll.interval.ms, after which the broker puts a member out of the group.
SHARE_OF_POLL_INTERVAL: Final = 0.2


def make_topics(settings: Settings) -> None:
    """Create missing topics. One that this user may not create does not end the worker; its users say so again."""
    high = [name for name, task in settings.tasks.items() if task.high_topic]
    try:
        ensure_topics(settings.kafka, settings.tasks, high=high)
    except BrokerUnavailable:
        raise
    except BrokerError as error:
        log.error("topics are missing: %s", error.message, extra={"action": "topics_missing", "hint": error.hint or ""})


def open_intake(base: Foundation, group_id: str, topics: Sequence[str], name: str) -> Intake:
    """A consumer of that group, with the limits of the settings. `name` is for logs."""
    settings = base.settings
    consumer = Consumer(settings.kafka, group_id=group_id, client_id=WORKER_CLIENT + base.database_id)
    return Intake(
        consumer,
        topics,
        max_bytes=settings.worker.max_buffered_bytes,
        most_message_bytes=settings.kafka.max_message_bytes,
        hand_over_s=SHARE_OF_POLL_INTERVAL * consumer.max_poll_interval_s,
        name=name,
        now=base.now,
    )


@dataclass(eq=False)
class Intake:
    """Deliveries out, completions in. `take` is called from one thread, `finish`, `wake` and `read_topics` from any.

    `first` are the topics, or `^patterns` of topics, that it reads until `read_topics` says others. The limits hold for
    each lane; `now` says when retries are due. A message has about `most_message_bytes` at most. A rebalance waits up
    to `hand_over_s` for running jobs.
    """

    source: Consumer
    first: Collection[str]
    _: KW_ONLY
    max_bytes: int
    max_jobs: int = MAX_BUFFERED
    most_message_bytes: int
    now: Callable[[], datetime]
    hand_over_s: float = 0.0
    commit_interval_s: float = COMMIT_INTERVAL_S
    max_distance: int = MAX_WATERMARK_DISTANCE
    name: str = "intake"
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._partitions: dict[TopicPartition, AssignedPartition] = {}
        #: Topics of the partitions that are or were ours. Partitions of a topic that was made anew may be missing in
        #: every member's assignment, until a member joins again.
        self.topics: frozenset[str] = frozenset()
        self._lists: SimpleQueue[frozenset[str]] = SimpleQueue()
        self.listed: frozenset[str] = frozenset()  #: what is subscribed
        self._next: frozenset[str] | None = None  # to be subscribed
        self._next_at = 0.0
        self._dropped: frozenset[str] = frozenset()  # by the newest list
        if self.first:
            self._lists.put(frozenset(self.first))
        self._epoch = 0
        self.assignment_number = 0  #: another one after every change of the partitions that are ours
        self._held_topics: frozenset[str] = frozenset()
        self._told_ids: Mapping[str, str] = {}
        self._lanes = {is_high: self._lane() for is_high in (True, False)}
        self._is_taking = True
        self._finished: SimpleQueue[Sequence[Delivery]] = SimpleQueue()
        self.handing_over = HandingOver(self.hand_over_s)  #: what is owed when partitions leave
        self._last_commit = self._last_poll = self.clock()
        self.thread = BackgroundThread(self.name, self._turn, on_failure=self.wake, at_end=self._leave)

    def _lane(self) -> BoundedQueue[Delivery]:
        return BoundedQueue(
            max_items=self.max_jobs,
            max_bytes=self.max_bytes,
            num_bytes_of=lambda delivery: delivery.num_bytes,
            give_up=lambda: True,  # the thread must go on polling, and keeps the bounds by pausing partitions
        )

    def start(self) -> None:
        """Subscribe and begin to poll."""
        self._follow_lists()
        self.thread.start()

    def read_topics(self, topics: Collection[str]) -> None:
        """Read these topics and no others, from soon on. Nothing is started any more of those that are left out."""
        self._lists.put(frozenset(topics))

    def take(
        self, limit: int, timeout_s: float, *, is_high: bool = False, max_bytes: int | None = None
    ) -> list[Delivery]:
        """Up to `limit` deliveries of a lane, as far as `max_bytes` allow, one at least.

        Waits up to `timeout_s` for the first, or for `wake`.

        Raises the exception that ended the polling thread.
        """
        taken = self._lanes[is_high].take(limit, timeout_s, max_bytes=max_bytes)
        self.thread.check()
        return taken

    def wake(self) -> None:
        """Let a `take` return that waits for the normal lane, also without deliveries. So does a high one that came."""
        self._lanes[False].wake()

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

    def tell_topic_ids(self, ids: Mapping[str, str]) -> None:
        """The ids of topics now. If one has changed, the group is left and joined again, and its topic read anew."""
        self._told_ids = ids

    def is_current(self, delivery: Delivery) -> bool:
        """Whether its partition is ours under the same assignment, and stays so as far as is known."""
        where = delivery.partition
        is_staying = where.topic not in self._dropped and not self.handing_over.is_leaving(where)
        return is_staying and self._is_ours(delivery)

    def _is_ours(self, delivery: Delivery) -> bool:
        held = self._partitions.get(delivery.partition)
        return held is not None and held.epoch == delivery.epoch

    def stop_taking(self) -> None:
        """Pause everything and hand out nothing more; polling goes on, so that the group keeps this member."""
        self._is_taking = False
        for lane in self._lanes.values():
            lane.close()

    def close(self, timeout_s: float) -> None:
        """Commit what is finished, leave the group, end the thread."""
        self.thread.end(timeout_s)

    @property
    def poll_age_s(self) -> float:
        """Seconds since the consumer was last polled."""
        return self.clock() - self._last_poll

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
        """The largest distance from a watermark to its newest delivery."""
        return max((held.watermark.distance for held in list(self._partitions.values())), default=0)

    def _leave(self) -> None:
        try:
            if self.thread.failure is None:
                self._drain_finished()
                self._commit_finished(self._partitions.values())
        finally:
            self.source.close()

    def _follow_lists(self) -> None:
        """Subscribe to the next list once every partition that the one before dropped has left.

        So no list is passed over: what was put aside because its topic was left out is delivered again by whoever gets
        its partition, this member too.
        """
        if self._next is None:
            if self._lists.empty():
                return
            self._next, self._next_at = self._lists.get_nowait(), self.clock()
        if any(partition.topic in self._dropped for partition in self._partitions):
            return
        if self.listed and self.clock() < self._next_at + MAX_LIST_S and not self._may_subscribe(self._next):
            return
        before, self.listed, self._next = self.listed, self._next, None
        self._dropped = before - self.listed
        if self._dropped:
            self.assignment_number += 1
            self.wake()
        self.source.subscribe(
            sorted(self.listed), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )

    def _may_subscribe(self, topics: frozenset[str]) -> bool:
        return self.source.has_joined and self.source.knows(sorted(topics - self.listed))

    def _turn(self) -> None:
        self._follow_lists()
        records = self.source.poll_many(self._num_wanted(), POLL_S if self._finished.empty() else 0.0)
        self._last_poll = self.clock()
        self._hand_out(records)
        self._drain_finished()
        if self._told_ids:
            ids, self._told_ids = self._told_ids, {}
            self.source.note_ids(ids)
        self.source.renew_if_made_anew()
        self._pause_and_resume()
        if self.clock() - self._last_commit >= self.commit_interval_s:
            self._last_commit = self.clock()
            # Only while every polled message is delivered: the watermark would pass over a message that is not.
            for partition, position in self.source.positions(list(self._partitions)).items():
                self._partitions[partition].watermark.pass_over(position)
            self._commit_finished(self._partitions.values())

    def _num_wanted(self) -> int:
        """As many messages as find room in either lane, however large they are; one at least, as polls must go on."""
        room = min(lane.num_fitting(self.most_message_bytes) for lane in self._lanes.values())
        return max(1, min(room, MOST_AT_ONCE))

    def _hand_out(self, records: Sequence[Record]) -> None:
        """Put those of the messages, and of earlier ones of retry topics, that are due into their lanes."""
        due, at_s = [], self.clock()
        for record in records:
            held = self._partitions.get(record.topic_partition)
            if held is not None and (delivery := held.deliver(record, self.now, at_s)) is not None:
                due.append(delivery)
        for held in self._partitions.values():
            if held.not_due:
                due += held.take_due(at_s)
        if high := [delivery for delivery in due if delivery.is_high]:
            self._lanes[True].put(high)
            self.wake()
            due = [delivery for delivery in due if not delivery.is_high]
        self._lanes[False].put(due)

    def _pause_and_resume(self) -> None:
        """Pause each partition whose messages have no room or have to wait, and resume it later.

        It is resumed when half of its lane is free, because a paused partition throws away what the client fetched.
        """
        is_full = {is_high: not lane.num_free for is_high, lane in self._lanes.items()}
        has_room = {is_high: lane.is_half_free for is_high, lane in self._lanes.items()}
        pause, resume = [], []
        for partition, held in self._partitions.items():
            must_wait = held.watermark.distance >= self.max_distance or bool(held.not_due)
            must_wait = must_wait or not self._is_taking or partition.topic in self._held_topics
            if not held.is_paused and (is_full[held.is_high] or must_wait):
                pause.append(partition)
            elif held.is_paused and has_room[held.is_high] and not must_wait:
                resume.append(partition)
        for chosen, act, state in ((pause, self.source.pause, True), (resume, self.source.resume, False)):
            if chosen:
                act(chosen)
                for partition in chosen:
                    self._partitions[partition].is_paused = state

    def _commit_finished(self, partitions: Iterable[AssignedPartition]) -> None:
        """Commit how far each of these is finished. A commit that fails is logged: the next says the same or more."""
        wanted = [(held, offset) for held in partitions if (offset := held.to_commit) is not None]
        if not wanted:
            return
        try:
            self.source.commit({held.partition: offset for held, offset in wanted})
        except BrokerError as error:
            # What is not committed is read again and answered from the record: late, never wrong.
            log.warning("offsets not committed: %s", error, extra={"action": "commit_failed"})
            return
        for held, offset in wanted:
            held.committed = offset

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
        self.topics |= {partition.topic for partition in partitions}
        self.assignment_number += 1
        log.info("%d partitions assigned", len(partitions), extra={"action": "partitions_assigned"})

    def _revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Let running jobs of these end first, so that their new owner need not decode them again."""
        self.handing_over.begin(partitions)
        self.assignment_number += 1
        self.wake()
        if num_overdue := self.handing_over.wait(self._may_wait):
            log.warning("%d jobs outlast the rebalance", num_overdue, extra={"action": "jobs_overdue"})
        self._drain_finished()
        self._commit_finished(
            [self._partitions[partition] for partition in partitions if partition in self._partitions]
        )
        self._forget(partitions)

    def _may_wait(self) -> bool:
        self.thread.pulse.beat()
        return not self.thread.is_ending

    def _lost(self, partitions: Sequence[TopicPartition]) -> None:
        log.warning("%d partitions lost", len(partitions), extra={"action": "partitions_lost"})
        self._forget(partitions)

    def _forget(self, partitions: Sequence[TopicPartition]) -> None:
        gone = set(partitions)
        for partition in gone:
            self._partitions.pop(partition, None)
        self.assignment_number += 1
        for lane in self._lanes.values():
            lane.drop(lambda delivery: delivery.partition in gone)


@dataclass(eq=False)
class TopicWatch:
    """Asks the broker for the ids of the topics that intakes read, and passes them on. One thread uses it.

    Offsets alone do not always show that a topic was deleted and made again. `ask` gives ids by topic and raises
    BrokerError.
    """

    intakes: Sequence[Intake]
    ask: Callable[[Collection[str]], Mapping[str, str]]
    _: KW_ONLY
    every_s: float = TOPIC_CHECK_S

    def __post_init__(self) -> None:
        self._due = time.monotonic()
        self._assignments: list[int] = []

    def check(self) -> None:
        """Ask if that is due: after each assignment, and each `every_s`."""
        assignments = [intake.assignment_number for intake in self.intakes]
        if time.monotonic() < self._due and assignments == self._assignments:
            return
        self._due, self._assignments = time.monotonic() + self.every_s, assignments
        topics = set().union(*(intake.topics for intake in self.intakes))
        try:
            ids = self.ask(topics)
        except BrokerError as error:
            log.debug("ids of topics: %s", error.message)  # the poll says that the broker is away
            return
        for intake in self.intakes:
            intake.tell_topic_ids(ids)
