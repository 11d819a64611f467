"""All rules on one seed of a scenario, beside the oracle: what each lost, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from alphaloop.costs import CostPoint, CostTable
from benchmarks.policy.oracle import Oracle
from benchmarks.policy.play import Played, RoundRule, Rule, Trace, play
from benchmarks.policy.rounds import Costs
from benchmarks.policy.rules.ema_tiers import EmaTiers
from benchmarks.policy.rules.epsilon_greedy import EpsilonGreedy
from benchmarks.policy.rules.ours import EpsilonOverPosteriors, Ours
from benchmarks.policy.rules.survival import Survival
from benchmarks.policy.rules.thresholds import AlphaThresholds
from benchmarks.policy.scenario import Device, Scenario
from benchmarks.policy.stream import Floats, draw_stream

#: Of the throughput, what control and exploration may cost without counting against a rule: the stated budget.
BUDGET_SHARE = 0.02
#: Jobs after which a new task's choice is judged, and how near to the best it has to be.
COLD_JOBS, COLD_WITHIN = 50, 1.03
NUM_POINTS = 120


@dataclass(frozen=True, slots=True)
class Score:
    """One rule on one seed."""

    of_oracle: float  #: goodput over the oracle's
    of_oracle_net: float  #: the same after subtracting the stated budget
    of_vanilla: float
    budget_share: float  #: tokens decoded for control and exploration
    budget_loss: float  #: time that those lost to the oracle, over its whole time
    flaps: float  #: changes of a cell's choice a hundred jobs
    cold: float | None  #: share of new tasks whose choice was near the best after `COLD_JOBS` jobs; None: not judged
    regret: tuple[float, ...]  #: time lost up to each of `NUM_POINTS` moments, over the oracle's whole time
    #: By task and sampling bucket with an interval: measured, low, high and true speed-up. With slots, ours only.
    speedups: tuple[tuple[float, float, float, float], ...] = ()
    jobs_until_back: int | None = None  #: after the scenario's hiccup, before its drafter is chosen again


@dataclass(frozen=True, slots=True)
class Setting:
    """What a rule is built from in a scenario."""

    scenario: Scenario
    points: tuple[CostPoint, ...]  #: costs as they were calibrated
    device: Device
    best: Callable[[], dict[str, int]]  #: of each drafter the best single k, with hindsight; the best drafter first
    seed: int

    @property
    def grids(self) -> Costs:
        """The calibrated times by whole widths."""
        return Costs.of(
            CostTable(self.points), max(phase.batch for phase in self.scenario.phases), self.scenario.draft_tokens
        )

    @property
    def model_drafter(self) -> str:
        """The one with a draft model, which adaptive engines ask for; else the best."""
        return "draft" if "draft" in self.scenario.draft_tokens else next(iter(self.best()))

    @property
    def survival_tokens(self) -> int:
        """The draft length with which that rule does best in this scenario: the best single one, or some more."""
        best = self.best()[self.model_drafter] + self.scenario.survival_more
        return min(best, self.scenario.draft_tokens[self.model_drafter])


Maker = Callable[[Setting], Rule | RoundRule]

MAKERS: dict[str, Maker] = {
    "ours": lambda s: Ours(s.scenario, s.points, s.seed),
    "epsilon_posteriors": lambda s: EpsilonOverPosteriors(s.scenario, s.points, s.seed),
    "epsilon_greedy": lambda s: EpsilonGreedy(s.scenario.actions, s.seed),
    "alpha_thresholds": lambda s: AlphaThresholds(*next(iter(s.best().items()))),
    "ema_tiers": lambda s: EmaTiers(s.model_drafter, s.scenario.draft_tokens[s.model_drafter]),
    "survival": lambda s: Survival(s.model_drafter, s.survival_tokens, s.grids),
}


#: Rules that take as long as all others together; they may be given fewer seeds.
SLOW = ("epsilon_posteriors", "survival")


def rule_names(scenario: Scenario) -> list[str]:
    """Every rule that plays in this scenario."""
    return [*MAKERS, *(action_name(*action) for action in scenario.actions)]


def action_name(drafter: str | None, k: int) -> str:
    """vanilla, lookup:4, …"""
    return "vanilla" if drafter is None else f"{drafter}:{k}"


def compare(scenario: Scenario, device: Device, oracle: Oracle, seed: int, rules: Sequence[str]) -> dict[str, Score]:
    """Scores of these rules on the same stream."""
    played = Played(draw_stream(scenario, device, seed))
    best = played.oracle_ms(oracle)
    vanilla = float(played.fixed_ms(None, 0).sum())
    judge = _Judge(played, oracle, best, vanilla)
    setting = Setting(scenario, device.points(scenario.inferred), device, cache(partial(_best_lengths, played)), seed)
    actions = {action_name(*action): action for action in scenario.actions}
    scores = {}
    for name in rules:
        if name in actions:
            ms = played.fixed_ms(*actions[name])
            number = scenario.actions.index(actions[name])
            trace = Trace(ms, np.zeros(len(ms), np.int64), np.full(len(ms), number))
        else:
            trace = play(played, MAKERS[name](setting))
        scores[name] = judge.score(trace)
    return scores


def _best_lengths(played: Played) -> dict[str, int]:
    actions = [(drafter, k) for drafter, k in played.stream.scenario.actions if drafter is not None]
    best: dict[str, int] = {}
    for drafter, k in sorted(actions, key=lambda action: float(played.fixed_ms(*action).sum())):
        best.setdefault(drafter, k)
    return best


class _Judge:
    def __init__(self, played: Played, oracle: Oracle, best_ms: Floats, vanilla_ms: float) -> None:
        self._best, self._vanilla = best_ms, vanilla_ms
        scenario, blocks = played.stream.scenario, played.stream.blocks
        self._scenario = scenario
        self._tokens = np.concatenate([block.needed.sum(axis=1) for block in blocks])
        self._jobs = np.concatenate([np.full(len(block.cell_of), block.shape[1]) for block in blocks])
        self._over_best = np.concatenate([oracle.over_best(block.step)[block.cell_of] for block in blocks])
        numbers: dict[object, int] = {}
        keys = [(block.cells[c], block.shape[1]) for block in blocks for c in block.cell_of.tolist()]
        self._cells = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
        self._tasks = np.array([cell.task for cell, _ in keys])

    def score(self, trace: Trace) -> Score:
        excess = trace.ms - self._best
        budget = trace.is_budget > 0
        share = float(self._tokens[budget].sum() / self._tokens.sum())
        # What it cost, up to the stated budget: who loses more pays for the rest.
        best = float(self._best.sum())
        lost = max(0.0, float(excess[budget].sum()))
        excused = min(lost, BUDGET_SHARE * best)
        total = float(trace.ms.sum())
        moments = np.maximum(np.linspace(0, len(excess), NUM_POINTS + 1).astype(int)[1:] - 1, 0)
        regret = np.cumsum(excess)[moments] / best
        return Score(
            best / total,
            best / (total - excused),
            self._vanilla / total,
            share,
            lost / best,
            self._flaps(trace),
            self._cold(trace),
            tuple(float(r) for r in regret),
        )

    def _flaps(self, trace: Trace) -> float:
        flaps = 0
        for cell in np.unique(self._cells):
            chosen = trace.actions[(self._cells == cell) & (trace.is_budget == 0)]
            flaps += int((chosen[1:] != chosen[:-1]).sum())
        return 100 * flaps / float(self._jobs.sum())

    def _cold(self, trace: Trace) -> float | None:
        """By expected time, the first choice outside the budget after a new task's first jobs.

        At its beginning a stream's tasks are all new; where the scenario names a new task, that one is judged alone.
        """
        if trace.actions[0] < 0:
            return None
        new = self._scenario.new_task
        judged = []
        for task in np.unique(self._tasks) if new is None else [new]:
            is_it = self._tasks == task
            seen = np.cumsum(self._jobs * is_it) - self._jobs * is_it
            later = np.flatnonzero(is_it & (seen >= COLD_JOBS) & (trace.is_budget == 0))
            judged.append(len(later) > 0 and self._over_best[later[0], trace.actions[later[0]]] <= COLD_WITHIN)
        return sum(map(bool, judged)) / len(judged)
