"""Sees a run from outside, twice a second: committed offsets, outcomes, published results, and the workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import psycopg
from confluent_kafka import KafkaException

from alphaloop.kafka.topics import RESULTS
from tests.chaos.asking import Look
from tests.chaos.fleet import Fleet
from tests.chaos.ledger import Commit
from tests.chaos.reading import TopicReader

_EVERY_S: Final = 0.5
_COUNT: Final = "SELECT count(*) FROM jobs WHERE status <> 'running'"


@dataclass(frozen=True, slots=True)
class Progress:
    """How many jobs had ended at a moment, or how many results had been published."""

    at_s: float
    number: int


def first_growth_s(progress: Sequence[Progress], since_s: float) -> float | None:
    """From `since_s` until more was seen than at the last look before; None: nothing more was seen.

    A topic that was deleted begins again at zero.
    """
    before = next((one.number for one in reversed(progress) if one.at_s <= since_s), 0)
    for one in progress:
        if one.at_s > since_s:
            if one.number > before:
                return one.at_s - since_s
            before = one.number
    return None


def longest_silence_s(progress: Sequence[Progress], since_s: float, until_s: float) -> float:
    """The longest time between two moments at which more was seen than before; both ends count as such."""
    grown = [after.at_s for before, after in pairwise(progress) if after.number > before.number]
    moments = [since_s, *(at_s for at_s in grown if since_s < at_s < until_s), until_s]
    return max(after - before for before, after in pairwise(moments))


class Watcher:
    """A thread that looks and notes; servers that are away are asked again at the next look."""

    def __init__(self, addresses: str, groups: Sequence[str], database_url: str) -> None:
        self.commits: list[Commit] = []
        self.progress: list[Progress] = []
        self.published: list[Progress] = []
        self.looks: list[Look] = []
        self.fleets: list[Fleet] = []
        #: Of topics that were made anew: what is committed beside such an id counts for nobody.
        self.gone_ids: set[str] = set()
        self._reader = TopicReader(addresses, self.gone_ids)
        self._results_reader = TopicReader(addresses)
        self._groups = groups
        self._database_url = database_url
        self._began = time.monotonic()
        self._last: dict[str, int] = {}
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(look,), name=f"watcher of {name}", daemon=True)
            for name, look in (
                ("commits", self._look_at_commits),
                ("outcomes", self._look_at_outcomes),
                ("results", self._look_at_results),
                ("workers", self._look_at_workers),
            )
        ]

    @property
    def now_s(self) -> float:
        """Seconds since the watcher was made, as in its notes."""
        return time.monotonic() - self._began

    @property
    def num_ended(self) -> int:
        """Jobs that had ended at the last look."""
        return self.progress[-1].number if self.progress else 0

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
        self._results_reader.close()

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
                partition = f"{group} {one.topic}[{one.partition}] {one.metadata or ''}".rstrip()
                if self._last.get(partition) != offset:
                    self._last[partition] = offset
                    self.commits.append(Commit(self.now_s, partition, offset))

    def _look_at_outcomes(self) -> None:
        try:
            with psycopg.connect(self._database_url, connect_timeout=2) as connection:
                row = connection.execute(_COUNT).fetchone()
        except psycopg.Error:
            return  # the database is away
        assert row is not None
        self.progress.append(Progress(self.now_s, row[0]))

    def _look_at_results(self) -> None:
        try:
            number = sum(self._results_reader.end_offsets(RESULTS, wait_s=0.0).values())
        except KafkaException:
            return  # the brokers are away, or elect leaders
        self.published.append(Progress(self.now_s, number))

    def _look_at_workers(self) -> None:
        for fleet in self.fleets:
            fleet.measure()
            self.looks += fleet.look(self.now_s)
