"""A scenario's jobs for one seed, with every chance that a rule could meet drawn beforehand.

All rules of a seed see the same jobs, the same lucky and unlucky rounds and the same noise, so that differences between
rules are theirs. What is drawn of a round: how many drafted tokens the target *would* accept in a row, and how many the
drafter *would* offer. With k the round accepts the least of both and k, whatever was decided before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from benchmarks.policy.scenario import Acceptance, Device, Phase, Scenario, Task

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Standard deviation of the logarithm of a round's time.
ROUND_NOISE = 0.05


@dataclass(frozen=True, slots=True)
class Cell:
    """What can be known of a batch before it is decoded. All jobs of a batch are of one cell."""

    task: str
    segment: str
    sampling: str
    prompt: str
    prompt_tokens: int


@dataclass(frozen=True)
class Drafts:
    """Of one drafter and block: tokens that would be accepted and offered, [batches, jobs, rounds]."""

    accepted: NDArray[np.int8]
    offered: NDArray[np.int8]
    #: Log-odds that the draft itself gives each of its tokens, [batches, jobs, rounds, k]; see `_confidence`.
    logits: Floats
    rng: np.random.Generator

    @cached_property
    def confidence(self) -> NDArray[np.float32]:
        """How sure the draft is of each token, [batches, jobs, rounds, k], in log-odds.

        Drawn from the outcome: normal, one standard deviation apart between accepted and refused tokens (AUC .76),
        beside the logit that the job's tokens have on average. Then P(accepted | confidence) is logistic in it.
        """
        k = self.logits.shape[-1]
        accepted = np.arange(k, dtype=np.int8) < self.accepted[..., None]
        noise = self.rng.standard_normal(accepted.shape, dtype=np.float32)
        log_odds = noise + np.where(accepted, np.float32(0.5), np.float32(-0.5))
        return (log_odds + self.logits[:, :, None, :]).astype(np.float32)


@dataclass(frozen=True)
class Block:
    """Batches of one size under unchanged conditions: a phase, or a step of one that changes gradually."""

    step: int  #: number of the block in the scenario
    phase: Phase
    is_start: bool  #: whether a phase begins with it
    tasks: dict[str, Task]
    cells: tuple[Cell, ...]
    cell_of: Ints  #: [batches], an index into `cells`
    needed: Ints  #: [batches, jobs], tokens of the output
    drafts: dict[str, Drafts]
    noise: Floats  #: [batches, rounds], factors with mean 1
    hours: Floats  #: [batches], since the scenario's beginning

    @property
    def shape(self) -> tuple[int, int]:
        """Batches, and jobs of each."""
        return self.needed.shape[0], self.needed.shape[1]


@dataclass(frozen=True)
class Stream:
    """A scenario's blocks in order."""

    scenario: Scenario
    device: Device
    blocks: tuple[Block, ...]


def draw_stream(scenario: Scenario, device: Device, seed: int) -> Stream:
    """The stream of this seed."""
    rng = np.random.default_rng([seed, *scenario.name.encode()])
    blocks: list[Block] = []
    hours = 0.0
    for phase, is_start, tasks, num_jobs, lasts in conditions(scenario):
        blocks.append(_draw_block(scenario, phase, is_start, tasks, num_jobs, (hours, lasts), len(blocks), rng))
        hours += lasts
    return Stream(scenario, device, tuple(blocks))


def conditions(scenario: Scenario) -> Iterator[tuple[Phase, bool, dict[str, Task], int, float]]:
    """Phase, whether it begins, its tasks as they are, jobs and hours, of every block."""
    before = dict(scenario.tasks)
    for phase in scenario.phases:
        after = {name: _changed(task, phase, name) for name, task in before.items()}
        for step in range(1, phase.steps + 1):
            share = step / phase.steps
            jobs = phase.jobs * step // phase.steps - phase.jobs * (step - 1) // phase.steps
            tasks = {name: _between(before[name], after[name], share) for name in before}
            yield phase, step == 1, tasks, jobs, phase.hours / phase.steps
        before = after


def cells_of(tasks: dict[str, Task]) -> tuple[tuple[Cell, float, float], ...]:
    """Cells with their share of the jobs and the shift of their logits."""
    found = []
    for name, task in tasks.items():
        of_task = list(product(task.segments, task.samplings, task.prompts))
        whole = sum(s.share * t.share * p.share for s, t, p in of_task)
        for segment, sampling, prompt in of_task:
            share = task.share * segment.share * sampling.share * prompt.share / whole
            cell = Cell(name, segment.name, sampling.name, prompt.name, prompt.prompt_tokens or task.prompt_tokens)
            found.append((cell, share, segment.shift + sampling.shift + prompt.shift))
    return tuple(found)


