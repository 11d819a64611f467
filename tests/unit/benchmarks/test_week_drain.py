"""The drain of jobs that come at once: planned from others by task, over all that was recorded of each."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from alphaloop.capacity.curve import DecodedJobs
from alphaloop.store.arrivals import SeenArrivals
from benchmarks.week.drain import Drain, planned_s


def recorded(*jobs: tuple[str, float, int]) -> SeenArrivals:
    """Jobs of a task that took so many seconds alone. Two run at once at most, and then each is half as fast."""
    groups = tuple(DecodedJobs(task, "cpu", False, 0.0, number, 1, 100 * number, s, 1.0) for task, s, number in jobs)
    return SeenArrivals("small", sum(number for *_, number in jobs), 2, 1.0, datetime(2026, 11, 29, tzinfo=UTC), groups)


@pytest.mark.parametrize("seed", range(3))
def test_each_job_takes_what_those_of_its_task_took(seed: int) -> None:
    seen = recorded(("code", 10.0, 5), ("code", 30.0, 5), ("chat", 20.0, 7))
    assert planned_s(seen, {"code": 4, "chat": 3}, seed=seed) == pytest.approx(2 * 10 + 2 * 30 + 3 * 20)
    assert planned_s(seen, {"code": 100}, seed=seed) == pytest.approx(50 * 10 + 50 * 30)
    assert planned_s(seen, {"chat": 1}, seed=seed) == pytest.approx(20.0)
    with pytest.raises(ValueError, match="a recorded job of sql"):
        planned_s(seen, {"sql": 1}, seed=seed)


@pytest.mark.parametrize(("planned", "is_met"), [(114.0, True), (86.0, True), (116.0, False), (84.0, False)])
def test_the_bar_is_on_both_sides(planned: float, is_met: bool) -> None:
    assert Drain("auto", 1, planned, 100.0, 10, 5, 20.0).is_met is is_met
