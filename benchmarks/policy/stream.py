"""A stream of jobs in batches, drawn once for all rules, and what decoding it takes and yields.

Whole blocks are replayed at one (drafter, k), or a batch round by round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from alphaloop.costs import CostTable
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
    form: str = ""


@dataclass(frozen=True)
class Drafts:
    """For one drafter and block: tokens that would be accepted and offered, [batches, jobs, rounds]."""

    accepted: NDArray[np.int8]
    offered: NDArray[np.int8]


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
        of_task = list(product(task.segments, task.samplings, task.prompts, task.forms))
        whole = sum(math.prod(part.share for part in parts) for parts in of_task)
        for parts in of_task:
            segment, sampling, prompt, form = parts
            prompt_tokens = prompt.prompt_tokens or task.prompt_tokens
            cell = Cell(name, segment.name, sampling.name, prompt.name, prompt_tokens, form.name)
            share = math.prod(part.share for part in (task, *parts)) / whole
            found.append((cell, share, sum(part.shift for part in parts)))
    return tuple(found)


def draw_rounds(
    scenario: Scenario, tasks: dict[str, Task], cell_of: Ints, batch: int, rng: np.random.Generator
) -> tuple[Ints, dict[str, Drafts], Floats]:
    """Outputs, drafts and noise for batches of these cells."""
    cells = cells_of(tasks)
    medians = np.array([(1 - tasks[cell.task].forced) * tasks[cell.task].tokens for cell, _, _ in cells])[cell_of]
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
        drafts[drafter] = Drafts(accepted, offered)
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
    """Logits of α_i and reach_i, [cells, positions]. A certainty stays one under any shift."""
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


#: Batches replayed together: their arrays then stay in the processor's cache.
_CHUNK = 32


@dataclass(frozen=True, slots=True)
class Counts:
    """What rounds came to, prefills left out. All but the first three by position."""

    rounds: Ints  #: [batches, jobs]
    empty: Ints  #: rounds without a proposal
    cropped: Ints
    proposed: Ints  #: [batches, jobs, k]
    trials: Ints
    accepts: Ints


@dataclass(frozen=True)
class Outcomes:
    """A block decoded at one (drafter, k)."""

    ms: Floats  #: [batches]
    read_ms: Floats  #: [batches], of it, reading prompts
    draft_ms: Floats  #: [batches], of it, drafting
    count: Callable[[], Counts]

    @cached_property
    def counts(self) -> Counts:
        """Made when they are first asked for: most settings are only ever timed."""
        return self.count()


@dataclass(frozen=True, slots=True)
class Costs:
    """A table's times at whole widths, so that a round is looked up and not interpolated anew."""

    passes: Floats  #: [sequences, positions - 1], the target
    drafts: dict[str, Floats]  #: [sequences, k], proposals; nothing for k = 0

    @classmethod
    def of(cls, table: CostTable, most_sequences: int, draft_tokens: dict[str, int]) -> Costs:
        """Up to `most_sequences` sequences and these draft tokens. A table without these parts is refused."""
        widest = max(draft_tokens.values(), default=0) + 1
        drafts = {d: _grid(table, d, most_sequences, k + 1) for d, k in draft_tokens.items()}
        for grid in drafts.values():
            grid[:, 0] = 0.0
        return cls(_grid(table, None, most_sequences, widest), drafts)


def _grid(table: CostTable, part: str | None, most_sequences: int, widest: int) -> Floats:
    grid = np.zeros((most_sequences + 1, widest))
    for batch in range(1, most_sequences + 1):
        for width in range(1, widest + 1):
            ms = table.part_ms(part, batch, width)
            assert ms is not None, f"never measured: {part}"
            grid[batch, width - 1] = ms
    return grid


def real_costs(device: Device, block: Block, draft_tokens: dict[str, int]) -> tuple[CostTable, Costs]:
    """The device's true times in this block."""
    key = tuple(sorted(block.phase.slower.items()))
    return _real_costs(_Device(device), key, block.shape[1], tuple(sorted(draft_tokens.items())))


