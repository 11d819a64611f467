"""The rules of drawn tokens, for all sequences of a round whose distributions are cut alike.

Whether a draft is accepted once it is tried, and which token the target adds in a row in which no draft is, follow from
the row and from uniform numbers of their own, not from what was accepted before. So both are computed for every row at
once, of chains and trees of whatever length, and read with one wait for the device. Then the host follows each path.
`engine.verification` says which rule is for what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.proposal import DraftDistributions, Proposal
from engine.verdict import DraftVerdict

_T = TypeVar("_T")


def verify_drawn(
    p: Tensor, ids: Tensor | None, proposals: SequenceOf[Proposal], uniforms: NDArray[np.float64]
) -> list[DraftVerdict]:
    """One verdict a proposal.

    `p` [rows, columns]: the target's probabilities (float64), 1 + len(tokens) rows a proposal, one proposal after the
    other; they are used up. `ids` [rows, columns]: the token of each column, and `p` may be weights that do not add up
    to 1; None: column i is token i, which drawn proposals need. `uniforms` [rows]: independent draws from [0, 1), of
    each proposal one a draft, and the last for the token that the target adds.
    """
    plan = _plan(proposals)
    left = _Left(p, ids, uniforms)
    if plan.blocks:
        left.judge_blocks(plan.blocks)
    left.try_drawn(plan.drawn)
    for trials in plan.certain:
        left.try_certain(trials)
    last = [begin + len(proposal.tokens) for begin, proposal in zip(plan.begins, proposals, strict=True)]
    tokens, accepted = left.read(np.repeat(uniforms[last], np.diff([*plan.begins, len(p)])))
    return [
        _followed(proposal, tokens[begin : end + 1], accepted[begin:end])
        for begin, end, proposal in zip(plan.begins, last, proposals, strict=True)
    ]


@dataclass(slots=True)
class _Trials:
    """Children of equal rank among their siblings, at most one a parent."""

    rows: list[int] = field(default_factory=list)  #: of their parents
    tokens: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  #: of their uniform numbers


@dataclass(slots=True)
class _Siblings(_Trials):
    """Those that were drawn without replacement."""

    q: list[DraftDistributions] = field(
        default_factory=list
    )  #: of the first rank: what the first sibling was drawn from


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which rows and tokens every rule is about."""

    begins: list[int] = field(default_factory=list)  #: each proposal's first row
    blocks: list[tuple[int, Proposal]] = field(default_factory=list)  #: with their first rows
    drawn: list[_Siblings] = field(default_factory=list)  #: by rank
    certain: list[_Trials] = field(default_factory=list)  #: by rank: tokens that follow from the text


def _plan(proposals: SequenceOf[Proposal]) -> _Plan:
    plan, begin = _Plan(), 0
    for proposal in proposals:
        plan.begins.append(begin)
        num_in_block = _num_in_block(proposal)
        if num_in_block:
            plan.blocks.append((begin, proposal))
        if proposal.parents is not None:
            _plan_tree(plan, proposal, proposal.parents, begin, num_in_block)
        elif proposal.tokens and not num_in_block:
            trials, rows = _of_rank(plan.certain, 0, _Trials), range(begin, begin + len(proposal.tokens))
            trials.rows += rows
            trials.tokens += proposal.tokens
            trials.places += rows
        begin += 1 + len(proposal.tokens)
    return plan


def _plan_tree(plan: _Plan, proposal: Proposal, parents: SequenceOf[int], begin: int, num_in_block: int) -> None:
    num_drawn, ranks = 0 if proposal.q is None else len(proposal.q), Counter[int]()
    for place in range(num_in_block, len(parents)):
        parent = parents[place]
        rank = ranks[parent]
        trials: _Trials
        if place < num_drawn and proposal.q is not None:
            trials = siblings = _of_rank(plan.drawn, rank, _Siblings)
            if not rank:
                siblings.q.append(proposal.q[place : place + 1])
        else:
            trials = _of_rank(plan.certain, rank, _Trials)
        trials.rows.append(begin + parent + 1)
        trials.tokens.append(proposal.tokens[place])
        trials.places.append(begin + place)
        ranks[parent] += 1


