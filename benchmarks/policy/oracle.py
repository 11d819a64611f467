"""The clairvoyant: it knows every α, every reach and every true cost of the moment, but not the luck of a round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.policy.rounds import replay
from benchmarks.policy.scenario import Device, Phase, Scenario, Task
from benchmarks.policy.stream import Block, Floats, Ints, cells_of, conditions, draw_rounds

#: Jobs that an expected time rests on. All alternatives decode the same ones, so differences are known far better.
NUM_JOBS = 960


@dataclass(frozen=True)
class Oracle:
    """Expected milliseconds of a batch, and which action takes least."""

    scenario: Scenario
    expected_ms: tuple[Floats, ...]  #: a block each: [cells, actions]

    def best(self, step: int) -> Ints:
        """Of each cell in this block, the number of the best action."""
        return np.asarray(self.expected_ms[step].argmin(axis=1), dtype=np.int64)

    def over_best(self, step: int) -> Floats:
        """Expected time over the best action's, [cells, actions]."""
        expected = self.expected_ms[step]
        return np.asarray(expected / expected.min(axis=1, keepdims=True), dtype=np.float64)


def know(scenario: Scenario, device: Device, *, seed: int = 0, num_jobs: int = NUM_JOBS) -> Oracle:
    """Expected times of all actions in every block, from jobs that no rule ever meets."""
    known: dict[str, Floats] = {}
    blocks = []
    for phase, _, tasks, _, _ in conditions(scenario):
        key = repr((phase.batch, sorted(phase.slower.items()), tasks))
        if key not in known:
            known[key] = _expected(scenario, device, phase, tasks, seed, num_jobs)
        blocks.append(known[key])
    return Oracle(scenario, tuple(blocks))


def _expected(
    scenario: Scenario, device: Device, phase: Phase, tasks: dict[str, Task], seed: int, num_jobs: int
) -> Floats:
    rng = np.random.default_rng([seed, 1, *scenario.name.encode()])
    cells = cells_of(tasks)
    num_batches = max(1, num_jobs // phase.batch)
    rows = []
    for number in range(len(cells)):
        cell_of = np.full(num_batches, number)
        needed, drafts, noise = draw_rounds(scenario, tasks, cell_of, phase.batch, rng)
        block = Block(
            0,
            phase,
            True,
            tasks,
            tuple(cell for cell, _, _ in cells),
            cell_of,
            needed,
            drafts,
            noise,
            np.zeros(num_batches),
        )
        rows.append([replay(block, device, scenario.draft_tokens, *action).ms.mean() for action in scenario.actions])
    return np.array(rows)
