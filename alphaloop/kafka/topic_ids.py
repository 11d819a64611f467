"""Topics that were deleted and made again under the same name, told by their ids (KIP-516).

Offsets begin again in a topic that was made anew, so an offset says where to go on only together with the topic's id.
The id is committed beside each offset, and compared at each assignment and from time to time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import confluent_kafka as ck
from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from alphaloop.errors import BrokerUnavailable
from alphaloop.kafka.errors import MISSING, broker_error, mapped
from alphaloop.kafka.topics import admin_client
from alphaloop.settings import KafkaSettings

_PREFIX: Final = "topic_id="
#: Brokers learn of a new topic one after the other. A new client that was told of the old one would find no leader.
AGREEMENT_S: Final = 5.0
#: Of a broker that has no ids.
_NONE: Final = "A" * 22


class TopicIds:
    """Asks the broker for the ids of topics, with one client for all questions. One thread uses it."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._client: AdminClient | None = None

    def ask(self, topics: Collection[str]) -> dict[str, str]:
        """The ids of these topics; without those that do not exist and those that have none. Raises BrokerError."""
        if not topics:
            return {}
        if self._client is None:
            self._client = admin_client(self._kafka)
        timeout_s = self._kafka.request_timeout_s
        with mapped("asking for the ids of topics"):
            answers = self._client.describe_topics(TopicCollection(sorted(topics)), request_timeout=timeout_s)
        found = {}
        for name, answer in answers.items():
            try:
                topic_id = str(answer.result(timeout_s).topic_id)
            except KafkaException as error:
                if error.args[0].code() not in MISSING:
                    raise broker_error(error, f"asking for the id of {name}") from error
            except TimeoutError:
                raise BrokerUnavailable("asking for the ids of topics: no answer in time") from None
            else:
                if topic_id != _NONE:
                    found[name] = topic_id
        return found


class KnownTopicIds:
    """The ids under which a client reads its topics. The thread that polls owns it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ids: dict[str, str] = {}
        self._new: dict[str, str] = {}  # of topics that were made anew under the client
        self._noticed_s = 0.0
        self._gone: set[str] = set()

    def learn(self, ids: Mapping[str, str]) -> None:
        """Note the ids of topics now. A broker that lags behind may name one that is gone: that is no news."""
        for topic, one in ids.items():
            if one not in self._gone and one not in (self._ids.setdefault(topic, one), self._new.get(topic)):
                self._new[topic], self._noticed_s = one, self._clock()

    @property
    def made_anew(self) -> frozenset[str]:
        """The topics that have another id than the one under which they are read, once every broker should know it."""
        return frozenset(self._new if self._clock() >= self._noticed_s + AGREEMENT_S else ())

    def begin_anew(self) -> None:
        """From now on the topics are read under their new ids."""
        self._gone |= {self._ids[topic] for topic in self._new}
        self._ids |= self._new
        self._new = {}

    def beside(self, topic: str) -> str:
        """What to commit beside an offset of this topic; nothing where its id is not known."""
        known = self._ids.get(topic)
        return "" if known is None else f"{_PREFIX}{known}"


def committed_ids(committed: Iterable[ck.TopicPartition]) -> dict[str, set[str]]:
    """The ids that were committed beside offsets, by topic."""
    found: dict[str, set[str]] = {}
    for one in committed:
        beside = one.metadata or ""
        if one.error is None and one.offset >= 0 and beside.startswith(_PREFIX):
            found.setdefault(one.topic, set()).add(beside.removeprefix(_PREFIX))
    return found
