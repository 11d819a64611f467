"""All rules on one seed of a scenario, beside the oracle: what each lost, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.policy.ours import Ours
from benchmarks.policy.play import Oracle, Played, Trace, play
from benchmarks.policy.scenario import Device, Scenario
from benchmarks.policy.stream import Floats, draw_stream

#: Share of the throughput that control and exploration may cost without counting against a rule: the stated budget.
BUDGET_SHARE = 0.02
#: Jobs after which a new task's choice is judged, and how near to the best it has to be.
COLD_JOBS, COLD_WITHIN = 50, 1.03


@dataclass(frozen=True, slots=True)
class Score:
    """One rule on one seed."""

    of_oracle: float  #: goodput over the oracle's
    of_oracle_net: float  #: the same after subtracting the stated budget
    of_vanilla: float
    budget_share: float  #: tokens decoded for control and exploration
    budget_loss: float  #: time that those lost to the oracle, over its whole time
    cold: float | None  #: share of new tasks whose choice was near the best after `COLD_JOBS` jobs; None: not judged
    #: By task and sampling bucket with an interval: measured, low, high and true speed-up. With slots, ours only.
    speedups: tuple[tuple[float, float, float, float], ...] = ()
    jobs_until_back: int | None = None  #: after the scenario's hiccup, before its drafter is chosen again


def rule_names(scenario: Scenario) -> list[str]:
    """Every rule that plays in this scenario."""
    return ["ours", *(action_name(*action) for action in scenario.actions)]


def action_name(drafter: str | None, k: int) -> str:
    """vanilla, lookup:4, …"""
    return "vanilla" if drafter is None else f"{drafter}:{k}"


def compare(scenario: Scenario, device: Device, oracle: Oracle, seed: int, rules: Sequence[str]) -> dict[str, Score]:
    """Scores of these rules on the same stream."""
    played = Played(draw_stream(scenario, device, seed))
    best = played.oracle_ms(oracle)
    vanilla = float(played.fixed_ms(None, 0).sum())
    judge = _Judge(played, oracle, best, vanilla)
    actions = {action_name(*action): action for action in scenario.actions}
    scores = {}
    for name in rules:
        if name in actions:
            ms = played.fixed_ms(*actions[name])
            number = scenario.actions.index(actions[name])
            trace = Trace(ms, np.zeros(len(ms), np.int64), np.full(len(ms), number))
        else:
            trace = play(played, Ours(scenario, device.points(scenario.inferred), seed))
        scores[name] = judge.score(trace)
    return scores


class _Judge:
    def __init__(self, played: Played, oracle: Oracle, best_ms: Floats, vanilla_ms: float) -> None:
        self._best, self._vanilla = best_ms, vanilla_ms
        scenario, blocks = played.stream.scenario, played.stream.blocks
        self._scenario = scenario
        self._tokens = np.concatenate([block.needed.sum(axis=1) for block in blocks])
        self._jobs = np.concatenate([np.full(len(block.cell_of), block.shape[1]) for block in blocks])
        self._over_best = np.concatenate([oracle.over_best(block.step)[block.cell_of] for block in blocks])
        self._tasks = np.array([block.cells[c].task for block in blocks for c in block.cell_of.tolist()])

    def score(self, trace: Trace) -> Score:
        excess = trace.ms - self._best
        budget = trace.is_budget > 0
        share = float(self._tokens[budget].sum() / self._tokens.sum())
        # What it cost, up to the stated budget: who loses more pays for the rest.
        best = float(self._best.sum())
        lost = max(0.0, float(excess[budget].sum()))
        excused = min(lost, BUDGET_SHARE * best)
        total = float(trace.ms.sum())
        return Score(
            best / total,
            best / (total - excused),
            self._vanilla / total,
            share,
            lost / best,
            self._cold(trace),
        )

    def _cold(self, trace: Trace) -> float:
        """By expected time, the first choice outside the budget after a new task's first jobs.

        At its beginning a stream's tasks are all new; where the scenario names a new task, that one is judged alone.
        """
        new = self._scenario.new_task
        judged = []
        for task in np.unique(self._tasks) if new is None else [new]:
            is_it = self._tasks == task
            seen = np.cumsum(self._jobs * is_it) - self._jobs * is_it
            later = np.flatnonzero(is_it & (seen >= COLD_JOBS) & (trace.is_budget == 0))
            judged.append(len(later) > 0 and self._over_best[later[0], trace.actions[later[0]]] <= COLD_WITHIN)
        return sum(map(bool, judged)) / len(judged)