def _of_rank(by_rank: list[_T], rank: int, kind: type[_T]) -> _T:
    by_rank += [kind() for _ in range(len(by_rank), rank + 1)]
    return by_rank[rank]


def _num_in_block(proposal: Proposal) -> int:
    """How many tokens the proposal begins with that were drawn as a chain."""
    num_drawn = 0 if proposal.q is None else len(proposal.q)
    if proposal.parents is None:
        return num_drawn
    return num_drawn if all(parent == place - 1 for place, parent in enumerate(proposal.parents[:num_drawn])) else 0


class _Left:
    """What is left to be drawn from in every row, as one rule after the other takes drafts out."""

    def __init__(self, p: Tensor, ids: Tensor | None, uniforms: NDArray[np.float64]) -> None:
        self._left, self._ids, self._uniforms = p, ids, uniforms
        self._sums: Tensor | None = None  # of each row
        self._places: list[int] = []
        self._accepted: list[Tensor] = []  # of these places

    def judge_blocks(self, blocks: SequenceOf[tuple[int, Proposal]]) -> None:
        """Drawn chains, each with its first row (Sun et al. 2024, Algorithm 2).

        With w_0 = 1 and w_i = min(1, w_(i-1) p(x_i) / q(x_i)), the prefix of length i < k passes with probability
        S_i / (S_i + 1 - w_i), where S_i is the sum of max(w_i p - q, 0) after it, and the whole draft with w_k. After
        the longest prefix that passes max(w p - q, 0) is left, and p after the whole draft.
        """
        lengths = [_num_in_block(proposal) for _, proposal in blocks]
        q = DraftDistributions.joined([of.q[:num] for (_, of), num in zip(blocks, lengths, strict=True) if of.q])
        places = [begin + place for (begin, _), num in zip(blocks, lengths, strict=True) for place in range(num)]
        drafts = [token for (_, of), num in zip(blocks, lengths, strict=True) for token in of.tokens[:num]]
        depths = [(block, place) for block, num in enumerate(lengths) for place in range(num)]
        rows, tokens = self._indices(places, drafts)
        block, depth = self._indices(*zip(*depths, strict=True))
        p = self._left[rows]
        ratios = torch.ones((len(blocks), max(lengths)), dtype=p.dtype, device=p.device)
        ratios[block, depth] = p.gather(1, tokens[:, None]).squeeze(1) / q.of(tokens)
        kept = [torch.ones_like(ratios[:, 0])]
        for ratio in ratios.unbind(1):
            kept.append((kept[-1] * ratio).clamp_max(1.0))
        weights = torch.stack(kept, dim=1)
        before, after = weights[block, depth], weights[block, depth + 1]
        residuals = q.taken_from(before[:, None] * p).clamp_min(0.0)
        sums = residuals.sum(dim=1)
        following = sums.roll(-1)
        (is_last,) = self._indices([place + 1 == lengths[block] for block, place in depths])
        # 0 / 0, which no number is below, stands where w_i = 1 and p = q after it: a longer prefix passes there anyway.
        passing = torch.where(is_last > 0, after, following / (following + 1 - after))
        self._accept(places, self._uniforms_at(places) < passing)
        self._left[rows] = _still_left(residuals, p)
        self._sums = None

    def try_drawn(self, by_rank: SequenceOf[_Siblings]) -> None:
        """Siblings that were drawn without replacement: x is accepted with probability min(1, r(x) / q(x))."""
        if not by_rank:
            return
        slots = {row: slot for slot, row in enumerate(by_rank[0].rows)}
        q = DraftDistributions.joined(by_rank[0].q)
        for rank, trials in enumerate(by_rank):
            rows, tokens = self._indices(trials.rows, trials.tokens)
            if rank:
                (own,) = self._indices([slots[row] for row in trials.rows])
                q, slots = q[own], {row: slot for slot, row in enumerate(trials.rows)}
            left = self._left[rows]
            left = left / left.sum(dim=1, keepdim=True)
            share = left.gather(1, tokens[:, None]).squeeze(1)
            self._accept(trials.places, self._uniforms_at(trials.places) * q.of(tokens) < share)
            self._left[rows] = _still_left(q.taken_from(left).clamp_min(0.0), left)
            q = q.without(tokens)
        self._sums = None

    def try_certain(self, trials: _Trials) -> None:
        """Tokens that follow from the text: x is accepted with probability r(x), and r loses it."""
        rows, tokens = self._indices(trials.rows, trials.tokens)
        sums = self._left.sum(dim=1) if self._sums is None else self._sums
        if self._ids is None:
            columns, shares = tokens, self._left[rows, tokens]
        else:
            shares, columns = self._left[rows].where(self._ids[rows] == tokens[:, None], 0.0).max(dim=1)
        self._accept(trials.places, self._uniforms_at(trials.places) * sums[rows] < shares)
        self._left.index_put_((rows, columns), -shares, accumulate=True)
        sums = self._left.sum(dim=1)
        # Where rounding alone rejects a certain token nothing would be left: there it stays.
        restored = shares.where(sums[rows] <= 0, 0.0)
        self._left.index_put_((rows, columns), restored, accumulate=True)
        self._sums = sums.index_put_((rows,), restored, accumulate=True)

    def read(self, uniforms: NDArray[np.float64]) -> tuple[list[int], list[bool]]:
        """The token that each row adds, drawn at its own of `uniforms`, and whether the draft at each place stays."""
        columns = draw_rows(self._left, torch.from_numpy(uniforms[:, None]).to(self._left.device))
        tokens = (columns if self._ids is None else self._ids.gather(1, columns)).squeeze(1)
        numbers: list[int] = (torch.cat((tokens, *self._accepted)) if self._accepted else tokens).tolist()
        accepted = [False] * len(tokens)
        for place, is_accepted in zip(self._places, numbers[len(tokens) :], strict=True):
            accepted[place] = bool(is_accepted)
        return numbers[: len(tokens)], accepted

    def _accept(self, places: SequenceOf[int], accepted: Tensor) -> None:
        self._places += places
        self._accepted.append(accepted)

    def _indices(self, *lists: SequenceOf[int]) -> tuple[Tensor, ...]:
        return torch.tensor(lists, dtype=torch.long, device=self._left.device).unbind(0)

    def _uniforms_at(self, places: SequenceOf[int]) -> Tensor:
        return torch.from_numpy(self._uniforms[places]).to(self._left.device)


