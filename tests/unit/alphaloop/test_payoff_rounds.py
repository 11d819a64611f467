"""The arithmetic of rounds: what they bring, what they cost, and what follows."""

from __future__ import annotations

import random

import pytest

from alphaloop.deciding.posterior import tokens_per_round
from alphaloop.payoff.figures import Candidate, RoundTimes
from alphaloop.payoff.rounds import RoundCosts, costs_of
from tests.fixtures.costs import acceptance, evidence, figures, rounds


def costs(**options: object) -> RoundCosts:
    found = evidence(**options).costs  # type: ignore[arg-type]
    assert found is not None
    return found


def test_parts_are_in_vanilla_rounds_and_add_up() -> None:
    found = costs(alphas=(0.8, 0.7, 0.6, 0.5), draft=0.4, verify=1.2)
    assert (found.draft, found.verify, found.rest) == pytest.approx((0.4, 1.2, 0.1))
    assert found.total == pytest.approx(1.7)
    # Rounds accept .8, .56, .34 and .17 of a hundred.
    assert found.tokens == pytest.approx(tokens_per_round((0.8, 0.7, 0.6, 0.5))[4], abs=0.02)
    assert found.speedup == pytest.approx(found.tokens / 1.7)
    assert found.draft_step == pytest.approx(0.1)
    assert found.positions == pytest.approx(5)


def test_reading_prompts_is_not_sped_up() -> None:
    found = costs(reading=1.0)  # as long as all of vanilla's rounds
    assert found.vanilla_reading == pytest.approx(0.5)
    assert found.whole(1e9) == pytest.approx(2.0)
    assert found.whole(2.0) == pytest.approx(1 / (0.5 + 0.25))


def test_a_drafter_that_reads_for_itself_pays_for_it() -> None:
    vanilla = figures(times=rounds(reading=0.5))
    own = figures(Candidate("small", 1), accepted=acceptance([1.0]), times=rounds(0, 0.9, 0.1, reading=1.0, k=1))
    found = costs_of(vanilla, own)
    assert found is not None
    assert found.speedup == pytest.approx(1.5 / (1.0 + 1.0 / 2))


def test_the_needed_alpha_is_leviathans(rng: random.Random) -> None:
    alpha, k, draft = rng.uniform(0.3, 0.9), rng.randint(1, 8), rng.uniform(0, 0.3)
    found = costs(alphas=(0.5,) * k, draft=draft, verify=0.9)
    target = (1 - alpha ** (k + 1)) / (1 - alpha) / found.total
    assert found.needed_alpha(target) == pytest.approx(alpha, abs=1e-6)
    assert found.needed_alpha((k + 1) / found.total + 1e-6) is None
    assert found.needed_alpha(0.01) == pytest.approx(0, abs=1e-6)


def test_a_shorter_draft_costs_and_brings_its_part() -> None:
    found = costs(alphas=(0.9, 0.8, 0.1, 0.1), draft=0.8, verify=1.3)
    assert found.at_length(4) == pytest.approx(found.speedup, rel=0.01)
    # Half of the drafting, half of what the pass takes beyond vanilla's.
    assert found.at_length(2) == pytest.approx((1 + 0.9 + 0.72) / (0.4 + 0.9 + 0.2 + 0.1), rel=0.01)
    assert found.best_shorter() == (2, pytest.approx(found.at_length(2) / found.at_length(4)))
    assert costs(alphas=(0.9,)).best_shorter() is None


def test_without_rounds_there_is_nothing_to_say() -> None:
    own = figures(Candidate("small", 2), accepted=acceptance([0.5, 0.5]), times=RoundTimes(reading_s=1.0))
    assert costs_of(figures(), own) is None
    assert costs_of(figures(times=RoundTimes()), own) is None
