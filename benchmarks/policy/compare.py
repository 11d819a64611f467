"""All rules on one seed of a scenario, beside the oracle: what each lost, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from alphaloop.cost import CostTable
from benchmarks.policy.oracle import Oracle
from benchmarks.policy.play import Played, RoundRule, Rule, Trace, play
from benchmarks.policy.rules.ours import Ours
from benchmarks.policy.scenario import Device, Scenario
from benchmarks.policy.stream import Floats, draw_stream

#: Tokens that may be spent on control and exploration without counting against a rule.
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
    flaps: float  #: changes of a cell's choice a hundred jobs
    cold: bool | None  #: whether the new task's choice was near the best after `COLD_JOBS` jobs; None: not judged
    regret: tuple[float, ...]  #: time lost up to each of `NUM_POINTS` moments, over the oracle's whole time


@dataclass(frozen=True, slots=True)
class Setting:
    """What a rule is built from in a scenario."""

    scenario: Scenario
    costs: CostTable  #: as they were calibrated
    device: Device
    best_drafter: str  #: of the best single (drafter, k), with hindsight
    seed: int


Maker = Callable[[Setting], Rule | RoundRule]

MAKERS: dict[str, Maker] = {
    "ours": lambda s: Ours(s.scenario.draft_tokens, s.costs, s.seed),
}


def rule_names(scenario: Scenario) -> list[str]:
    """Every rule that plays in this scenario."""
    return [*MAKERS, *(action_name(*action) for action in scenario.actions)]


def action_name(drafter: str | None, k: int) -> str:
    """vanilla, lookup:4, …"""
    return "vanilla" if drafter is None else f"{drafter}:{k}"


def compare(scenario: Scenario, device: Device, oracle: Oracle, seed: int, rules: list[str]) -> Mapping[str, Score]:
    """Scores of these rules on the same stream."""
    played = Played(draw_stream(scenario, device, seed))
    best = played.oracle_ms(oracle)
    vanilla = float(played.fixed_ms(None, 0).sum())
    judge = _Judge(played, oracle, best, vanilla)
    setting = Setting(scenario, device.table(scenario.believed), device, _best_drafter(played), seed)
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


def _best_drafter(played: Played) -> str:
    actions = [action for action in played.stream.scenario.actions if action[0] is not None]
    drafter, _ = min(actions, key=lambda action: float(played.fixed_ms(*action).sum()))
    assert drafter is not None
    return drafter


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
        self._is_new = np.array([cell.task == scenario.new_task for cell, _ in keys])

    def score(self, trace: Trace) -> Score:
        excess = trace.ms - self._best
        budget = trace.is_budget > 0
        share = float(self._tokens[budget].sum() / self._tokens.sum())
        # Only the stated share is forgiven: who explores more pays for the rest.
        excused = max(0.0, float(excess[budget].sum())) * min(1.0, BUDGET_SHARE / share if share else 0.0)
        total, best = float(trace.ms.sum()), float(self._best.sum())
        moments = np.linspace(0, len(excess), NUM_POINTS + 1).astype(int)[1:] - 1
        regret = np.cumsum(excess)[moments] / best
        return Score(
            best / total, best / (total - excused), self._vanilla / total, share, self._flaps(trace), self._cold(trace),
            tuple(float(r) for r in regret),
        )  # fmt: skip

    def _flaps(self, trace: Trace) -> float:
        flaps = 0
        for cell in np.unique(self._cells):
            chosen = trace.actions[(self._cells == cell) & (trace.is_budget == 0)]
            flaps += int((chosen[1:] != chosen[:-1]).sum())
        return 100 * flaps / float(self._jobs.sum())

    def _cold(self, trace: Trace) -> bool | None:
        """The first choice outside the budget after the new task's first jobs, by its expected time."""
        if self._scenario.new_task is None or trace.actions[0] < 0:
            return None
        seen = np.cumsum(self._jobs * self._is_new) - self._jobs * self._is_new
        later = np.flatnonzero(self._is_new & (seen >= COLD_JOBS) & (trace.is_budget == 0))
        return bool(len(later) and self._over_best[later[0], trace.actions[later[0]]] <= COLD_WITHIN)