def _still_left(residuals: Tensor, before: Tensor) -> Tensor:
    """What is left in each row after a rejection: `residuals`, or `before` where rounding alone caused the rejection.

    Where p and q differ by rounding only, a draft is still rejected once in 10^16 times, and nothing remains.
    """
    return torch.where((residuals > 0).any(dim=1, keepdim=True), residuals, before)


def draw_rows(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Columns drawn in proportion to `weights` [rows, columns], one a row, by inverting its cumulative sum: [rows, 1].

    `uniforms` [rows, 1]: below 1.
    """
    cumulative = weights.cumsum(dim=-1)
    # A uniform is below 1 by at least 2^-53, so no product rounds up to the whole sum. Sums taken in parallel may rise
    # by a bit where there is no weight.
    places = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return torch.where(weights.gather(1, places) > 0, places, weights.argmax(dim=-1, keepdim=True))


def _followed(proposal: Proposal, tokens: SequenceOf[int], accepted: SequenceOf[bool]) -> DraftVerdict:
    """The path of one sequence through its own `tokens` [1 + len(tokens)] and `accepted` [len(tokens)]."""
    num_in_block = _num_in_block(proposal)
    num_accepted = max((place + 1 for place in range(num_in_block) if accepted[place]), default=0)
    if proposal.parents is None:
        if not num_in_block:
            num_accepted = next((place for place, stays in enumerate(accepted) if not stays), len(accepted))
        return DraftVerdict(num_accepted, tokens[num_accepted])
    branch = list(range(num_accepted))
    num_tested = min(num_accepted + 1, num_in_block)
    while True:
        siblings = [place for place in proposal.children(branch[-1] if branch else -1) if place >= num_in_block]
        if siblings:
            num_tested = len(branch) + 1
        taken = next((place for place in siblings if accepted[place]), None)
        if taken is None:
            return DraftVerdict(len(branch), tokens[branch[-1] + 1 if branch else 0], tuple(branch), num_tested)
        branch.append(taken)