class _Device:
    """A device as a key: by identity, since its dictionaries have no hash."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __hash__(self) -> int:
        return id(self.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Device) and other.device is self.device


@lru_cache(maxsize=256)
def _real_costs(
    device: _Device, slower: tuple[tuple[str, float], ...], batch: int, draft_tokens: tuple[tuple[str, int], ...]
) -> tuple[CostTable, Costs]:
    table = device.device.table(dict(slower))
    return table, Costs.of(table, batch, dict(draft_tokens))


def replay(block: Block, device: Device, draft_tokens: dict[str, int], drafter: str | None, k: int) -> Outcomes:
    """Every batch of the block at this draft length; vanilla is k = 0."""
    table, costs = real_costs(device, block, draft_tokens)
    num_batches = block.shape[0]
    reading = read_ms(block, table, drafter)
    ms, draft_ms = reading.copy(), np.zeros(num_batches)
    for rows in _chunks(block):
        lengths = _Lengths.of(block, drafter, k, rows)
        took, draft_ms[rows] = _rounds_ms(costs, drafter, k, lengths, block.noise[rows])
        ms[rows] += took
    return Outcomes(ms, reading, draft_ms, lambda: _count(block, drafter, k))


def _chunks(block: Block) -> Iterator[Ints]:
    """Rows of batches of alike length, a few at a time."""
    order = np.argsort(block.needed.max(axis=1), kind="stable")
    for first in range(0, len(order), _CHUNK):
        yield order[first : first + _CHUNK]


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Draft lengths round by round, [batches, jobs, rounds]."""

    offered: NDArray[np.int8]
    accepted: NDArray[np.int8]
    before: NDArray[np.int32]  #: tokens out before the round
    used: NDArray[np.bool_]  #: whether the job is still running
    wanted: Ints  #: [batches, jobs], tokens after the prefill's

    @classmethod
    def of(cls, block: Block, drafter: str | None, k: int, rows: Ints) -> _Lengths:
        wanted = block.needed[rows] - 1
        most = int(wanted.max())
        if drafter is None or k == 0:
            offered = accepted = np.zeros((*wanted.shape, most), dtype=np.int8)
        else:
            drafts = block.drafts[drafter]
            offered = np.minimum(drafts.offered[rows, :, :most], np.int8(k))
            accepted = np.minimum(drafts.accepted[rows, :, :most], offered)
        yields = accepted.astype(np.int16) + np.int16(1)
        before = np.cumsum(yields, axis=-1, dtype=np.int32) - yields
        return cls(offered, accepted, before, before < wanted[..., None], wanted)

    def cut(self) -> tuple[NDArray[np.int8], NDArray[np.int8], Ints, NDArray[np.bool_]]:
        """Offered and accepted, censored where a text ends inside its accepted tokens; rounds; which jobs were cut."""
        rounds = self.used.sum(axis=-1)
        last = (rounds - 1)[..., None]
        left = self.wanted - np.take_along_axis(self.before, last, -1)[..., 0]
        is_cut = left <= np.take_along_axis(self.accepted, last, -1)[..., 0]
        offered, accepted = np.array(self.offered), np.array(self.accepted)
        for lengths in (offered, accepted):
            end = np.take_along_axis(lengths, last, -1)[..., 0]
            np.put_along_axis(lengths, last, np.where(is_cut, left, end)[..., None].astype(np.int8), -1)
        return offered, accepted, rounds, is_cut


def _count(block: Block, drafter: str | None, k: int) -> Counts:
    by_job = [np.zeros(block.shape, np.int64) for _ in range(3)]
    by_position = [np.zeros((*block.shape, k), np.int64) for _ in range(3)]
    out = Counts(*by_job, *by_position)
    for rows in _chunks(block):
        lengths = _Lengths.of(block, drafter, k, rows)
        offered, accepted, out.rounds[rows], out.cropped[rows] = lengths.cut()
        used = lengths.used
        tested = np.minimum(offered, accepted + np.int8(1))
        out.empty[rows] = (used & (offered == 0)).sum(axis=-1)
        for i in range(k):
            out.proposed[rows, :, i] = (used & (offered > i)).sum(axis=-1)
            out.trials[rows, :, i] = (used & (tested > i)).sum(axis=-1)
            out.accepts[rows, :, i] = (used & (accepted > i)).sum(axis=-1)
    return out


def _rounds_ms(costs: Costs, drafter: str | None, k: int, lengths: _Lengths, noise: Floats) -> tuple[Floats, Floats]:
    """Milliseconds of each batch's rounds, and of them drafting.

    Slots that fall free are taken by other jobs, so the load stays what it is: a round costs what it costs at the full
    batch, at the mean width of those still running, and they bear their share of it.
    """
    batch, most = lengths.used.shape[1:]
    running = lengths.used.sum(axis=1)
    share = running / batch * noise[:, :most]
    mean = (lengths.offered * lengths.used).sum(axis=1) / np.maximum(running, 1)
    below = np.minimum(mean.astype(np.int64), costs.passes.shape[1] - 1)
    above = np.minimum(below + 1, costs.passes.shape[1] - 1)
    narrow, wide = costs.passes[batch, below], costs.passes[batch, above]
    passes = (share * (narrow + (mean - below) * (wide - narrow))).sum(axis=1)
    drafts = share.sum(axis=1) * (costs.drafts[drafter][batch, k] if drafter is not None else 0.0)
    return passes + drafts, drafts


def read_ms(block: Block, table: CostTable, drafter: str | None) -> Floats:
    """Milliseconds that each batch's prompts take, one after the other; a drafter reads them too."""
    by_cell = [
        table.prefill_ms(None, cell.prompt_tokens)
        + (table.prefill_ms(drafter, cell.prompt_tokens) if drafter is not None else 0.0)
        for cell in block.cells
    ]
    return np.asarray(block.shape[1] * np.array(by_cell)[block.cell_of], dtype=np.float64)
