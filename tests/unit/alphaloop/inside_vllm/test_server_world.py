"""The figure of a server that measures itself, against simulated servers whose true speed-up is known."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean

import pytest

from tests.unit.alphaloop.inside_vllm.server_world import ServerScenario, play

DRAFT = ServerScenario("draft")


@pytest.mark.parametrize(
    "scenario",
    [
        DRAFT,
        ServerScenario("nothing accepted", k=1, acceptance=0.0),
        ServerScenario("slow minutes and bursts", has_slow_minutes=True, has_bursts=True),
    ],
    ids=lambda scenario: scenario.name,
)
def test_intervals_hold_the_truth(scenario: ServerScenario) -> None:
    runs = [play(scenario, seed, num_rounds=4000) for seed in range(8)]
    # Of eight intervals of 95 %, more than two miss the truth in one of 170 times.
    assert sum(speedup.low <= truth.speedup <= speedup.high for speedup, truth, _ in runs) >= 6
    assert abs(mean(math.log(speedup.mean / truth.speedup) for speedup, truth, _ in runs)) < 0.012


def test_what_the_drafter_costs_in_control_rounds_moves_the_figure_by_its_error_only() -> None:
    def error(scenario: ServerScenario) -> float:
        runs = [play(scenario, seed, num_rounds=3000) for seed in range(3)]
        return mean(math.log(speedup.mean / truth.speedup) for speedup, truth, _ in runs)

    assert error(replace(DRAFT, takes_off=False)) > 0.08  # a seventh of a vanilla round is the drafter's
    assert -0.03 < error(replace(DRAFT, timing_error=0.1)) < 0.0