def draw_rounds(
    scenario: Scenario, tasks: dict[str, Task], cell_of: Ints, batch: int, rng: np.random.Generator
) -> tuple[Ints, dict[str, Drafts], Floats]:
    """Outputs, drafts and noise for batches of these cells."""
    cells = cells_of(tasks)
    medians = np.array([tasks[cell.task].tokens for cell, _, _ in cells])[cell_of]
    spreads = np.array([tasks[cell.task].tokens_spread for cell, _, _ in cells])[cell_of]
    lengths = medians[:, None] * np.exp(spreads[:, None] * rng.standard_normal((len(cell_of), batch)))
    longest = np.array([tasks[cell.task].longest for cell, _, _ in cells])[cell_of]
    needed = np.clip(np.rint(lengths), 2, (longest * medians)[:, None]).astype(np.int64)
    num_rounds = int(needed.max()) - 1  # the prefill yields the first token
    drafts = {}
    for drafter, most in scenario.draft_tokens.items():
        alpha, reach = _logits(cells, tasks, drafter, most)
        spread = np.array([tasks[cell.task].job_spread for cell, _, _ in cells])[cell_of]
        own = (spread[:, None] * rng.standard_normal((len(cell_of), batch)))[..., None]
        of_job = alpha[cell_of][:, None, :] + own
        accepted = _runs(of_job, num_rounds, rng)
        offered = _runs(reach[cell_of][:, None, :] + own, num_rounds, rng)
        drafts[drafter] = Drafts(accepted, offered, of_job, rng.spawn(1)[0])
    noise = np.exp(ROUND_NOISE * rng.standard_normal((len(cell_of), num_rounds)) - ROUND_NOISE**2 / 2)
    return needed, drafts, noise


def _draw_block(
    scenario: Scenario,
    phase: Phase,
    is_start: bool,
    tasks: dict[str, Task],
    num_jobs: int,
    time: tuple[float, float],
    step: int,
    rng: np.random.Generator,
) -> Block:
    cells = cells_of(tasks)
    num_batches = max(1, num_jobs // phase.batch)
    shares = np.array([share for _, share, _ in cells])
    cell_of = rng.choice(len(cells), size=num_batches, p=shares / shares.sum())
    needed, drafts, noise = draw_rounds(scenario, tasks, cell_of, phase.batch, rng)
    start, lasts = time
    hours = start + lasts * np.arange(num_batches) / num_batches
    return Block(
        step, phase, is_start, tasks, tuple(cell for cell, _, _ in cells), cell_of, needed, drafts, noise, hours
    )


def _logits(
    cells: tuple[tuple[Cell, float, float], ...], tasks: dict[str, Task], drafter: str, most: int
) -> tuple[Floats, Floats]:
    """Of α_i and reach_i, [cells, positions]. A certainty stays one under any shift."""
    rows = [(tasks[cell.task].drafters[drafter].at(most), shift) for cell, _, shift in cells]
    with np.errstate(divide="ignore"):
        alpha = np.array([[logit(a) + shift for a in at[0]] for at, shift in rows])
        reach = np.array([[logit(r) + shift for r in at[1]] for at, shift in rows])
    return alpha, reach


def logit(p: float) -> float:
    """ln(p / (1 - p)); a certainty is infinite."""
    return float(np.log(p) - np.log1p(-p)) if 0 < p < 1 else (np.inf if p else -np.inf)


def _runs(logits: Floats, num_rounds: int, rng: np.random.Generator) -> NDArray[np.int8]:
    """Successes in a row, position i with the probability of its logit: [batches, jobs, rounds]."""
    through = np.cumprod(1 / (1 + np.exp(-logits)), axis=-1)
    draws = rng.random((*logits.shape[:2], num_rounds), dtype=np.float32)
    runs = np.zeros(draws.shape, dtype=np.int8)
    for i in range(logits.shape[-1]):
        runs += draws < through[..., i, None]
    return runs


def _changed(task: Task, phase: Phase, name: str) -> Task:
    change = phase.tasks.get(name)
    if change is None:
        return task
    update: dict[str, object] = {"drafters": {**task.drafters, **change.drafters}}
    if change.share is not None:
        update["share"] = change.share
    if change.tokens is not None:
        update["tokens"] = change.tokens
    return task.model_copy(update=update)


def _between(before: Task, after: Task, share: float) -> Task:
    """The task when `share` of the way is gone; acceptance moves in steps of equal size."""
    if share == 1 or before == after:
        return after
    drafters = {}
    for name, then in before.drafters.items():
        now = after.drafters[name]
        most = max(len(then.alpha), len(now.alpha), len(then.reach), len(now.reach))
        mixed = [
            tuple(a + share * (b - a) for a, b in zip(x, y, strict=True))
            for x, y in zip(then.at(most), now.at(most), strict=True)
        ]
        drafters[name] = Acceptance(alpha=mixed[0], reach=mixed[1])
    return after.model_copy(update={"drafters": drafters, "share": before.share + share * (after.share - before.share)})
