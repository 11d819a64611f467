"""A memory as JSON, and what is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from alphaloop.errors import StoreError
from scheduler.drift.watching import WatchedStream
from tests.fixtures.drift import watched_jobs
from tests.unit.scheduler.drift.test_fold import RULES


@pytest.fixture
def document(rng: random.Random) -> dict[str, Any]:
    stream = WatchedStream()
    stream.add(watched_jobs(rng, [0.7] * 200), RULES)
    return stream.document()


def test_through_json_and_back_it_is_the_same(document: dict[str, Any]) -> None:
    assert WatchedStream.of(json.loads(json.dumps(document))).document() == document


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("memory", "sums"), [1.0, 2.0]),
        (("memory", "sums"), ["a", "b", "c"]),
        (("memory", "sums"), [float("nan")] * 3),
        (("memory", "current", "first"), None),
        (("memory", "current"), 3),
        (("draft_lengths",), ["three"]),
        (("draft_lengths",), list(range(17))),
        (("segments",), None),
    ],
)
def test_a_damaged_memory_is_refused(document: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    part = document
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    with pytest.raises(StoreError, match="memory of a drift test"):
        WatchedStream.of(document)


def test_what_is_no_memory_is_refused() -> None:
    with pytest.raises(StoreError, match="expected draft_lengths"):
        WatchedStream.of([])
