"""A member of a consumer group: what runs when partitions come and go, and how it leaves."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Final

import confluent_kafka as ck
from confluent_kafka import KafkaException

from alphaloop.kafka.conversion import ours
from alphaloop.kafka.records import TopicPartition

PartitionsCallback = Callable[[Sequence[TopicPartition]], None]

_QUIET_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member reads, and what is called when partitions come and go."""

    patterns: tuple[str, ...]
    on_assign: PartitionsCallback
    on_revoke: PartitionsCallback
    on_lost: PartitionsCallback


class Membership:
    """The membership of one client. The thread that polls the client uses it."""

    def __init__(
        self, client: ck.Consumer, starts: Callable[[list[ck.TopicPartition]], list[ck.TopicPartition]]
    ) -> None:
        """`starts` says where newly assigned partitions begin."""
        self._client = client
        self._starts = starts
        self._subscription: Subscription | None = None  # while subscribed
        self._given_up: frozenset[TopicPartition] = frozenset()
        self._is_retired = False
        self._num_rebalances = 0
        self.is_revoking = False  #: whether `on_revoke` runs

    def subscribe(self, subscription: Subscription) -> None:
        """Join the group. Raises KafkaException."""

        def assigned(client: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
            if self._is_retired:
                return
            self._num_rebalances += 1
            client.incremental_assign(self._starts(partitions))
            # librdkafka remembers that a partition was paused, also while it belongs to another member.
            client.resume(partitions)
            subscription.on_assign(ours(partitions))

        def revoked(client: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
            if self._is_retired:
                return
            self._num_rebalances += 1
            self.is_revoking = True
            try:
                subscription.on_revoke(self._held(partitions))
            finally:
                self.is_revoking = False
                client.incremental_unassign(partitions)

        def lost(client: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
            if self._is_retired:
                return
            self._num_rebalances += 1
            try:
                subscription.on_lost(self._held(partitions))
            finally:
                client.incremental_unassign(partitions)

        patterns = list(subscription.patterns)
        self._client.subscribe(patterns, on_assign=assigned, on_revoke=revoked, on_lost=lost)
        self._subscription = subscription

    def retire(self, gone: Set[str], timeout_s: float) -> None:
        """Leave the group, as `leave` does, so that another client of this process can join it.

        First the partitions of the topics `gone` are lost; the others are revoked. No callback runs after this.
        """
        subscription, held = self._subscription, ours(self._client.assignment())
        if subscription is None:
            return
        self._given_up = frozenset(one for one in held if one.topic in gone)
        if self._given_up:
            subscription.on_lost(sorted(self._given_up))
        self.leave(timeout_s)
        self._is_retired = True
        if left := self._held(self._client.assignment()):
            subscription.on_lost(left)
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
        self._client.unsubscribe()
        is_over = False
        while not is_over and time.monotonic() < deadline:
            num_before, is_quiet = self._num_rebalances, False
            try:
                is_quiet = self._client.poll(_QUIET_S) is None and self._num_rebalances == num_before
            except Exception as error:
                failure = failure or error
            if self._num_rebalances != num_before:
                deadline = time.monotonic() + timeout_s
            is_over = is_quiet and not self._client.assignment()
        if failure is not None:
            raise failure

    def _close(self) -> None:
        """In a thread of its own, because closing has no time limit. The group was left already."""
        with contextlib.suppress(KafkaException, RuntimeError):
            self._client.close()

    def _held(self, partitions: list[ck.TopicPartition]) -> list[TopicPartition]:
        return [one for one in ours(partitions) if one not in self._given_up]
