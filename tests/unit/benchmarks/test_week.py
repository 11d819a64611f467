"""The simulated week: every job ends or expires once under every order, also over a worker's death."""

from __future__ import annotations

import math

import pytest

import benchmarks.week.play as play
from benchmarks.week.__main__ import figures_of, ratios
from benchmarks.week.contestants import LEAST_PARTITIONS
from benchmarks.week.play import CONTESTANTS, Play
from benchmarks.week.world import COSTS_CHANGE, DAY_S, HEAVY_TAIL, HOSTILE, ONE_PARTITION, draw_week


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_every_job_ends_or_expires_once_over_a_workers_death(contestant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "DIES_S", 600.0)
    monkeypatch.setattr(play, "BACK_S", 1500.0)
    week = draw_week(load=1.3, num_days=0.03, num_workers=2, seed=3)
    played = Play(week, contestant, num_workers=2, seed=3).run()
    assert len(played.jobs) == len(week.jobs) > 400
    for job in played.jobs:
        assert (job.ended_s < math.inf) != job.is_expired
        assert job.at_s <= job.ended_s
    assert max(job.num_starts for job in played.jobs) == 2, "jobs of the dead worker start again"
    assert 0.5 < figures_of(played)["met"] <= 1
    if contestant == "slack":
        assert 0 < figures_of(played)["most_of_the_bound"] <= 1


def test_a_week_has_the_load_that_it_was_drawn_for() -> None:
    assert draw_week(load=1.3, num_days=1, num_workers=1, seed=1).load == pytest.approx(1.3, rel=0.05)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_week_offers_the_same_load(hostile: str) -> None:
    week = draw_week(load=0.9, num_days=1, num_workers=1, seed=1, hostile=hostile)
    assert week.load == pytest.approx(0.9, rel=0.1)
    lengths = sorted((job.num_tokens for job in week.jobs), reverse=True)
    most = sum(lengths[: len(lengths) // 10]) / sum(lengths)
    assert (most > 0.45) == (hostile == HEAVY_TAIL)
    assert ({job.number % LEAST_PARTITIONS for job in week.jobs} == {0}) == (hostile == ONE_PARTITION)
    ratio = week.slowness(0.9 * DAY_S) / week.slowness(0.1 * DAY_S)
    assert ratio == pytest.approx(1.5 if hostile == COSTS_CHANGE else 1.0)


def test_the_better_clairvoyant_counts() -> None:
    met = dict(zip(CONTESTANTS, (0.9, 0.8, 0.6, 0.95, 1.0), strict=True))
    found = ratios({name: {"met": share} for name, share in met.items()})
    assert found == {"of_the_clairvoyant": 0.9, "over_first_come": pytest.approx(1.5)}
