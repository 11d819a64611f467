"""Real runs in a file: written, read and replayed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policy.export import simulated_runs
from benchmarks.policy.scenario import (
    FILE,
    Acceptance,
    Phase,
    RealRun,
    Scenario,
    Slots,
    Task,
    read_runs,
    read_scenarios,
    write_runs,
)
from benchmarks.policy.slots import draw_jobs


def scenario(tasks: dict[str, Task], *, replayed: str | None = None) -> Scenario:
    return Scenario(
        name="test",
        story="",
        kind="stationary",
        device="test",
        tasks=tasks,
        draft_tokens={"draft": 7, "lookup": 7},
        phases=(Phase(jobs=60),),
        slots=Slots(num_slots=4),
        replayed=replayed,
    )


def code() -> Scenario:
    drafters = {"draft": Acceptance(alpha=(0.8, 0.7)), "lookup": Acceptance(alpha=(0.8,), reach=(0.4, 0.9))}
    return scenario({"code": Task(drafters=drafters, tokens=40)})


def test_runs_are_read_as_they_were_written_and_replayed_with_their_rates(tmp_path: Path, seed: int) -> None:
    written = list(simulated_runs(code(), 30, seed=seed))
    path = tmp_path / "runs.jsonl"
    assert write_runs(path, written) == 30
    assert read_runs(path) == tuple(written)
    of = scenario({}, replayed=str(path))
    jobs = draw_jobs(of, 300, np.random.default_rng(seed))
    assert [job.needed for job in jobs[:30]] == [run.num_tokens for run in written]
    counts = [job.counts_at("draft", 1) for job in jobs]
    accepts, trials = sum(c.accepts[0] for c in counts), sum(c.trials[0] for c in counts)
    of_runs = [run.drafters["draft"] for run in written]
    real = sum(one.accepts[0] for one in of_runs) / sum(one.trials[0] for one in of_runs)
    assert accepts / trials == pytest.approx(real, abs=0.06)


def test_the_committed_runs_are_those_of_the_simulator() -> None:
    of = read_scenarios().named("jobs_alike_inside")
    assert read_runs(FILE.with_name("sample_runs.jsonl")) == tuple(simulated_runs(of, 60))


def test_a_run_without_counts_has_its_tasks_rates(rng: random.Random) -> None:
    run = RealRun(task="a", sampling_bucket="greedy", prompt_bucket="<=256", num_prompt_tokens=9, num_tokens=9)
    pooled = ((rng.random(), rng.random()), (1.0, rng.random()))
    for rates, expected in zip(run.rates("draft", 2, pooled, 8.0), pooled, strict=True):
        assert rates == pytest.approx(list(expected))
