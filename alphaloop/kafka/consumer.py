"""A consumer for long jobs: explicit commits, cooperative assignment, and a poll that survives the loss of a broker.

Only the caller commits. Little is fetched ahead, because a paused partition drops its prefetched messages. Every
method belongs to the one thread that polls.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from alphaloop.errors import BrokerError, BrokerUnavailable
from alphaloop.kafka.client import (
    DEAD_LETTER_OVERHEAD_BYTES,
    MISSING,
    REQUEST_TIMEOUT_S,
    UNREACHABLE,
    BrokerWatch,
    bootstrap_servers,
    broker_error,
    client_config,
    mapped,
)
from alphaloop.kafka.offsets import OffsetQueries, Record, TopicPartition, ours, record_of, theirs
from alphaloop.kafka.topics import KnownTopicIds, committed_ids, topic_ids
from alphaloop.settings import KafkaSettings

log = logging.getLogger(__name__)
_MAX_HEARTBEAT_MS: Final = 3000
PartitionsCallback = Callable[[Sequence[TopicPartition]], None]
_QUIET_S: Final = 0.02
#: `knows` gives a broker this long; later it is asked again.
_KNOWN_WITHIN_S: Final = 1.0
#: Records that `read_until` takes at once, and how long it waits for partition.
_READ_AT_ONCE: Final = 256
_READ_POLL_S: Final = 0.1


class Consumer:
    """One group member, or a group-less reader of whole topics.

    A partition without a committed offset begins with its first message, because a job that was sent before the first
    worker started must run. Reading from the start again is harmless: a job with a recorded outcome is answered from
    the record.
    """

    def __init__(self, kafka: KafkaSettings, *, group_id: str, client_id: str = "alphaloop") -> None:
        self._kafka, self._timeout_s, self._prefix = kafka, REQUEST_TIMEOUT_S, kafka.prefix
        self._own = _member_config(kafka, group_id=group_id, client_id=client_id)
        self._ids = KnownTopicIds()
        self._subscription: _Subscription | None = None
        config = self._start_client()
        self.max_poll_interval_s: Final = float(config["max.poll.interval.ms"]) / 1000

    def _start_client(self) -> Mapping[str, Any]:
        """Go on with a client that knows nothing of any topic; returns its properties."""
        self._watch = BrokerWatch(bootstrap_servers(self._kafka))
        config = client_config(self._kafka, self._own, watch=self._watch)
        with mapped("starting a consumer"):
            self._client = ck.Consumer(config)
        self._commits = _Commits(self._client)
        self._offsets = OffsetQueries(self._client, self._timeout_s, self._prefix)
        self._membership = _Membership(self._client, self._starts, self._prefix)
        return config

    def subscribe(
        self,
        patterns: Sequence[str],
        *,
        on_assign: PartitionsCallback,
        on_revoke: PartitionsCallback,
        on_lost: PartitionsCallback,
    ) -> None:
        """Join the group for topics and `^patterns` of the cluster's; the callbacks run inside `poll` and `close`.

        Called again, it changes what this member reads: only partitions of topics that are left out are revoked, and
        their offsets stay for the members that read these. Without any topic the group is left until the next call.

        `on_assign` runs once its partitions can be paused, `on_revoke` while its partitions can still be committed. In
        `on_lost` other members may own them, so nothing may be committed. Each gets only the difference. A commit in
        `on_revoke` can raise StaleAssignment, because a member that was removed from the group is called late.
        """
        self._subscription = _Subscription(tuple(patterns), on_assign, on_revoke, on_lost)
        with mapped("subscribing"):
            self._membership.subscribe(self._subscription)

    @property
    def has_joined(self) -> bool:
        """Whether the group has named this member. Until then it must not be subscribed to anything else.

        librdkafka keeps a new subscription until a rebalance under way is over, but not until a first join is over:
        there an assertion ends the process (rd_kafka_cgrp_modify_subscription).
        """
        with mapped("asking for the member's name"):
            return bool(self._client.memberid())

    def knows(self, topics: Iterable[str]) -> bool:
        """Whether the client knows these topics; it asks the broker about each. False where it does not answer soon.

        A member of a group must not be subscribed to others in place of some that it reads: librdkafka would first ask
        about them, then lose the partitions of those that are left out, and never join again unless it leads the group
        (rd_kafka_cgrp_metadata_update_check).
        """
        try:
            return all(
                self._client.list_topics(name, timeout=_KNOWN_WITHIN_S).topics[name].error is None
                for name in map(self._kafka.named, topics)
            )
        except KafkaException as error:
            log.debug("asking about topics: %s", error)
            return False

    def assign_from(
        self, topics: Sequence[str], *, at: Literal["earliest", "latest"], newest: int | None = None
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Read whole topics without joining a group; `latest` means after what is there when this returns.

        `earliest` with `newest` reads at most this number of last messages of each partition. Returns each partition's
        first stored offset and the offset of the next message. Raises BrokerError when a topic does not exist.
        """
        bounds = self.bounds(topics)
        oldest = {
            partition: low if newest is None else max(low, end - newest) for partition, (low, end) in bounds.items()
        }
        self.assign_at(oldest if at == "earliest" else {partition: end for partition, (_, end) in bounds.items()})
        return bounds

    def assign_since(self, topics: Sequence[str], since: datetime) -> dict[TopicPartition, tuple[int, int]]:
        """Read whole topics without joining a group, from the first message of each partition that is not older.

        Returns the offset where each partition begins and the offset of its next message. Raises BrokerError when a
        topic does not exist.
        """
        bounds = self.bounds_since(topics, since)
        self.assign_at({partition: begin for partition, (begin, _) in bounds.items()})
        return bounds

    def bounds_since(self, topics: Sequence[str], since: datetime) -> dict[TopicPartition, tuple[int, int]]:
        """What `assign_since` returns, and nothing is assigned."""
        ends = {partition: end for partition, (_, end) in self.bounds(topics).items()}
        begins = self._offsets.since(since, ends)
        return {partition: (begins[partition], end) for partition, end in ends.items()}

    def assign_at(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Read these partitions without joining a group, each from its offset. Raises BrokerError."""
        with mapped("assigning partitions"):
            self._client.assign([theirs(partition, self._prefix, offset) for partition, offset in offsets.items()])

    def note_ids(self, ids: Mapping[str, str]) -> None:
        """Note the ids of topics now, for `renew_if_made_anew`."""
        self._ids.learn(ids)

    def renew_if_made_anew(self) -> None:
        """Replace the client if a topic that it reads was made anew: the group is left and joined again.

        librdkafka believes a leader only where its epoch grows, and a topic made anew begins with epoch 0
        (confluentinc/librdkafka#4898). So a client that knew the old topic may never find a leader of the new one.
        `on_lost` runs for the partitions of such topics, then `on_revoke` for all others. Offsets are committed beside
        the old topic's id, so that no reader takes them, until the client is replaced: when every broker should know
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
            ids = topic_ids(self._kafka, {ours(partition, self._prefix).topic for partition in partitions})
        except (KafkaException, BrokerError):
            return partitions
        self._ids.learn(ids)
        for partition in partitions:
            topic = partition.topic
            now = ids.get(topic.removeprefix(self._prefix))
            if now is not None and committed.get(topic, {now}) != {now}:
                log.warning("%s was made anew: read from its beginning", topic, extra={"action": "topic_made_anew"})
                partition.offset = ck.OFFSET_BEGINNING
        return partitions

    def poll(self, timeout_s: float) -> Record | None:
        """The next record; None after `timeout_s` or a client event.

        A lost broker is logged once and yields None: keep polling. Raises FatalBrokerError when the client is dead,
        BrokerError for what only an operator can fix (no permission), and whatever a callback
        raised.
        """
        with mapped("polling"):
            message = self._client.poll(timeout_s)
        if message is None:
            return None
        if (error := message.error()) is not None:
            _judge(error, self._watch)
            return None
        self._watch.answered()
        return record_of(message, self._prefix)

    def poll_many(self, limit: int, timeout_s: float) -> list[Record]:
        """The next record, as `poll` waits for it, and the next ones that were fetched already, up to `limit`.

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
                _judge(error, self._watch)
            else:
                records.append(record_of(message, self._prefix))
        return records

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Deliver nothing from these until `resume`; what was fetched ahead is fetched again then."""
        with mapped("pausing partitions"):
            self._client.pause([theirs(partition, self._prefix) for partition in partitions])

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Deliver from these again."""
        with mapped("resuming partitions"):
            self._client.resume([theirs(partition, self._prefix) for partition in partitions])

    def assignment(self) -> set[TopicPartition]:
        """The partitions assigned to this member, as far as the client knows."""
        with mapped("asking for the assignment"):
            return {ours(partition, self._prefix) for partition in self._client.assignment()}

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Store the *next* offset to read of each partition and wait for the broker's answer.

        The broker accepts a lower offset than before; the caller must not send one. Raises StaleAssignment when the
        group has rebalanced, BrokerUnavailable at once while no broker answers and after `REQUEST_TIMEOUT_S`
        without an answer (the commit may still arrive; until then further ones are refused), and BrokerError with the
        partition otherwise.
        """
        if not offsets:
            return
        if self._watch.is_lost or self._commits.is_waiting:
            raise BrokerUnavailable("committing offsets: no broker answers now", hint="the next commit may succeed")
        wanted = [
            theirs(partition, self._prefix, offset, self._ids.beside(partition.topic))
            for partition, offset in offsets.items()
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
        """Each partition's first stored offset and its end, below which no transaction is open.

        Raises BrokerError when a topic does not exist.
        """
        return self._offsets.bounds(self._offsets.partitions(topics))

    def positions(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after what was polled of each partition; a partition of which nothing was polled is left out.

        It passes over offsets without a message: markers of transactions, aborted messages, what was compacted away.
        """
        with mapped("asking for positions"):
            answers = self._client.position([theirs(partition, self._prefix) for partition in partitions])
        return {ours(partition, self._prefix): partition.offset for partition in answers if partition.offset >= 0}

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

    def read_through(self, unread: dict[TopicPartition, int]) -> Iterator[Record]:
        """As `read_until`. Raises BrokerUnavailable too, where nothing comes for as long as a request may take."""
        deadline = time.monotonic() + self._timeout_s
        for record in self.read_until(unread):
            if record is not None:
                yield record
                deadline = time.monotonic() + self._timeout_s
            elif time.monotonic() >= deadline:
                raise BrokerUnavailable(f"{len(unread)} partitions could not be read to their end")

    def close(self) -> None:
        """Leave the group, so that other members take over at once; calls `on_revoke`. Safe to call twice."""
        if not self._commits.settled(self._timeout_s):
            # Closing would free what the waiting commit uses; without a broker there is no group to leave.
            log.warning("commit pending; leaving the group by session timeout")
            return
        with mapped("leaving the group"):
            try:
                self._membership.leave(self._timeout_s)
            finally:
                with contextlib.suppress(RuntimeError):  # it is closed already
                    self._client.close()


@dataclass(eq=False)
class _Membership:
    """The membership of one client in its group: what runs when partitions come and go, and how it leaves.

    The thread that polls the client uses it.
    """

    client: ck.Consumer
    starts: Callable[[list[ck.TopicPartition]], list[ck.TopicPartition]]  #: where newly assigned partitions begin
    prefix: str  #: of topics, as the cluster knows them
    is_revoking: bool = field(default=False, init=False)  #: whether `on_revoke` runs
    _subscription: _Subscription | None = field(default=None, init=False)  #: while subscribed
    _given_up: frozenset[TopicPartition] = field(default=frozenset(), init=False)
    _is_retired: bool = field(default=False, init=False)
    _num_rebalances: int = field(default=0, init=False)

    def subscribe(self, subscription: _Subscription) -> None:
        """Join the group, or change what is read in it. Raises KafkaException."""
        self._subscription = subscription
        if not subscription.patterns:
            self.client.unsubscribe()
            return
        self.client.subscribe(
            [name if name.startswith("^") else self.prefix + name for name in subscription.patterns],
            on_assign=lambda _, partitions: self._assigned(partitions, subscription.on_assign),
            on_revoke=lambda _, partitions: self._taken(partitions, subscription.on_revoke, is_revoking=True),
            on_lost=lambda _, partitions: self._taken(partitions, subscription.on_lost, is_revoking=False),
        )

    def _assigned(self, partitions: list[ck.TopicPartition], tell: PartitionsCallback) -> None:
        if self._is_retired:
            return
        self._num_rebalances += 1
        self.client.incremental_assign(self.starts(partitions))
        # librdkafka remembers that a partition was paused, also while it belongs to another member.
        self.client.resume(partitions)
        tell([ours(partition, self.prefix) for partition in partitions])

    def _taken(self, partitions: list[ck.TopicPartition], tell: PartitionsCallback, *, is_revoking: bool) -> None:
        if self._is_retired:
            return
        self._num_rebalances += 1
        self.is_revoking = is_revoking
        try:
            tell(self._held(partitions))
        finally:
            self.is_revoking = False
            self.client.incremental_unassign(partitions)

    def retire(self, gone: Set[str], timeout_s: float) -> None:
        """Leave the group, as `leave` does, so that another client of this process can join it.

        First the partitions of the topics `gone` are lost; the others are revoked. No callback runs after this.
        """
        subscription = self._subscription
        if subscription is None:
            return
        self._given_up = frozenset(held for held in self._held(self.client.assignment()) if held.topic in gone)
        if self._given_up:
            subscription.on_lost(sorted(self._given_up))
        self.leave(timeout_s)
        self._is_retired = True
        if left := self._held(self.client.assignment()):
            subscription.on_lost(left)
        # In a thread of its own, because closing has no time limit. The group was left already.
        threading.Thread(target=self._close, name="kafka-close", daemon=True).start()

    def leave(self, timeout_s: float) -> None:
        """Before a close: unsubscribe, and poll until no partition is left and no callback has run for a moment.

        Polls at most for `timeout_s` after the last callback.

        librdkafka runs callbacks in its close, too. A callback that unassigns or commits there races with the end of
        the group: the call waits for ever with Python's global lock held, or an assertion ends the process
        (librdkafka's issues 4041 and 4884). Here they run in `poll`. Raises the first exception of a callback, when
        all have run.
        """
        if self._subscription is None:
            return
        self._subscription = None
        deadline = time.monotonic() + timeout_s
        failure: Exception | None = None
        self.client.unsubscribe()
        is_over = False
        while not is_over and time.monotonic() < deadline:
            num_before, is_quiet = self._num_rebalances, False
            try:
                is_quiet = self.client.poll(_QUIET_S) is None and self._num_rebalances == num_before
            except Exception as error:
                failure = failure or error
            if self._num_rebalances != num_before:
                deadline = time.monotonic() + timeout_s
            is_over = is_quiet and not self.client.assignment()
        if failure is not None:
            raise failure

    def _close(self) -> None:
        with contextlib.suppress(KafkaException, RuntimeError):
            self.client.close()

    def _held(self, partitions: list[ck.TopicPartition]) -> list[TopicPartition]:
        return [held for partition in partitions if (held := ours(partition, self.prefix)) not in self._given_up]


@dataclass(frozen=True, slots=True)
class _Subscription:
    """What a member reads, and what is called when partitions come and go."""

    patterns: tuple[str, ...]
    on_assign: PartitionsCallback
    on_revoke: PartitionsCallback
    on_lost: PartitionsCallback


class _Commits:
    """The commits of one client, with the time limit that the client's own lack.

    One at a time; the caller checks `is_waiting` before the next.
    """

    def __init__(self, client: ck.Consumer) -> None:
        self._client = client
        self._thread: threading.Thread | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a commit that took too long is still under way."""
        return self._thread is not None and self._thread.is_alive()

    def here(self, offsets: list[ck.TopicPartition]) -> list[ck.TopicPartition]:
        """Commit in this thread: for the client's callbacks. Returns the broker's answers.

        A commit from another thread would get no answer before the callback returns. In a callback the client knows
        whether the coordinator is there, so the commit does not block. Raises KafkaException.
        """
        return self._client.commit(offsets=offsets, asynchronous=False) or []

    def within(self, offsets: list[ck.TopicPartition], timeout_s: float) -> list[ck.TopicPartition]:
        """Commit in a separate thread, because without a coordinator the client blocks for a session timeout.

        Returns the broker's answers. Raises KafkaException, and BrokerUnavailable after `timeout_s`; the commit may
        still arrive.
        """
        outcome: SimpleQueue[list[ck.TopicPartition] | Exception] = SimpleQueue()

        def commit() -> None:
            try:
                outcome.put(self.here(offsets))
            except Exception as error:
                outcome.put(error)

        self._thread = threading.Thread(target=commit, name="kafka-commit", daemon=True)
        self._thread.start()
        try:
            answer = outcome.get(timeout=timeout_s)
        except Empty:
            raise BrokerUnavailable(f"committing offsets: no answer within {timeout_s:g} s") from None
        self._thread.join()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def settled(self, timeout_s: float) -> bool:
        """Whether no commit is under way, after a wait of at most `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.is_waiting


def _member_config(kafka: KafkaSettings, *, group_id: str, client_id: str) -> dict[str, Any]:
    """What a member of a group sets beside the properties of all clients."""
    fetch_bytes = kafka.max_message_bytes + DEAD_LETTER_OVERHEAD_BYTES
    return {
        "group.id": kafka.named(group_id),
        "client.id": client_id,
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
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


def _judge(error: KafkaError, watch: BrokerWatch) -> None:
    """Log an error that passes by itself. Raises BrokerError, or FatalBrokerError, for every other one."""
    code = error.code()
    if error.fatal():
        raise broker_error(error, "polling")
    if code == KafkaError._PARTITION_EOF:
        return
    if code in UNREACHABLE:
        watch.on_error(error)
    elif code == KafkaError._MAX_POLL_EXCEEDED:
        # No error: the member left the group and joins again with the next poll.
        log.warning("this member was put out of the group: not polled for max.poll.interval.ms; joining again")
    elif code in MISSING:
        # A pattern, or a topic that does not exist yet: the subscription includes it once it exists.
        log.debug("%s", error.str())
    else:
        raise broker_error(error, "polling")
