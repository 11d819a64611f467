"""Slices put together for the comparison: complete blocks, and groups of strata with enough of them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from alphaloop.switchback.slices import SUMS, Phase, Slice, Stratum

#: Doublings of the load within which a control slice of requests is compared.
_NEAR: Final = 0.5


@dataclass(frozen=True, slots=True)
class ComparedBlock:
    """A control slice and the treatment windows around it."""

    before: Slice
    control: Slice
    after: Slice
    control_parts: tuple[Slice, ...] = ()  #: of requests: those of `control` at each load

    @property
    def stratum(self) -> Stratum:
        """By the window before the control slice: what a block is compared with must not depend on what comes of it.

        By the control slice, blocks in a moment of high load would have windows of lower load beside them, and the
        reverse (tried on bursts, vanilla against vanilla: 0.8 % too fast).
        """
        return self.before.stratum


def compared_blocks(slices: Iterable[Slice]) -> list[ComparedBlock]:
    """The blocks that can be compared, in the order they began.

    A block that ended early is left out unless its last window has half the rounds of its first: with one window only,
    a load that grows or falls would count as a difference between the arms.
    """
    by_block: dict[str, dict[Phase, list[Slice]]] = defaultdict(lambda: defaultdict(list))
    for one in slices:
        if one.phase is not Phase.BETWEEN and one.num_sequence_rounds:
            by_block[one.block_id][one.phase].append(one)
    blocks = [
        _compared(found[Phase.BEFORE], found[Phase.CONTROL], found[Phase.AFTER])
        for found in by_block.values()
        if found.keys() >= {Phase.BEFORE, Phase.CONTROL, Phase.AFTER}
    ]
    whole = [block for block in blocks if 2 * block.after.num_rounds >= block.before.num_rounds]
    return sorted(whole, key=lambda block: block.control.started_at)


def _compared(before: Sequence[Slice], control: Sequence[Slice], after: Sequence[Slice]) -> ComparedBlock:
    """Of requests' control slices those are compared whose load is about that of the window before."""
    window = _added_up(before)
    away = {id(one): abs(math.log2(one.mean_running / window.mean_running)) for one in control}
    nearest = min(away.values())
    near = [one for one in control if away[id(one)] <= max(_NEAR, nearest)]
    return ComparedBlock(window, _added_up(near), _added_up(after), tuple(control))


def _added_up(slices: Sequence[Slice]) -> Slice:
    """Slices of one block and phase, at least one, as one."""
    first = min(slices, key=lambda one: one.started_at)
    if len(slices) == 1:
        return first
    return replace(first, **{name: sum(getattr(one, name) for one in slices) for name in SUMS})


def collapsed(
    blocks: Sequence[ComparedBlock], strata: Iterable[Stratum], *, least_blocks: int
) -> Mapping[Stratum, int]:
    """The group of every stratum: neighbours are put together until each group has `least_blocks`.

    Collapsed strata (Cochran 1977, §5A.12). Contexts are put together before loads are. What is left over joins the
    last group.
    """
    num_blocks = Counter(block.stratum for block in blocks)
    groups: list[list[Stratum]] = [[]]
    num_grouped = 0
    for stratum in sorted({*strata, *num_blocks}):
        if num_grouped >= least_blocks:
            groups.append([])
            num_grouped = 0
        groups[-1].append(stratum)
        num_grouped += num_blocks[stratum]
    if num_grouped < least_blocks and len(groups) > 1:
        last = groups.pop()
        groups[-1] += last
    return {stratum: index for index, group in enumerate(groups) for stratum in group}
