"""A machine that does other work shows in vanilla's own times."""

from __future__ import annotations

import random

from alphaloop.payoff.figures import VANILLA, RoundTimes
from worker.measuring.observing import Observation
from worker.measuring.report import busy_note


def observations(ms: list[float]) -> list[Observation]:
    return [
        Observation(VANILLA, n, 0, (), RoundTimes(num_rounds=20, num_steps=20, round_s=20 * one / 1000), 1.0)
        for n, one in enumerate(ms)
    ]


def test_a_quiet_machine_is_not_remarked(rng: random.Random) -> None:
    assert busy_note(observations([rng.gauss(20.0, 1.0) for _ in range(40)])) is None


def test_a_busy_machine_is_remarked_with_its_figures(rng: random.Random) -> None:
    busy = observations([rng.choice([20.0, 40.0]) for _ in range(40)])
    told = busy_note(busy)
    assert told is not None
    assert "vanilla's own rounds took 20.0 to 40.0 ms" in told


def test_of_few_prompts_nothing_is_said() -> None:
    assert busy_note(observations([1.0, 100.0])) is None
