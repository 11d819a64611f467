"""The rules of drawn drafts, for all sequences of a round whose distributions are cut alike.

Whether a drawn draft is accepted once it is tried, and which token is drawn in a row in which none is, follow from the
row and from uniform numbers of their own, not from what was accepted before. So both are computed for every row at
once, of chains and trees of whatever length, and read with one wait for the device. Then the host follows each path.
`engine.verification` says which rule is for what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.distribution import draw_rows
from engine.proposal import DraftDistributions, Proposal
from engine.verdict import DraftVerdict


def verify_drawn(p: Tensor, proposals: SequenceOf[Proposal], uniforms: NDArray[np.float64]) -> list[DraftVerdict]:
    """One verdict a proposal.

    `p` [rows, vocabulary]: the target's probabilities (float64), 1 + len(tokens) rows a proposal, one proposal after
    the other; they are used up. `uniforms` [rows]: independent draws from [0, 1), of each proposal one a draft, and the
    last for the token that the target adds.
    """
    plan = _plan(proposals)
    left = _Left(p, uniforms)
    if plan.blocks:
        left.judge_blocks(plan.blocks)
    left.try_drawn(plan.drawn)
    tokens, accepted = left.read(uniforms[plan.numbers])
    verdicts, begin = [], 0
    for proposal in proposals:
        end = begin + len(proposal.tokens)
        verdicts.append(followed(proposal, tokens[begin : end + 1], accepted[begin:end]))
        begin = end + 1
    return verdicts


@dataclass(slots=True)
class _Siblings:
    """Children of equal rank among their siblings, drawn without replacement: at most one a parent."""

    rows: list[int] = field(default_factory=list)  #: of their parents
    tokens: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  #: of their uniform numbers
    q: list[DraftDistributions] = field(default_factory=list)  #: of the first rank: what the first was drawn from


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which rows and tokens every rule is about."""

    blocks: list[tuple[int, Proposal]] = field(default_factory=list)  #: with their first rows
    drawn: list[_Siblings] = field(default_factory=list)  #: by rank
    #: Of each row the uniform number that its token is drawn with. No path comes by a number twice: a drawn draft is
    #: tried with a number of its own, and its row has that of the row before it; any other's row has its own.
    numbers: list[int] = field(default_factory=list)


def _plan(proposals: SequenceOf[Proposal]) -> _Plan:
    plan, begin = _Plan(), 0
    for proposal in proposals:
        num_in_block, num_drawn = _num_in_block(proposal), 0 if proposal.q is None else len(proposal.q)
        if num_in_block:
            plan.blocks.append((begin, proposal))
        if proposal.parents is not None:
            _plan_siblings(plan, proposal, proposal.parents[:num_drawn], begin, num_in_block)
        plan.numbers.append(begin + len(proposal.tokens))
        for place in range(len(proposal.tokens)):
            parent = place - 1 if proposal.parents is None else proposal.parents[place]
            plan.numbers.append(plan.numbers[begin + parent + 1] if place < num_drawn else begin + place)
        begin += 1 + len(proposal.tokens)
    return plan


def _plan_siblings(plan: _Plan, proposal: Proposal, parents: SequenceOf[int], begin: int, num_in_block: int) -> None:
    ranks = Counter[int]()
    for place in range(num_in_block, len(parents)):
        parent = parents[place]
        rank = ranks[parent]
        plan.drawn.extend(_Siblings() for _ in range(len(plan.drawn), rank + 1))
        siblings = plan.drawn[rank]
        if not rank and proposal.q is not None:
            siblings.q.append(proposal.q[place : place + 1])
        siblings.rows.append(begin + parent + 1)
        siblings.tokens.append(proposal.tokens[place])
        siblings.places.append(begin + place)
        ranks[parent] += 1


def _num_in_block(proposal: Proposal) -> int:
    """How many tokens the proposal begins with that were drawn as a chain."""
    num_drawn = 0 if proposal.q is None else len(proposal.q)
    if proposal.parents is None:
        return num_drawn
    return num_drawn if all(parent == place - 1 for place, parent in enumerate(proposal.parents[:num_drawn])) else 0


class _Left:
    """What is left to be drawn from in every row, as one rule after the other takes drafts out."""

    def __init__(self, p: Tensor, uniforms: NDArray[np.float64]) -> None:
        self._left, self._uniforms = p, uniforms
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

    def read(self, uniforms: NDArray[np.float64]) -> tuple[list[int], list[bool]]:
        """The token that each row adds, drawn at its own of `uniforms`, and whether the draft at each place stays."""
        tokens = draw_rows(self._left, torch.from_numpy(uniforms[:, None]).to(self._left.device)).squeeze(1)
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


def followed(proposal: Proposal, tokens: SequenceOf[int], accepted: SequenceOf[bool] = ()) -> DraftVerdict:
    """The path through a tree or a drawn chain; `tokens` [1 + len(tokens)] are what the target has drawn in each row.

    `accepted` [len(tokens)] says which drawn drafts stay. Any other stays where the target has drawn it too: of equal
    siblings, whose rows draw by themselves, the first.
    """
    num_in_block, num_drawn = _num_in_block(proposal), 0 if proposal.q is None else len(proposal.q)
    num_accepted = max((place + 1 for place in range(num_in_block) if accepted[place]), default=0)
    if proposal.parents is None:
        return DraftVerdict(num_accepted, tokens[num_accepted])
    branch = list(range(num_accepted))
    num_tested = min(num_accepted + 1, num_in_block)
    while True:
        row = branch[-1] + 1 if branch else 0
        siblings = [place for place in proposal.children(row - 1) if place >= num_in_block]
        if siblings:
            num_tested = len(branch) + 1
        stays = (
            place
            for place in siblings
            if (accepted[place] if place < num_drawn else proposal.tokens[place] == tokens[row])
        )
        if (taken := next(stays, None)) is None:
            return DraftVerdict(len(branch), tokens[row], tuple(branch), num_tested)
        branch.append(taken)
