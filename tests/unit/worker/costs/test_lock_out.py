"""A drafter whose rounds were slow for two seconds comes back; one that stays slow stays out, within the budget."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Final

import pytest

from alphaloop.costs import CostPoint
from alphaloop.deciding.exploration import ExplorationBudget
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.policy import Decision, DraftSetting
from tests.fixtures.deciding import LIMITS, choose, inferred
from worker.costs.learning import LiveCosts
from worker.engine import Step

VANILLA_MS: Final = 20.0
#: One drafted token takes c = .3 of a target pass, and each position more makes the pass a twentieth longer.
DRAFT_MS: Final = 0.3 * VANILLA_MS
POSITION_MS: Final = 0.05 * VANILLA_MS
ALPHA: Final = 0.8
LONGEST: Final = 5
DRAFTER: Final = DrafterState("draft", "r1", LONGEST)
#: What a task with a thousand jobs says of the drafter.
KNOWN: Final = inferred(ALPHA, k=LONGEST, jobs=1000.0)
MEAN_TOKENS: Final = 60


def target_ms(width: int) -> float:
    return VANILLA_MS + POSITION_MS * (width - 1)


@dataclass
class Worker:
    """Decides job by job, alone on the device; the draft's rounds take `slowness` times their time, with 5 % noise."""

    rng: random.Random
    slowness: float = 1.0
    now_s: float = 0.0
    num_tokens: int = 0
    budget: ExplorationBudget = field(default_factory=ExplorationBudget)
    incumbent: DraftSetting | None = None

    def __post_init__(self) -> None:
        points = [
            *(CostPoint(None, 1, width, target_ms(width), 9) for width in (1, LONGEST + 1)),
            *(CostPoint("draft", 1, width, DRAFT_MS * (width - 1), 9) for width in (2, LONGEST + 1)),
        ]
        self.costs = LiveCosts(points, half_life=32, save=lambda points: None, clock=lambda: self.now_s)

    def decode_job(self) -> Decision:
        decision = choose(
            {"draft": KNOWN},
            drafters=[DRAFTER],
            costs=self.costs.table,
            expected_tokens=float(MEAN_TOKENS),
            incumbent=self.incumbent,
            budget=self.budget,
        )
        self.budget, self.incumbent = decision.budget or self.budget, decision.kept
        left = self.rng.randint(MEAN_TOKENS // 2, 3 * MEAN_TOKENS // 2)
        self.num_tokens += left
        while left > 0:
            left -= self.decode_round(decision.num_draft_tokens)
        return decision

    def decode_round(self, k: int) -> int:
        """One round at k; how many tokens it brought."""
        verify_s = target_ms(k + 1) / 1000 * math.exp(self.rng.gauss(0, 0.05))
        draft_s = self.slowness * k * DRAFT_MS / 1000 * math.exp(self.rng.gauss(0, 0.05))
        self.now_s += verify_s + draft_s
        self.costs.observe(
            Step(
                finished=(),
                deltas=(),
                batch=1,
                width=k + 1,
                wall_s=verify_s + draft_s,
                draft_s=draft_s,
                verify_s=verify_s,
                context=256,
                drafter="draft" if k else None,
            )
        )
        return 1 + next((i for i in range(k) if self.rng.random() > ALPHA), k)


def drafts(decision: Decision) -> bool:
    """Whether the policy would draft, were it not for exploration."""
    return decision.kept is not None and decision.kept.drafter is not None


@pytest.mark.parametrize("seed", range(6))
def test_a_drafter_that_was_slow_for_a_moment_is_back_within_200_jobs(seed: int) -> None:
    worker = Worker(random.Random(seed))
    for _ in range(30):
        decision = worker.decode_job()
    worker.slowness = 3.0
    for _ in range(40):
        worker.decode_round(decision.kept.num_draft_tokens)
    worker.slowness = 1.0
    assert not drafts(worker.decode_job()), "the forty rounds are believed"
    num_jobs = 1
    while not drafts(worker.decode_job()):
        num_jobs += 1
        assert num_jobs < 200
    assert all(drafts(worker.decode_job()) for _ in range(6)), "it is back to stay"


@pytest.mark.parametrize("seed", range(2))
def test_a_drafter_that_stays_slow_stays_out_within_the_budget(seed: int) -> None:
    worker = Worker(random.Random(seed), slowness=3.0)
    decisions = [worker.decode_job() for _ in range(300)]
    assert not any(drafts(decision) for decision in decisions[20:])
    assert 0 < sum(decision.drafter is not None for decision in decisions[20:]) < 20
    vanilla_s = worker.num_tokens * VANILLA_MS / 1000
    assert worker.now_s / vanilla_s - 1 < LIMITS.explore_share
    assert worker.budget.spent <= worker.budget.accrued <= (LIMITS.explore_share + 0.002) * worker.num_tokens
