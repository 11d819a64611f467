"""Sees a run from outside, twice a second: committed offsets, recorded outcomes, the memory of workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from confluent_kafka import KafkaException

from tests.chaos.fleet import Fleet
from tests.chaos.ledger import Commit
from tests.chaos.reading import TopicReader

_EVERY_S: Final = 0.5
_COUNT: Final = "SELECT count(*) FROM jobs WHERE status <> 'running'"


@dataclass(frozen=True, slots=True)
class Progress:
    """How many jobs had ended at a moment."""

    at_s: float
    num_ended: int


class Watcher:
    """A thread that looks and notes; servers that are away are asked again at the next look."""

    def __init__(self, addresses: str, groups: Sequence[str], database_url: str) -> None:
        self.commits: list[Commit] = []
        self.progress: list[Progress] = []
        self.fleets: list[Fleet] = []
        self._reader = TopicReader(addresses)
        self._groups = groups
        self._database_url = database_url
        self._began = time.monotonic()
        self._last: dict[str, int] = {}
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(look,), name=f"watcher of {name}", daemon=True)
            for name, look in (("commits", self._look_at_commits), ("outcomes", self._look_at_outcomes))
        ]

    @property
    def now_s(self) -> float:
        """Seconds since the watcher was made, as in its notes."""
        return time.monotonic() - self._began

    @property
    def num_ended(self) -> int:
        """Jobs that had ended at the last look."""
        return self.progress[-1].num_ended if self.progress else 0

    def start(self) -> None:
        """Begin to look."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._reader.close()

    def _repeat(self, look: Callable[[], None]) -> None:
        while not self._closing.wait(_EVERY_S):
            look()

    def _look_at_commits(self) -> None:
        for group in self._groups:
            try:
                found = self._reader.committed(group)
            except KafkaException:
                continue  # the brokers are away, or elect a coordinator
            for one, offset in found.items():
                partition = f"{group} {one.topic}[{one.partition}]"
                if self._last.get(partition) != offset:
                    self._last[partition] = offset
                    self.commits.append(Commit(self.now_s, partition, offset))

    def _look_at_outcomes(self) -> None:
        for fleet in self.fleets:
            fleet.measure()
        try:
            with psycopg.connect(self._database_url, connect_timeout=2) as connection:
                row = connection.execute(_COUNT).fetchone()
        except psycopg.Error:
            return  # the database is away
        assert row is not None
        self.progress.append(Progress(self.now_s, row[0]))
