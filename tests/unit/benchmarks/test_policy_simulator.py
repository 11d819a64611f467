"""The simulator of the decision problem: its rounds, its oracle, its seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.posterior import tokens_per_round
from benchmarks.policy.compare import action_name, compare
from benchmarks.policy.play import BEGINNING, Choice, Played, know
from benchmarks.policy.scenario import Acceptance, Device, Phase, Scenario, Surface, Task
from benchmarks.policy.stream import draw_stream

DEVICE = Device(
    target=Surface(widths=(1, 4, 8), by_batch={1: (10.0, 11.0, 14.0), 4: (12.0, 18.0, 30.0)}),
    drafters={
        "draft": Surface(widths=(2, 8), by_batch={1: (1.5, 9.0), 4: (2.0, 10.0)}),
        "lookup": Surface(widths=(2, 8), by_batch={1: (0.1, 0.1), 4: (0.2, 0.2)}),
    },
    prefill_ms_per_token={"target": 0.1, "draft": 0.02},
)
ALPHA, REACH = (0.8, 0.7, 0.6, 0.5), (0.5, 0.9, 0.8)


def scenario(*, jobs: int = 400, batch: int = 1, job_spread: float = 0.0, tokens: int = 60, **more: object) -> Scenario:
    task = Task(
        drafters={"draft": Acceptance(alpha=ALPHA), "lookup": Acceptance(alpha=ALPHA, reach=REACH)},
        tokens=tokens,
        job_spread=job_spread,
    )
    return Scenario.model_validate(
        {
            "name": "test",
            "story": "",
            "kind": "stationary",
            "device": "test",
            "tasks": {"code": task},
            "draft_tokens": {"draft": 7, "lookup": 7},
            "phases": (Phase(jobs=jobs, batch=batch),),
            **more,
        }
    )


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_tokens_a_round_are_those_of_the_formula(drafter: str, k: int, seed: int) -> None:
    """Texts are long, so that the last round, which may be cut, hardly counts."""
    stream = draw_stream(scenario(jobs=150, tokens=400), DEVICE, seed)
    out = Played(stream).outcomes(stream.blocks[0], drafter, k)
    reach = [1.0] * k if drafter == "draft" else [REACH[min(i, 2)] for i in range(k)]
    expected = tokens_per_round([r * ALPHA[min(i, 3)] for i, r in enumerate(reach)])[k]
    rounds = out.counts.rounds.sum()
    found = (stream.blocks[0].needed - 1).sum() / rounds
    # A round's tokens lie within 1 … k + 1, so their deviation is k / 2 at most; 4.5 of them, and the cut rounds.
    assert found == pytest.approx(expected, abs=4.5 * k / 2 / math.sqrt(rounds) + k * 150 / rounds)


def test_counts_of_a_job_add_up_to_its_text_and_to_the_evidence_of_its_batch(seed: int) -> None:
    """AcceptanceCounts refuses what no sequence of rounds can produce."""
    stream = draw_stream(scenario(jobs=60, batch=4, job_spread=1.0), DEVICE, seed)
    played, now = Played(stream), BEGINNING
    for drafter, k in [(None, 0), ("draft", 1), ("draft", 5), ("lookup", 7)]:
        for index in range(15):
            decoded = played.decoded(stream.blocks[0], index, Choice(drafter, k))
            counts = list(decoded.counts())
            assert [one.num_tokens for one in counts] == list(decoded.num_tokens)
            jobs = [EvidenceSums.of_job(one, k, now, one.num_tokens, 120) for one in counts]
            assert decoded.evidence(drafter, k, now) == sum(jobs[1:], jobs[0])


def test_seeds_reproduce_and_differ(seed: int) -> None:
    of = scenario(jobs=40, batch=4, job_spread=0.8)
    oracle = know(of, DEVICE, num_jobs=40)
    rules = ["ours", "draft:3"]
    first, again, other = (compare(of, DEVICE, oracle, s, rules) for s in (seed, seed, seed + 1))
    assert first == again
    assert first != other


def test_the_oracle_is_not_beaten_in_expectation(seed: int) -> None:
    """No single setting is faster on average than what the oracle takes, beyond what chance allows."""
    of = scenario(jobs=1200, batch=4, job_spread=1.0)
    oracle = know(of, DEVICE)
    played = Played(draw_stream(of, DEVICE, seed))
    best = played.oracle_ms(oracle)
    for action in of.actions:
        lost = played.fixed_ms(*action) - best
        margin = 4.5 * lost.std() / math.sqrt(len(lost))
        # The oracle's own estimate rests on fewer jobs than these, and is off by as much once more.
        assert lost.mean() >= -2.2 * margin - 1e-9, action_name(*action)


def test_jobs_of_one_task_differ_as_much_as_told(seed: int) -> None:
    """The variance of a job's α is far beyond that of its trials when jobs differ, and not when they do not."""
    ratios = []
    for spread in (0.0, 1.2):
        stream = draw_stream(scenario(jobs=300, job_spread=spread, tokens=120), DEVICE, seed)
        out = Played(stream).outcomes(stream.blocks[0], "draft", 1)
        accepts, trials = out.counts.accepts[:, 0, 0], out.counts.trials[:, 0, 0]
        alpha = accepts.sum() / trials.sum()
        ratios.append(float(np.mean((accepts - alpha * trials) ** 2 / (trials * alpha * (1 - alpha)))))
    assert ratios[0] < 1.5 < 2.5 < ratios[1]
