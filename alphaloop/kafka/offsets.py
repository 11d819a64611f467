"""Records and partitions without the client library's types, and what a consumer asks the broker about offsets.

Topics have two names: ours, and the cluster's, with `kafka.prefix`, which only this package knows.
"""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar

import confluent_kafka as ck
from confluent_kafka import KafkaException

from alphaloop.kafka.client import MISSING, PASSING, broker_error

log = logging.getLogger(__name__)

#: Memory that a record takes beside its bytes, and each of its headers: objects of Python, rounded up.
_RECORD_OVERHEAD_BYTES: Final = 1024
_HEADER_OVERHEAD_BYTES: Final = 192


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Record:
    """One message as the broker stored it. A header sent without a value arrives as empty bytes."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    timestamp_ms: int | None
    #: About what the message takes in memory: key, value and headers, because any of them may be large.
    num_bytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        num_bytes = _RECORD_OVERHEAD_BYTES + len(self.key or b"") + len(self.value or b"")
        if self.headers:
            num_bytes += sum(len(name) + len(content) + _HEADER_OVERHEAD_BYTES for name, content in self.headers)
        object.__setattr__(self, "num_bytes", num_bytes)

    @property
    def topic_partition(self) -> TopicPartition:
        """Where the message lies."""
        return TopicPartition(self.topic, self.partition)


def ours(partition: ck.TopicPartition, prefix: str) -> TopicPartition:
    """The client's partition as ours, without its offset."""
    return TopicPartition(partition.topic.removeprefix(prefix), partition.partition)


def theirs(
    partition: TopicPartition, prefix: str, offset: int = ck.OFFSET_INVALID, beside: str = ""
) -> ck.TopicPartition:
    """Our partition as the client takes it; `beside` is committed with the offset."""
    return ck.TopicPartition(prefix + partition.topic, partition.partition, offset, beside)


#: A call from C, whose result Python checks. That of `message.headers()` is no longer checked once the interpreter has
#: specialised the call (Python 3.11): the client's error would then be raised by whatever runs next.
_read_headers: Final = operator.methodcaller("headers")


def record_of(message: ck.Message, prefix: str = "") -> Record:
    """A polled message without an error. Headers that the client cannot give are left out."""
    kind, timestamp_ms = message.timestamp()
    return Record(
        topic=(message.topic() or "").removeprefix(prefix),
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        key=_bytes(message.key()),
        value=_bytes(message.value()),
        headers=_headers(message),
        timestamp_ms=None if kind == ck.TIMESTAMP_NOT_AVAILABLE else timestamp_ms,
    )


def _headers(message: ck.Message) -> tuple[tuple[str, bytes], ...]:
    try:
        # The client's stub also allows a mapping; headers that were read are always a list of pairs.
        headers: Any = _read_headers(message)
    except (SystemError, UnicodeDecodeError):
        # The client gives none of the headers if the name of one is not UTF-8. The message itself can be read, and an
        # error here would end every worker that polls it.
        where = {"topic": message.topic(), "partition": message.partition(), "offset": message.offset()}
        log.warning("headers left out: a name is not UTF-8", extra={"action": "headers_unreadable", **where})
        return ()
    return tuple((name, _bytes(value) or b"") for name, value in headers or ())


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


Answer = TypeVar("Answer")

_PASSING_S: Final = 0.1
#: A broker first does not know a new topic, and a moment later not its partitions.
_NEW_TOPIC_S: Final = 2.0


