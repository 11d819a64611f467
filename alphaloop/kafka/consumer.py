"""A consumer for long jobs: explicit commits, cooperative assignment, and a poll that survives the loss of a broker.

Only the caller commits. Little is fetched ahead, because a paused partition drops its prefetched messages. Every
method belongs to the one thread that polls.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import confluent_kafka as ck
from confluent_kafka import KafkaException

from alphaloop.errors import BrokerError, BrokerUnavailable
from alphaloop.kafka.committing import Commits
from alphaloop.kafka.config import BrokerWatch, bootstrap_servers, client_config
from alphaloop.kafka.consumer_config import Start, consumer_config
from alphaloop.kafka.conversion import ours, record_of, theirs
from alphaloop.kafka.errors import broker_error, mapped
from alphaloop.kafka.membership import Membership, PartitionsCallback, Subscription
from alphaloop.kafka.offset_queries import OffsetQueries
from alphaloop.kafka.poll_errors import judge
from alphaloop.kafka.records import Record, TopicPartition
from alphaloop.kafka.topic_ids import KnownTopicIds, TopicIds, committed_ids
from alphaloop.settings import KafkaSettings

log = logging.getLogger(__name__)

#: Of `read_until`: records that are taken at once, and how long one is waited for.
_READ_AT_ONCE: Final = 256
_READ_POLL_S: Final = 0.1


class Consumer:
    """One group member, or a group-less reader of whole topics.

    `start` says where a partition without a committed offset begins. alphaloop's groups use `earliest`, because a job
    that was sent before the first worker started must run. Reading from the start again is harmless: a job with a
    recorded outcome is answered from the record. `latest` would skip jobs silently. `error` makes `poll` raise.
    """

    def __init__(
        self, kafka: KafkaSettings, *, group_id: str, client_id: str = "alphaloop", start: Start = "earliest"
    ) -> None:
        self._kafka, self._timeout_s = kafka, kafka.request_timeout_s
        self._own = consumer_config(kafka, group_id=group_id, client_id=client_id, start=start)
        self._ids, self._ask_ids = KnownTopicIds(), TopicIds(kafka).ask
        self._subscription: Subscription | None = None
        config = self._start_client()
        self.max_poll_interval_s: Final = float(config["max.poll.interval.ms"]) / 1000

    def _start_client(self) -> Mapping[str, Any]:
        """Go on with a client that knows nothing of any topic; returns its properties."""
        self._watch = BrokerWatch(bootstrap_servers(self._kafka))
        config = client_config(self._kafka, self._own, watch=self._watch)
        with mapped("starting a consumer"):
            self._client = ck.Consumer(config)
        self._commits = Commits(self._client)
        self._offsets = OffsetQueries(self._client, self._timeout_s)
        self._membership = Membership(self._client, self._starts)
        return config

    def subscribe(
        self,
        patterns: Sequence[str],
        *,
        on_assign: PartitionsCallback,
        on_revoke: PartitionsCallback,
        on_lost: PartitionsCallback,
    ) -> None:
        """Join the group for topics and `^patterns`; the callbacks run inside `poll` and `close`.

        `on_assign` runs once its partitions can be paused, `on_revoke` while its partitions can still be committed. In
        `on_lost` other members may own them, so nothing may be committed. Each gets only the difference. A commit in
        `on_revoke` can raise StaleAssignment, because a member that was removed from the group is called late.
        """
        self._subscription = Subscription(tuple(patterns), on_assign, on_revoke, on_lost)
        with mapped("subscribing"):
            self._membership.subscribe(self._subscription)

    def assign_from(
        self, topics: Sequence[str], *, at: Literal["earliest", "latest"], newest: int | None = None
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Read whole topics without joining a group; `latest` means after what is there when this returns.

        `earliest` with `newest` passes over all but so many of the last messages of each partition. Returns of each
        partition the first offset that is there and the offset of the next message. Raises BrokerError when a topic
        does not exist.
        """
        wanted, found = [], self.bounds(topics)
        for partition, (low, high) in found.items():
            if newest is not None:
                low = max(low, high - newest)
            offset = low if at == "earliest" else high
            wanted.append(ck.TopicPartition(partition.topic, partition.partition, offset))
        with mapped("assigning partitions"):
            self._client.assign(wanted)
        return found

    def assign_since(self, topics: Sequence[str], since: datetime) -> dict[TopicPartition, tuple[int, int]]:
        """Read whole topics without joining a group, from the first message of each partition that is not older.

        Returns of each partition the offset where it begins and the offset of the next message. Raises BrokerError when
        a topic does not exist.
        """
        ends = {partition: end for partition, (_, end) in self.bounds(topics).items()}
        found = self._offsets.since(since, ends)
        with mapped("assigning partitions"):
            self._client.assign(found)
        begins = {TopicPartition(one.topic, one.partition): one.offset for one in found}
        return {partition: (begins[partition], end) for partition, end in ends.items()}

    def assign_at(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read these partitions without joining a group, each from its offset. Raises BrokerError."""
        with mapped("assigning partitions"):
            self._client.assign([ck.TopicPartition(*partition, offset) for partition, offset in offsets.items()])

    def note_ids(self, ids: Mapping[str, str]) -> None:
        """Note the ids of topics now, for `renew_if_made_anew`."""
        self._ids.learn(ids)

    def renew_if_made_anew(self) -> None:
        """Replace the client if a topic that it reads was made anew: the group is left and joined again.

        librdkafka believes a leader only where its epoch grows, and a topic made anew begins with epoch 0
        (confluentinc/librdkafka#4898). So a client that knew the old topic may never find a leader of the new one.
        `on_lost` runs for the partitions of such topics, then `on_revoke` for all others. Offsets are committed beside
        the old topic's id, so that they count for nobody, until the client is replaced: when every broker should know
        the new topic, and not while a commit is under way or no broker answers.
        """
        topics = self._ids.made_anew
        if not topics or self._subscription is None or self._watch.is_lost or self._commits.is_waiting:
            return
        names = ", ".join(sorted(topics))
        log.warning("made anew: %s; the consumer is replaced", names, extra={"action": "consumer_replaced"})
        with mapped("leaving the group"):
            self._membership.retire(topics, self._timeout_s)
        self._ids.begin_anew()
        self._start_client()
        with mapped("subscribing"):
            self._membership.subscribe(self._subscription)

    def _starts(self, partitions: list[ck.TopicPartition]) -> list[ck.TopicPartition]:
        """Where newly assigned partitions begin: at the committed offset, unless that is of a topic that is gone.

        Without an answer of the broker they begin at the committed offset.
        """
        try:
            committed = committed_ids(self._client.committed(partitions, timeout=self._timeout_s))
            ids = self._ask_ids({one.topic for one in partitions})
        except (KafkaException, BrokerError):
            return partitions
        self._ids.learn(ids)
        for one in partitions:
            now = ids.get(one.topic)
            if now is not None and committed.get(one.topic, {now}) != {now}:
                log.warning("%s was made anew: read from its beginning", one.topic, extra={"action": "topic_made_anew"})
                one.offset = ck.OFFSET_BEGINNING
        return partitions

    def poll(self, timeout_s: float) -> Record | None:
        """The next record; None after `timeout_s` or a client event.

        A lost broker is logged once and yields None: keep polling. Raises FatalBrokerError when the client is dead,
        BrokerError for what only an operator can fix (no permission, no offset to start from), and whatever a callback
        raised.
        """
        with mapped("polling"):
            message = self._client.poll(timeout_s)
        if message is None:
            return None
        if (error := message.error()) is not None:
            judge(error, self._watch)
            return None
        self._watch.answered()
        return record_of(message)

    def poll_many(self, limit: int, timeout_s: float) -> list[Record]:
        """The next record, as `poll` waits for it, and those behind it that are here already, up to `limit`.

        Raises as `poll` does; records that were taken with the error are then lost to this member.
        """
        first = self.poll(timeout_s)
        if first is None or limit <= 1:
            return [] if first is None else [first]
        records = [first]
        with mapped("polling"):
            messages = self._client.consume(limit - 1, 0)
        for message in messages:
            if (error := message.error()) is not None:
                judge(error, self._watch)
            else:
                records.append(record_of(message))
        return records

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Deliver nothing from these until `resume`; what was fetched ahead is fetched again then."""
        with mapped("pausing partitions"):
            self._client.pause(theirs(partitions))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Deliver from these again."""
        with mapped("resuming partitions"):
            self._client.resume(theirs(partitions))

    def assignment(self) -> set[TopicPartition]:
        """The partitions assigned to this member, as far as the client knows."""
        with mapped("asking for the assignment"):
            return set(ours(self._client.assignment()))

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Store the *next* offset to read of each partition and wait for the broker's answer.

        The broker accepts a lower offset than before; the caller must not send one. Raises StaleAssignment when the
        group has rebalanced, BrokerUnavailable at once while no broker answers and after `kafka.request_timeout_s`
        without an answer (the commit may still arrive; until then further ones are refused), and BrokerError with the
        partition otherwise.
        """
        if not offsets:
            return
        if self._watch.is_lost or self._commits.is_waiting:
            raise BrokerUnavailable("committing offsets: no broker answers now", hint="the next commit may succeed")
        wanted = [
            ck.TopicPartition(tp.topic, tp.partition, offset, metadata=self._ids.beside(tp.topic))
            for tp, offset in offsets.items()
        ]
        with mapped("committing offsets"):
            answers = (
                self._commits.here(wanted)
                if self._membership.is_revoking
                else self._commits.within(wanted, self._timeout_s)
            )
        for answer in answers:
            if answer.error is not None:
                raise broker_error(answer.error, f"committing {answer.topic}[{answer.partition}] at {answer.offset}")
        self._watch.answered()

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int | None]:
        """The group's committed offsets, the next to read; None if nothing was committed."""
        return self._offsets.committed(partitions)

    def bounds(self, topics: Sequence[str]) -> dict[TopicPartition, tuple[int, int]]:
        """`watermarks` of every partition of the topics. Raises BrokerError when a topic does not exist."""
        return self._offsets.bounds(self._offsets.partitions(topics))

    def watermarks(self, partition: TopicPartition) -> tuple[int, int]:
        """The first stored offset, and the end, below which no transaction is open; from the broker."""
        return self._offsets.bounds([partition])[partition]

    def positions(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after what was polled of each partition; a partition of which nothing was polled is left out.

        It passes over offsets without a message: markers of transactions, aborted messages, what was compacted away.
        """
        with mapped("asking for positions"):
            answers = self._client.position(theirs(partitions))
        return {TopicPartition(one.topic, one.partition): one.offset for one in answers if one.offset >= 0}

    def read_until(self, unread: dict[TopicPartition, int]) -> Iterator[Record | None]:
        """The records of the assigned partitions until each was read to its offset in `unread`; None if none came.

        A partition that was read so far is taken out of `unread`, also where its last offsets hold no message. The
        caller may take out others. Records above the offsets may come too. Raises as `poll` does.
        """
        while unread:
            records = self.poll_many(_READ_AT_ONCE, 0.0)
            if not records:
                for partition, position in self.positions(unread).items():
                    if position >= unread[partition]:
                        del unread[partition]
                if not unread:
                    return
                records = self.poll_many(_READ_AT_ONCE, _READ_POLL_S)
                if not records:
                    yield None
            for record in records:
                if record.offset + 1 >= unread.get(record.topic_partition, sys.maxsize):
                    del unread[record.topic_partition]
                yield record

    def close(self) -> None:
        """Leave the group, so that other members take over at once; calls `on_revoke`. Safe to call twice."""
        if not self._commits.settled(self._timeout_s):
            # Closing would free what the waiting commit uses; without a broker there is no group to leave.
            log.warning("a commit still waits for the broker; this member leaves its group by silence")
            return
        with mapped("leaving the group"):
            try:
                self._membership.leave(self._timeout_s)
            finally:
                with contextlib.suppress(RuntimeError):  # it is closed already
                    self._client.close()
