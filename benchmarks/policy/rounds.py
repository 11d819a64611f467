"""What decoding a block's batches takes and yields: whole blocks at one (drafter, k), or a batch round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from alphaloop.costs import CostTable
from benchmarks.policy.scenario import Device
from benchmarks.policy.stream import Block, Floats, Ints

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
        """Up to so many sequences and draft tokens. A table without these parts is refused."""
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
    wanted: Ints  #: [batches, jobs], tokens behind the prefill's

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


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a batch, for rules that follow rounds. Lists are by running job."""

    jobs: Sequence[int]  #: numbers of the jobs still running
    num_verified: Sequence[int]  #: drafted tokens that went into the pass
    num_accepted: Sequence[int]


def play_rounds(
    block: Block,
    costs: Costs,
    index: int,
    drafter: str,
    *,
    lengths: Callable[[Sequence[int], Sequence[int]], tuple[int, Sequence[int]]],
    observe: Callable[[Round], None],
) -> float:
    """Decode one batch round by round; milliseconds without its prompts.

    `lengths(jobs, numbers)` says for the running jobs, which stand before their so-manieth round, how many tokens are
    drafted for all and how many of them go into the target's pass for each.
    """
    num_jobs = block.shape[1]
    accepted = block.drafts[drafter].accepted[index].tolist()
    offered = block.drafts[drafter].offered[index].tolist()
    noise = block.noise[index].tolist()
    left = [n - 1 for n in block.needed[index].tolist()]
    numbers = [0] * num_jobs
    running = [j for j in range(num_jobs) if left[j] > 0]
    total, step = 0.0, 0
    passes, drafts = costs.passes[num_jobs].tolist(), costs.drafts[drafter][num_jobs].tolist()
    while running:
        drafted, wanted = lengths(running, numbers)
        verified = [min(w, offered[j][numbers[j]]) for j, w in zip(running, wanted, strict=True)]
        got = [min(v, accepted[j][numbers[j]]) for j, v in zip(running, verified, strict=True)]
        num_running = len(running)
        mean = sum(verified) / num_running
        below = int(mean)
        ms = passes[below]
        if mean > below:
            ms += (mean - below) * (passes[below + 1] - passes[below])
        ms = (ms + drafts[drafted]) * noise[step] * num_running / num_jobs
        total, step = total + ms, step + 1
        observe(Round(running, verified, got))
        for j, a in zip(running, got, strict=True):
            left[j] -= a + 1
            numbers[j] += 1
        running = [j for j in running if left[j] > 0]
    return total
