"""What is shown of simulated seeds: means with bounds, the budget, pictures."""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.policy.__main__ import played
from benchmarks.policy.compare import BUDGET_SHARE, Score, compare
from benchmarks.policy.play import know
from benchmarks.policy.plots import write_plot
from benchmarks.policy.report import (
    Mean,
    Seed,
    as_json,
    best_static,
    cold_share,
    meets_bars,
    print_tables,
)
from benchmarks.policy.scenario import Scenario, read_scenarios

NOTHING = Score(1.0, 1.0, 1.0, 0.0, 0.0, None)


def score(rng: random.Random, of_oracle: float) -> Score:
    ratio = of_oracle + rng.uniform(-0.01, 0.01)
    return replace(NOTHING, of_oracle=ratio, of_oracle_net=ratio)


def seeds(rng: random.Random) -> list[Seed]:
    rules = {"ours": 0.99, "ema_tiers": 0.9, "vanilla": 0.6, "draft:1": 0.8, "draft:2": 0.85}
    return [{rule: score(rng, ratio) for rule, ratio in rules.items()} for _ in range(6)]


def two() -> list[Scenario]:
    return list(read_scenarios().scenarios[:2])


def test_bounds_of_a_mean() -> None:
    found = Mean.of([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - found.mean == pytest.approx(1.959964 / math.sqrt(3))


def test_the_best_static_setting_is_found_with_hindsight(rng: random.Random) -> None:
    assert best_static(seeds(rng)) == "draft:2"


def test_a_rule_that_played_fewer_seeds_is_judged_by_those(rng: random.Random) -> None:
    of = seeds(rng)
    for seed in of[2:]:
        del seed["ema_tiers"]
    told = as_json(two(), {s.name: of for s in two()}, range(1, 7))
    rules = told["scenarios"][two()[0].name]["rules"]
    assert rules["ema_tiers"]["of_oracle"][0] == pytest.approx(0.9, abs=0.011)
    assert json.loads(json.dumps(told)) == told


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


def test_new_tasks_count_together() -> None:
    of: list[Seed] = [{"ours": replace(NOTHING, cold=share)} for share in (1.0, 0.5, 0.0)]
    assert cold_share(of, "ours") == 0.5
    assert cold_share([{"ours": NOTHING}], "ours") is None


def test_tables_name_every_scenario_and_rule(rng: random.Random) -> None:
    out = io.StringIO()
    print_tables(Console(file=out, width=120), two(), {s.name: seeds(rng) for s in two()})
    for word in (*(s.name for s in two()), "ours", "ema", "tiers", "vanilla", "draft:2"):
        assert word in out.getvalue()


def test_the_same_scores_give_the_same_picture(rng: random.Random, tmp_path: Path) -> None:
    scores = {s.name: seeds(rng) for s in two()}
    one, other = (write_plot(tmp_path / name, two(), scores).read_bytes() for name in ("a", "b"))
    assert one == other
    assert one.rstrip().endswith(b"</svg>")


def test_only_the_stated_budget_is_forgiven(seed: int) -> None:
    """ε-greedy explores far beyond it; what a rule without a budget loses is never forgiven."""
    read = read_scenarios()
    scenario = read.named("vanilla_best").model_copy(update={"phases": (read.named("vanilla_best").phases[0],)})
    device = read.devices[scenario.device]
    oracle = know(scenario, device, num_jobs=64)
    found = compare(scenario, device, oracle, seed, ["epsilon_greedy", "draft:3"])
    explored, fixed = found["epsilon_greedy"], found["draft:3"]
    assert fixed.of_oracle_net == fixed.of_oracle < 1
    assert explored.of_oracle < explored.of_oracle_net
    forgiven = 1 / explored.of_oracle - 1 / explored.of_oracle_net
    assert forgiven == pytest.approx(min(BUDGET_SHARE, explored.budget_loss))
