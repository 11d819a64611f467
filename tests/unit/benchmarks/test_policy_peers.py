"""Rules that ours is compared with: each follows what it was written after."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.policy.peers import (
    AGAIN_AFTER_JOBS,
    MEASURED_JOBS,
    STEPS_A_FIT,
    AlphaThresholds,
    EpsilonGreedy,
    Survival,
)
from benchmarks.policy.play import BEGINNING, Batch, Choice, Played, play
from benchmarks.policy.scenario import Acceptance, Device, Phase, Scenario, Surface, Task
from benchmarks.policy.stream import Cell, Costs, draw_stream

DEVICE = Device(
    target=Surface(widths=(1, 8), by_batch={1: (10.0, 17.0)}),
    drafters={"draft": Surface(widths=(2, 8), by_batch={1: (1.0, 7.0)})},
)


def played(alpha: float, seed: int, *, jobs: int = 60) -> Played:
    task = Task(drafters={"draft": Acceptance(alpha=(alpha,))}, job_spread=0.0, tokens_spread=0.2)
    scenario = Scenario(
        name="test",
        story="",
        kind="stationary",
        device="test",
        tasks={"code": task},
        draft_tokens={"draft": 7},
        phases=(Phase(jobs=jobs),),
    )
    return Played(draw_stream(scenario, DEVICE, seed))


def costs() -> Costs:
    return Costs.of(DEVICE.table(), 1, {"draft": 7})


@pytest.mark.parametrize(("alpha", "is_on"), [(0.3, False), (0.8, True)])
def test_thresholds_switch_by_alpha_and_look_again(alpha: float, is_on: bool, seed: int) -> None:
    of = played(alpha, seed, jobs=MEASURED_JOBS + AGAIN_AFTER_JOBS + 1)
    trace = play(of, AlphaThresholds("draft", 4))
    on = trace.actions == 4
    assert on[:MEASURED_JOBS].all()
    assert (on[MEASURED_JOBS:-1] == is_on).all()
    assert on[-1]


def test_epsilon_greedy_prefers_what_took_least(seed: int) -> None:
    of = played(0.9, seed, jobs=4)
    rule = EpsilonGreedy(of.stream.scenario.actions, seed)
    batch = Batch(Cell("code", "", "greedy", "<=256", 120), 1, BEGINNING)
    for k in (0, 7, 1):
        choice = Choice("draft" if k else None, k)
        rule.observe(batch, choice, of.decoded(of.stream.blocks[0], 0, choice))
    taken = [rule.choose(batch) for _ in range(200)]
    times = {k: of.fixed_ms("draft" if k else None, k)[0] for k in (0, 1, 7)}
    least = min(times, key=times.__getitem__)
    # All but the exploring ones: of 200 at 10 %, more than 50 would be seven standard deviations away.
    assert sum(choice.num_draft_tokens == least for choice in taken) >= 150
    rule.restart()
    assert sum(choice.num_draft_tokens == 0 for choice in (rule.choose(batch) for _ in range(200))) >= 150


class Remembering(Survival):
    """Every fit rests on its own hundred steps, so each alone is noisy; their mean is not."""

    def _fit(self) -> None:
        super()._fit()
        self.__dict__.setdefault("fits", []).append((self._slope, self._intercepts[0]))


@pytest.mark.parametrize("alpha", [0.4, 0.85])
def test_survival_learns_what_is_accepted(alpha: float, seed: int) -> None:
    """Given the outcome the confidence is normal, so P(accepted | confidence) is logistic: slope 1, intercept 0."""
    rule = Remembering("draft", 3, costs())
    play(played(alpha, seed, jobs=400), rule)
    fits = rule.__dict__["fits"]
    slope, intercept = np.mean(fits[10:], axis=0)
    assert len(fits) > 30
    assert slope == pytest.approx(1.0, abs=0.25)
    assert intercept == pytest.approx(0.0, abs=0.35)


def test_survival_admits_what_pays(seed: int) -> None:
    """By hand: the b with most (1 + Σ survival) a millisecond."""
    of = played(0.7, seed, jobs=2)
    rule = Survival("draft", 3, costs())
    drafts = of.stream.blocks[0].drafts["draft"]
    rule.begin(Batch(Cell("code", "", "greedy", "<=256", 120), 1, BEGINNING), drafts, 0)
    for number in range(min(STEPS_A_FIT, 10)):
        logits = [0.5 * float(f) - 0.2 for f in drafts.confidence[0, 0, number, :3]]
        survival = np.cumprod([1 / (1 + math.exp(-x)) for x in logits])
        goodput = [(1 + survival[:b].sum()) / (10 + b + 3) for b in range(4)]
        assert rule.lengths([0], [number]) == (3, [int(np.argmax(goodput))])
