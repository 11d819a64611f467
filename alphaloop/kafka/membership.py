"""A member of a consumer group: what runs when partitions come and go, and how it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import confluent_kafka as ck

from alphaloop.kafka.conversion import ours
from alphaloop.kafka.records import TopicPartition

PartitionsCallback = Callable[[Sequence[TopicPartition]], None]

_QUIET_S: Final = 0.02


class Membership:
    """The membership of one client. The thread that polls the client uses it."""

    def __init__(
        self, client: ck.Consumer, starts: Callable[[list[ck.TopicPartition]], list[ck.TopicPartition]]
    ) -> None:
        """`starts` says where newly assigned partitions begin."""
        self._client = client
        self._starts = starts
        self._is_subscribed = False
        self._num_rebalances = 0
        self.is_revoking = False  #: whether `on_revoke` runs

    def subscribe(
        self,
        patterns: Sequence[str],
        *,
        on_assign: PartitionsCallback,
        on_revoke: PartitionsCallback,
        on_lost: PartitionsCallback,
    ) -> None:
        """Join the group. Raises KafkaException."""

        def assigned(client: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
            self._num_rebalances += 1
            client.incremental_assign(self._starts(partitions))
            # librdkafka remembers that a partition was paused, also while it belongs to another member.
            client.resume(partitions)
            on_assign(ours(partitions))

        def revoked(client: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
            self._num_rebalances += 1
            self.is_revoking = True
            try:
                on_revoke(ours(partitions))
            finally:
                self.is_revoking = False
                client.incremental_unassign(partitions)

        def lost(client: ck.Consumer, partitions: list[ck.TopicPartition]) -> None:
            self._num_rebalances += 1
            try:
                on_lost(ours(partitions))
            finally:
                client.incremental_unassign(partitions)

        self._client.subscribe(list(patterns), on_assign=assigned, on_revoke=revoked, on_lost=lost)
        self._is_subscribed = True

    def leave(self, timeout_s: float) -> None:
        """Before a close: unsubscribe, and poll until no partition and no callback is left, at most for `timeout_s`.

        librdkafka runs callbacks in its close, too. A callback that unassigns or commits there races with the end of
        the group: the call waits for ever with Python's global lock held, or an assertion ends the process
        (librdkafka's issues 4041 and 4884). Here they run in `poll`. Raises the first exception of a callback, when
        all have run.
        """
        if not self._is_subscribed:
            return
        self._is_subscribed = False
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
            is_over = is_quiet and not self._client.assignment()
        if failure is not None:
            raise failure
