"""Which tokens of a drafted chain stay. Pure tensors, no model. Trees and blocks stand beside this file.

Greedy: a draft stays while it equals the target's argmax. Sampled, by a deterministic drafter, whose q is one-hot
(Leviathan et al. 2023): x is accepted with probability p(x), else the next token is drawn from p without x,
renormalised; after the last accepted draft it is drawn from p. Either way the tokens have exactly the target's
distribution, whatever the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine import SecondChoice


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round yields for one sequence: `num_accepted` of its drafts, then `next_token` of the target."""

    num_accepted: int
    next_token: int
    #: Of a tree: which tokens of the proposal were accepted, root first. None for a chain: the first `num_accepted`.
    branch: tuple[int, ...] | None = None
    #: Of a tree: depths at which a token was tried. None for a chain: all it accepted and the one that was rejected.
    num_tested: int | None = None
    #: Of a watched sequence: by token that the round yields.
    second_choices: tuple[SecondChoice, ...] = ()

    @property
    def path(self) -> tuple[int, ...]:
        """Indices of the accepted tokens in the proposal, root first."""
        return tuple(range(self.num_accepted)) if self.branch is None else self.branch


def verify_greedy(best: Sequence[int], draft: Sequence[int]) -> Verdict:
    """One sequence. `best` [k + 1]: the target's choice behind the pending token and behind each draft; `draft` [k]."""
    hits = zip(best, draft, strict=False)
    num_accepted = next((place for place, (one, other) in enumerate(hits) if one != other), len(draft))
    return Verdict(num_accepted, best[num_accepted])


def verify_deterministic(p: Tensor, draft: Tensor, uniforms: Tensor) -> Verdict:
    """One sequence whose drafter is deterministic.

    `p` [k + 1, vocabulary]: the target's probabilities (float64). `draft` [k]. `uniforms` [k + 1]: independent draws
    from [0, 1), the last for the token that the target adds.
    """
    p_draft = p[:-1].gather(1, draft[:, None]).squeeze(1)
    num_accepted = _num_leading(uniforms[:-1] < p_draft)
    rest = p[num_accepted]
    if num_accepted < draft.shape[0]:
        rest = still_left(rest.index_fill(0, draft[num_accepted], 0.0), rest)
    return Verdict(num_accepted, draw(rest, uniforms[-1]))


def draw(weights: Tensor, uniform: Tensor) -> int:
    """Index drawn in proportion to `weights` [vocabulary], by inverting their cumulative sum at `uniform`."""
    return int(draw_rows(weights[None], uniform.reshape(1)))


def draw_rows(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The same for each row of `weights` [rows, vocabulary] at its own of `uniforms` [rows]: [rows]."""
    cumulative = weights.cumsum(dim=-1)
    # A uniform is below 1 by at least 2^-53, so no product rounds up to the whole sum. Sums taken in parallel may rise
    # by a bit where there is no weight.
    places = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    return torch.where(weights.gather(1, places) > 0, places, weights.argmax(dim=-1, keepdim=True)).squeeze(1)


def still_left(residual: Tensor, before: Tensor) -> Tensor:
    """What is left to draw from after a rejection: `residual`, or `before` where rounding alone caused the rejection.

    Where p and q differ by rounding only, a draft is still rejected once in 10^16 times, and nothing remains.
    """
    return torch.where((residual > 0).any(), residual, before)


def _num_leading(flags: Tensor) -> int:
    return int(flags.long().cumprod(0).sum())
