"""Prometheus histograms of what jobs took, of many jobs at once.

prometheus_client's own histogram takes 1 µs a value, and every job has four.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector


class JobHistogram(Collector):
    """Seconds by labels; `bounds` are the upper bounds of its buckets, ascending, without infinity."""

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._help_text, self._labels = name, help_text, tuple(labels)
        self._bounds: Final = tuple(bounds)
        self._le: Final = [*map(str, map(float, bounds)), "+Inf"]
        self._lock = threading.Lock()
        self._num_values: dict[tuple[str, ...], list[int]] = {}  # by labels, in each bucket
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def observe(self, labels: tuple[str, ...], seconds: Iterable[float]) -> None:
        """Add values. Labels show as soon as they are observed, also without a value."""
        values = list(seconds)
        with self._lock:
            buckets = self._num_values.setdefault(labels, [0] * len(self._le))
            for value in values:
                buckets[bisect_left(self._bounds, value)] += 1
            self._sums[labels] = self._sums.get(labels, 0.0) + sum(values)

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """The name, for the registry."""
        yield HistogramMetricFamily(self._name, self._help_text, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What a scrape shows."""
        family = HistogramMetricFamily(self._name, self._help_text, labels=self._labels)
        with self._lock:
            for labels, buckets in self._num_values.items():
                family.add_metric(labels, list(zip(self._le, accumulate(buckets), strict=True)), self._sums[labels])
        yield family
