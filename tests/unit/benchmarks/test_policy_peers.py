"""Rules that ours is compared with: each follows what it was written after."""

from __future__ import annotations

import pytest

from benchmarks.policy.peers import (
    AGAIN_AFTER_JOBS,
    MEASURED_JOBS,
    AlphaThresholds,
    EpsilonGreedy,
)
from benchmarks.policy.play import BEGINNING, Batch, Choice, Played, play
from benchmarks.policy.scenario import Acceptance, Device, Phase, Scenario, Surface, Task
from benchmarks.policy.stream import Cell, draw_stream

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
