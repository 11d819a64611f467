"""One rule on one stream, batch after batch, what is kept of it, and the clairvoyant that it is compared with.

The oracle knows every α, every reach and every true cost of the moment, but not the luck of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.evidence import EvidenceSums
from benchmarks.policy.scenario import Device, Phase, Scenario, Task
from benchmarks.policy.stream import (
    Block,
    Cell,
    Counts,
    Floats,
    Ints,
    Outcomes,
    Stream,
    cells_of,
    conditions,
    draw_rounds,
    replay,
)

if TYPE_CHECKING:
    from benchmarks.policy.ours import Ours

#: Jobs that an expected time rests on. All alternatives decode the same ones, so differences are known far better.
NUM_JOBS = 960


@dataclass(frozen=True)
class Oracle:
    """Expected milliseconds of a batch, and which action takes least."""

    scenario: Scenario
    expected_ms: tuple[Floats, ...]  #: a block each: [cells, actions]

    def best(self, step: int) -> Ints:
        """By cell of this block, the number of the best action."""
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


@dataclass(frozen=True, slots=True)
class BlockEvidence:
    """Sums by batch, by name: all rules that ask share them."""

    num_jobs: int
    numbers: dict[str, list[float]]
    by_position: dict[str, list[list[float]]]

    @classmethod
    def of(cls, block: Block, counts: Counts, num_draft_tokens: int) -> BlockEvidence:
        """The evidence of every batch at this draft length."""
        tokens = block.needed.astype(np.float64)
        prompts = np.array([cell.prompt_tokens for cell in block.cells], dtype=np.float64)[block.cell_of]
        rounds, accepts, trials = (x.astype(np.float64) for x in (counts.rounds, counts.accepts, counts.trials))
        # Rounds accepted through the position before; a run of k has that chance at each of its positions.
        chances = np.concatenate([rounds[..., None], accepts], axis=-1)[..., :num_draft_tokens]
        chances = np.maximum(chances, trials)
        numbers = {
            "rounds": rounds,
            "offered": rounds - counts.empty,
            "tokens": tokens - 1,
            "output_tokens": tokens,
            "prompt_tokens": np.broadcast_to(prompts[:, None], tokens.shape),
            "texts": np.ones_like(tokens),
            "ends": np.ones_like(tokens),
        }
        by_position = {
            "proposed": counts.proposed,
            "chances": chances,
            "trials": trials,
            "accepts": accepts,
            "accepts_w2": accepts**2,
            "chances_w2": chances**2,
            "accepts_chances_w2": accepts * chances,
        }
        return cls(
            block.shape[1],
            {name: values.sum(axis=1).tolist() for name, values in numbers.items()},
            {name: values.sum(axis=1).astype(np.float64).tolist() for name, values in by_position.items()},
        )

    def batch(self, index: int, now: datetime) -> EvidenceSums:
        """The evidence of one batch, decoded now."""
        sums: dict[str, Any] = {name: values[index] for name, values in self.numbers.items()}
        sums |= {name: tuple(values[index]) for name, values in self.by_position.items()}
        return EvidenceSums(now, jobs=float(self.num_jobs), jobs_w2=float(self.num_jobs), **sums)


BEGINNING = datetime(2026, 1, 5, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rule sees before it decides."""

    cell: Cell
    num_jobs: int
    now: datetime


