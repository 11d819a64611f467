"""A consumer for long jobs: explicit commits, cooperative assignment, and a poll that survives the loss of a broker.

Only the caller commits. Little is fetched ahead, because a paused partition drops its prefetched messages. Every
method belongs to the one thread that polls.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, TypeVar

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from alphaloop.errors import BrokerUnavailable
from alphaloop.kafka.committing import Commits
from alphaloop.kafka.config import DEAD_LETTER_OVERHEAD_BYTES, BrokerWatch, bootstrap_servers, client_config
from alphaloop.kafka.conversion import ours, record_of, theirs
from alphaloop.kafka.errors import MISSING, PASSING, UNREACHABLE, broker_error, mapped
from alphaloop.kafka.membership import Membership, PartitionsCallback
from alphaloop.kafka.records import Record, TopicPartition
from alphaloop.settings import KafkaSettings

log = logging.getLogger(__name__)

Start = Literal["earliest", "latest", "error"]
Answer = TypeVar("Answer")

_MAX_HEARTBEAT_MS: Final = 3000
_PASSING_S: Final = 0.1


class Consumer:
    """One group member, or a group-less reader of whole topics.

    `start` says where a partition without a committed offset begins. alphaloop's groups use `earliest`, because a job
    that was sent before the first worker started must run. Reading from the start again is harmless: a job with a
    recorded outcome is answered from the record. `latest` would skip jobs silently. `error` makes `poll` raise.
    """

    def __init__(
        self, kafka: KafkaSettings, *, group_id: str, client_id: str = "alphaloop", start: Start = "earliest"
    ) -> None:
        self._timeout_s = kafka.request_timeout_s
        self._watch = BrokerWatch(bootstrap_servers(kafka))
        fetch_bytes = kafka.max_message_bytes + DEAD_LETTER_OVERHEAD_BYTES
        own: dict[str, Any] = {
            "group.id": group_id,
            "client.id": client_id,
            "group.protocol": "classic",
            "partition.assignment.strategy": "cooperative-sticky",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": start,
            "isolation.level": "read_committed",
            "session.timeout.ms": kafka.session_timeout_ms,
            "heartbeat.interval.ms": max(1, min(_MAX_HEARTBEAT_MS, kafka.session_timeout_ms // 10)),
            "max.poll.interval.ms": max(300_000, kafka.session_timeout_ms),
            "queued.min.messages": 50,
            "queued.max.messages.kbytes": max(16_384, fetch_bytes >> 10),
            "fetch.queue.backoff.ms": 100,
            "fetch.message.max.bytes": fetch_bytes,
            "fetch.max.bytes": max(16 << 20, fetch_bytes),
            "allow.auto.create.topics": False,
        }
        config = client_config(kafka, own, watch=self._watch)
        self.max_poll_interval_s: Final = float(config["max.poll.interval.ms"]) / 1000
        with mapped("starting a consumer"):
            self._client = ck.Consumer(config)
        self._commits = Commits(self._client)
        self._membership = Membership(self._client)

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
        with mapped("subscribing"):
            self._membership.subscribe(patterns, on_assign=on_assign, on_revoke=on_revoke, on_lost=on_lost)

    def assign_from(
        self, topics: Sequence[str], *, at: Literal["earliest", "latest"], newest: int | None = None
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Read whole topics without joining a group; `latest` means after what is there when this returns.

        `earliest` with `newest` passes over all but so many of the last messages of each partition. Returns of each
        partition the first offset that is there and the offset of the next message. Raises BrokerError when a topic
        does not exist.
        """
        wanted, found = [], {}
        for partition in self._partitions(topics):
            low, high = found[partition] = self.watermarks(partition)
            if newest is not None:
                low = max(low, high - newest)
            offset = low if at == "earliest" else high
            wanted.append(ck.TopicPartition(partition.topic, partition.partition, offset))
        with mapped("assigning partitions"):
            self._client.assign(wanted)
        return found

    def assign_since(self, topics: Sequence[str], since: datetime) -> None:
        """Read whole topics without joining a group, from the first message of each partition that is not older.

        Raises BrokerError when a topic does not exist.
        """
        ends = {partition: self.watermarks(partition)[1] for partition in self._partitions(topics)}
        since_ms = int(since.timestamp() * 1000)
        asked = [ck.TopicPartition(one.topic, one.partition, since_ms) for one in ends]
        found = self._with_retries(
            "asking for offsets by time", lambda: self._client.offsets_for_times(asked, timeout=self._timeout_s)
        )
        for one in found:
            if one.offset < 0:  # nothing so new
                one.offset = ends[TopicPartition(one.topic, one.partition)]
        with mapped("assigning partitions"):
            self._client.assign(found)

    def _partitions(self, topics: Sequence[str]) -> list[TopicPartition]:
        partitions = []
        for topic in topics:
            with mapped(f"reading {topic}"):
                found = self._client.list_topics(topic, timeout=self._timeout_s).topics[topic]
            if found.error is not None:
                raise broker_error(found.error, f"reading {topic}")
            partitions += [TopicPartition(topic, number) for number in found.partitions]
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
            self._judge(error)
            return None
        self._watch.answered()
        return record_of(message)

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
        wanted = [ck.TopicPartition(tp.topic, tp.partition, offset) for tp, offset in offsets.items()]
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
        wanted = theirs(partitions)
        answers = self._with_retries(
            "asking for committed offsets", lambda: self._client.committed(wanted, timeout=self._timeout_s)
        )
        for answer in answers:
            if answer.error is not None:
                raise broker_error(answer.error, f"asking for {answer.topic}[{answer.partition}]")
        return {TopicPartition(a.topic, a.partition): a.offset if a.offset >= 0 else None for a in answers}

    def watermarks(self, partition: TopicPartition) -> tuple[int, int]:
        """The first stored offset and the offset of the next message, from the broker."""
        doing = f"asking for the watermarks of {partition.topic}[{partition.partition}]"
        theirs = ck.TopicPartition(partition.topic, partition.partition)
        answer = self._with_retries(doing, lambda: self._client.get_watermark_offsets(theirs, timeout=self._timeout_s))
        if answer is None:
            raise broker_error(KafkaError(KafkaError._TIMED_OUT), doing)
        low, high = answer
        return low, high

    def _with_retries(self, doing: str, ask: Callable[[], Answer]) -> Answer:
        """Repeat a request for a while that a newly started broker cannot answer yet."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return ask()
            except KafkaException as error:
                if error.args[0].code() not in PASSING or time.monotonic() >= deadline:
                    raise broker_error(error, doing) from error
                time.sleep(_PASSING_S)

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

    def _judge(self, error: KafkaError) -> None:
        code = error.code()
        if error.fatal():
            raise broker_error(error, "polling")
        if code == KafkaError._PARTITION_EOF:
            return
        if code in UNREACHABLE:
            self._watch.on_error(error)
        elif code == KafkaError._MAX_POLL_EXCEEDED:
            # No error: the member left the group and joins again with the next poll.
            log.warning("this member was put out of the group: not polled for max.poll.interval.ms; joining again")
        elif code in MISSING:
            # A pattern, or a topic that does not exist yet: the subscription includes it once it exists.
            log.debug("%s", error.str())
        else:
            raise broker_error(error, "polling")
