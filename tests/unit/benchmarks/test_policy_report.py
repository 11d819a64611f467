"""What is shown of simulated seeds: means with bounds, the budget, pictures."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.policy.__main__ import played
from benchmarks.policy.compare import BUDGET_SHARE, Score, compare
from benchmarks.policy.play import know
from benchmarks.policy.report import (
    Seed,
    as_json,
    meets_bars,
)
from benchmarks.policy.scenario import Scenario, read_scenarios

NOTHING = Score(1.0, 1.0, 1.0, 0.0, 0.0, None)


def score(rng: random.Random, of_oracle: float) -> Score:
    ratio = of_oracle + rng.uniform(-0.01, 0.01)
    return replace(NOTHING, of_oracle=ratio, of_oracle_net=ratio)


def seeds(rng: random.Random) -> list[Seed]:
    rules = {"ours": 0.99, "vanilla": 0.6, "draft:1": 0.8, "draft:2": 0.85}
    return [{rule: score(rng, ratio) for rule, ratio in rules.items()} for _ in range(6)]


def two() -> list[Scenario]:
    return list(read_scenarios().scenarios[:2])


def test_an_interrupted_run_is_told_by_the_seeds_that_were_played(rng: random.Random) -> None:
    first, second = two()
    kept = {(first.name, 2): seeds(rng)[0], (first.name, 7): seeds(rng)[1], (second.name, 2): {}}
    assert played(two(), range(1, 9), kept) == {first.name: [kept[first.name, 2], kept[first.name, 7]], second.name: []}
    told = as_json([first], played(two(), range(1, 9), kept), range(1, 9))
    assert told["scenarios"][first.name]["seeds"] == 2


def test_bars_are_of_the_mean_over_the_oracles_and_of_the_worst_seed_over_vanillas() -> None:
    stationary = two()[0]
    good = replace(NOTHING, of_oracle_net=0.985)
    assert meets_bars(stationary, [{"ours": good}, {"ours": replace(good, of_oracle_net=0.976)}])
    assert not meets_bars(stationary, [{"ours": replace(good, of_oracle_net=0.979)}])
    assert meets_bars(stationary.model_copy(update={"kind": "changing"}), [{"ours": replace(good, of_oracle_net=0.95)}])
    assert not meets_bars(stationary, [{"ours": good}, {"ours": replace(good, of_vanilla=0.969)}])


def test_only_the_stated_budget_is_forgiven(seed: int) -> None:
    """What a rule without a budget loses is never forgiven."""
    read = read_scenarios()
    scenario = read.named("near_tie").model_copy(update={"phases": (read.named("near_tie").phases[0],)})
    device = read.devices[scenario.device]
    scores = compare(scenario, device, know(scenario, device, num_jobs=64), seed, ["ours", "draft:3"])
    explored, fixed = scores["ours"], scores["draft:3"]
    assert fixed.of_oracle_net == fixed.of_oracle < 1
    forgiven = 1 / explored.of_oracle - 1 / explored.of_oracle_net
    assert 0 < forgiven == pytest.approx(min(BUDGET_SHARE, explored.budget_loss))