@dataclass(frozen=True, slots=True)
class Choice:
    """How a batch is decoded. Vanilla is no drafter and k = 0."""

    drafter: str | None = None
    num_draft_tokens: int = 0
    is_budget: bool = False  #: explored, which is the stated budget


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a rule sees afterwards."""

    outcomes: Outcomes
    index: int
    num_tokens: tuple[int, ...]  #: by job
    evidence: Callable[[str | None, int, datetime], EvidenceSums]  #: of (drafter, k), used or replayed

    @property
    def ms(self) -> float:
        """The batch's time, prompts included."""
        return float(self.outcomes.ms[self.index])

    @property
    def round_ms(self) -> tuple[float, float]:
        """A mean round of the full batch: the target's pass, and drafting."""
        i, out = self.index, self.outcomes
        share = len(self.num_tokens) / max(int(out.counts.rounds[i].sum()), 1)
        return float(out.ms[i] - out.read_ms[i] - out.draft_ms[i]) * share, float(out.draft_ms[i]) * share

    @property
    def mean_width(self) -> float:
        """Positions a sequence of the target's passes."""
        counts = self.outcomes.counts
        return 1 + float(counts.proposed[self.index].sum()) / max(int(counts.rounds[self.index].sum()), 1)

    def counts(self) -> Iterator[AcceptanceCounts]:
        """By job, as the engine counts: the prefill is a round without a proposal."""
        out = self.outcomes.counts
        rows = (out.rounds, out.empty, out.cropped, out.proposed, out.trials, out.accepts)
        for rounds, empty, cropped, *positions in zip(*(row[self.index].tolist() for row in rows), strict=True):
            proposed, trials, accepts = map(tuple, positions)
            yield AcceptanceCounts(rounds + 1, empty + 1, cropped, proposed, trials, accepts)


class Played:
    """A stream, and every (drafter, k) replayed on it at most once, whichever rules ask."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._outcomes: dict[tuple[int, str | None, int], Outcomes] = {}
        self._evidence: dict[tuple[int, str | None, int], BlockEvidence] = {}
        self._tokens = [[tuple(row) for row in block.needed.tolist()] for block in stream.blocks]

    def outcomes(self, block: Block, drafter: str | None, k: int) -> Outcomes:
        """The block decoded so."""
        key = (block.step, drafter, k)
        if key not in self._outcomes:
            scenario = self.stream.scenario
            self._outcomes[key] = replay(block, self.stream.device, scenario.draft_tokens, drafter, k)
        return self._outcomes[key]

    def decoded(self, block: Block, index: int, choice: Choice) -> Decoded:
        """One batch of it."""
        outcomes = self.outcomes(block, choice.drafter, choice.num_draft_tokens)

        def evidence(drafter: str | None, k: int, now: datetime) -> EvidenceSums:
            key = (block.step, drafter, k)
            if key not in self._evidence:
                self._evidence[key] = BlockEvidence.of(block, self.outcomes(block, drafter, k).counts, k)
            return self._evidence[key].batch(index, now)

        return Decoded(outcomes, index, self._tokens[block.step][index], evidence)

    def fixed_ms(self, drafter: str | None, k: int) -> Floats:
        """All batches at one setting."""
        return np.concatenate([self.outcomes(block, drafter, k).ms for block in self.stream.blocks])

    def oracle_ms(self, oracle: Oracle) -> Floats:
        """All batches, each at what is best for its cell in expectation."""
        actions = self.stream.scenario.actions
        parts = []
        for block in self.stream.blocks:
            best = oracle.best(block.step)[block.cell_of]
            ms = np.zeros(len(best))
            for number in np.unique(best):
                rows = best == number
                ms[rows] = self.outcomes(block, *actions[number]).ms[rows]
            parts.append(ms)
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class Trace:
    """What a rule did, batch by batch."""

    ms: Floats
    is_budget: Ints  #: 1 where exploring
    actions: Ints  #: number of the scenario's action


def play(played: Played, rule: Ours) -> Trace:
    """The rule decides the stream's batches in order."""
    numbers = {action: number for number, action in enumerate(played.stream.scenario.actions)}
    ms: list[float] = []
    budget: list[int] = []
    actions: list[int] = []
    for block, index, batch in _batches(played.stream, rule):
        choice = rule.choose(batch)
        decoded = played.decoded(block, index, choice)
        rule.observe(batch, choice, decoded)
        ms.append(decoded.ms)
        budget.append(choice.is_budget)
        actions.append(numbers[choice.drafter, choice.num_draft_tokens])
    return Trace(np.array(ms), np.array(budget, dtype=np.int64), np.array(actions, dtype=np.int64))


def _batches(stream: Stream, rule: Ours) -> Iterator[tuple[Block, int, Batch]]:
    for block in stream.blocks:
        if block.is_start and block.phase.restart:
            rule.restart()
        cells = block.cell_of.tolist()
        num_jobs = block.shape[1]
        for index, hours in enumerate(block.hours.tolist()):
            yield block, index, Batch(block.cells[cells[index]], num_jobs, BEGINNING + timedelta(hours=hours))