class OffsetQueries:
    """Asks again while a broker that just started cannot answer. Belongs to one consumer and its thread."""

    def __init__(self, client: ck.Consumer, timeout_s: float, prefix: str = "") -> None:
        self._client = client
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._new_topic_s = min(_NEW_TOPIC_S, timeout_s)

    def partitions(self, topics: Sequence[str]) -> list[TopicPartition]:
        """The partitions of the topics. Raises BrokerError when one does not exist."""
        partitions = []
        known = self._numbers_of_all() if len(topics) > 1 else {}
        for topic in topics:
            ask = functools.partial(self._numbers, topic)
            numbers = known.get(topic) or self._with_retries(f"reading {topic}", ask, unknown_s=self._new_topic_s)
            partitions += [TopicPartition(topic, number) for number in numbers]
        return partitions

    def _numbers_of_all(self) -> dict[str, list[int]]:
        """In one request what would take one a topic."""
        answer = self._with_retries("asking for topics", lambda: self._client.list_topics(timeout=self._timeout_s))
        return {
            name.removeprefix(self._prefix): list(topic.partitions)
            for name, topic in answer.topics.items()
            if topic.error is None and name.startswith(self._prefix)
        }

    def _numbers(self, topic: str) -> list[int]:
        name = self._prefix + topic
        metadata = self._client.list_topics(name, timeout=self._timeout_s).topics[name]
        if metadata.error is not None:
            raise KafkaException(metadata.error)
        return list(metadata.partitions)

    def since(self, since: datetime, ends: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Each partition of `ends` at its first message that is not older, or at its end where there is none."""
        since_ms = int(since.timestamp() * 1000)
        offsets = self._for_times("asking for offsets by time", ends, since_ms)
        return {partition: offset if offset >= 0 else ends[partition] for partition, offset in offsets.items()}

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int | None]:
        """The group's committed offsets, the next to read; None if nothing was committed."""
        wanted = [theirs(partition, self._prefix) for partition in partitions]
        answers = self._with_retries(
            "asking for committed offsets", lambda: _whole(self._client.committed(wanted, timeout=self._timeout_s))
        )
        return {ours(a, self._prefix): a.offset if a.offset >= 0 else None for a in answers}

    def bounds(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """Each partition's first stored offset and its end, below which no transaction is open.

        Two requests a broker, however many partitions there are. Raises BrokerError.
        """
        lows, ends = (self._at(partitions, which) for which in (ck.OFFSET_BEGINNING, ck.OFFSET_END))
        return {partition: (lows[partition], ends[partition]) for partition in partitions}

    def _at(self, partitions: Sequence[TopicPartition], which: int) -> dict[TopicPartition, int]:
        """The offsets that OFFSET_BEGINNING or OFFSET_END stands for. In the protocol these are times."""
        if not partitions:
            return {}
        first = f"{partitions[0].topic}[{partitions[0].partition}]"
        others = f" and {len(partitions) - 1} more" if len(partitions) > 1 else ""
        return self._for_times(f"asking for the watermarks of {first}{others}", partitions, which)

    def _for_times(self, doing: str, partitions: Iterable[TopicPartition], time_ms: int) -> dict[TopicPartition, int]:
        wanted = [theirs(partition, self._prefix, time_ms) for partition in partitions]
        answers = self._with_retries(
            doing,
            lambda: _whole(self._client.offsets_for_times(wanted, timeout=self._timeout_s)),
            unknown_s=self._new_topic_s,
        )
        return {ours(answer, self._prefix): answer.offset for answer in answers}

    def _with_retries(self, doing: str, ask: Callable[[], Answer], *, unknown_s: float = 0.0) -> Answer:
        """Repeat a request for a while that a newly started broker cannot answer yet.

        A topic that the broker does not know is asked for again for `unknown_s`.
        """
        began = time.monotonic()
        while True:
            try:
                return ask()
            except KafkaException as error:
                code = error.args[0].code()
                wait_s = self._timeout_s if code in PASSING else unknown_s if code in MISSING else 0.0
                if time.monotonic() - began >= wait_s:
                    raise broker_error(error, doing) from error
                time.sleep(_PASSING_S)


def _whole(answers: list[ck.TopicPartition]) -> list[ck.TopicPartition]:
    """The answers of all partitions. Raises KafkaException for the first that has none."""
    for answer in answers:
        if answer.error is not None:
            raise KafkaException(answer.error)
    return answers
