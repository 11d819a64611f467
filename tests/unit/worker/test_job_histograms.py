from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from worker.job_histograms import JobHistogram

BOUNDS = (0.01, 0.1, 1, 10)


def shown(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@pytest.mark.parametrize("values", [[], [0.1], [0.0, 0.01, 0.0100001, 0.5, 1, 1.0, 9.99, 10, 11, 1e9]])
def test_it_shows_what_the_clients_own_histogram_shows(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = JobHistogram("took_seconds", "Time", ["task", "mode"], BOUNDS, ours)
    own = Histogram("took_seconds", "Time", ["task", "mode"], buckets=BOUNDS, registry=theirs)
    for labels in (("code", "vanilla"), ("sql", "vanilla")):
        histogram.observe(labels, values)
        child = own.labels(*labels)
        for value in values:
            child.observe(value)
    assert shown(ours) == shown(theirs)


def test_observations_add_up() -> None:
    registry = CollectorRegistry()
    histogram = JobHistogram("took_seconds", "Time", ["task"], BOUNDS, registry)
    histogram.observe(("code",), [0.5, 20.0])
    histogram.observe(("code",), [0.5])
    for name, wanted in (("count", 3), ("sum", 21.0)):
        assert registry.get_sample_value(f"took_seconds_{name}", {"task": "code"}) == wanted
    assert registry.get_sample_value("took_seconds_bucket", {"task": "code", "le": "1.0"}) == 2


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    JobHistogram("took_seconds", "Time", ["task"], BOUNDS, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        JobHistogram("took_seconds", "Time", ["task"], BOUNDS, registry)
