"""river's detectors as the drift benchmark compiles them: value by value the alarms of river's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

drift = pytest.importorskip(
    "river.drift", reason="river, the drift benchmark's peer, is installed by `make bench-drift`"
)
rivals = pytest.importorskip("benchmarks.drift.contestants", reason="they are compiled with numba")


def values() -> Any:
    """Rates with a fall, a rise and a fall."""
    rng = np.random.default_rng(3)
    level = np.repeat([0.7, 0.5, 0.8, 0.6], 700)
    return np.clip(level + 0.15 * rng.standard_normal(len(level)), 0, 1)


def alarms(detector: Any) -> list[int]:
    found = []
    for index, value in enumerate(values().tolist()):
        detector.update(value)
        if detector.drift_detected:
            found.append(index)
    return found


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: rivals.page_hinkley(x, 3.0, 0.025, 0.9999), lambda: drift.PageHinkley(30, 0.025, 3.0, 0.9999)),
        (lambda x: rivals.page_hinkley(x, 1.0, 0.05, 1.0), lambda: drift.PageHinkley(30, 0.05, 1.0, 1.0)),
        (lambda x: rivals.hddm_w(x, 0.1, 0.05), lambda: drift.binary.HDDMW(0.1, 0.5, 0.05, two_sided_test=True)),
        (lambda x: rivals.hddm_w(x, 0.6, 0.01), lambda: drift.binary.HDDMW(0.6, 0.7, 0.01, two_sided_test=True)),
    ],
)
def test_alarms_are_those_of_river(ours: Callable[[Any], Any], theirs: Callable[[], Any]) -> None:
    expected = alarms(theirs())
    assert len(expected) >= 2
    assert ours(values()).tolist() == expected
