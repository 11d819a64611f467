"""Which path of a drafted tree stays. Pure tensors, no model; a chain is a tree without branches.

A tree is `tokens` and `parents`: token i hangs on token parents[i] < i, or on the pending token where that is -1. Rows
of target tensors: row 0 is behind the pending token, row i + 1 behind token i. At every accepted node its children are
tried in order until one is accepted; where none is, the target's own token ends the round.

One rule covers the sampled trees. r is what is left to be drawn at a node, p at first. A child x that was drawn from
q is accepted with probability min(1, r(x) / q(x)); otherwise r becomes norm(max(r - q, 0)) and the next child is tried;
behind the last rejected child the target's token is drawn from r. Each step is the one of Leviathan et al. 2023 with r
for p. What q is tells the rules apart:

* children drawn independently, from one drafter or from several: multi-step speculative sampling (SpecInfer, Miao et
  al. 2024, arXiv 2305.09781);
* children drawn without replacement: q is the drafter's distribution without the siblings before it (Sequoia, Chen et
  al. 2024, arXiv 2402.12374; RSD, Jeon et al. 2024, arXiv 2402.14160);
* deterministic children (top-k of a draft, look-up): q is one-hot, so x is accepted with probability r(x), and taken
  out of r when it is rejected (EAGLE, Li et al. 2024, arXiv 2401.15077).

What makes it exact beside the formula: whether a child is offered, and its place among its siblings, may depend on what
was drawn before it, never on which token it is. Equal siblings that were drawn independently stay two children; a tree
of drawn tokens is never sorted, merged or pruned by them. A deterministic tree may be built in any way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.decoding.verification.chain import Verdict, draw, still_left


def tree_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each token, 1 for a child of the pending token; the greatest is the length of the proposal."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def verify_tree_greedy(best: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Verdict:
    """The deepest path on which every token is the target's choice.

    `best` [n + 1]: the target's choice, greedy or coupled, behind the pending token and behind each of the n tokens.
    """
    depths = tree_depths(parents)
    hits = {-1}
    end, num_tested = -1, 0
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent not in hits:
            continue
        num_tested = max(num_tested, depths[i])
        if token == best[parent + 1]:
            hits.add(i)
            # Equal siblings are both hits; only the deeper one may carry on.
            if end < 0 or depths[i] > depths[end]:
                end = i
    branch = _branch(end, parents)
    return Verdict(len(branch), best[end + 1], branch, num_tested)


def verify_tree(
    p: Tensor,
    q: Tensor | None,
    tokens: Sequence[int],
    parents: Sequence[int],
    uniforms: Tensor,
    *,
    with_replacement: bool,
) -> Verdict:
    """One sequence whose tree was drawn from `q`, or is deterministic (None).

    `p` [n + 1, vocabulary]: the target's probabilities (float64). `q` [n, vocabulary] (float64): row i is what token i
    was drawn from, so q[i, tokens[i]] > 0. `uniforms` [n + 1]: independent draws from [0, 1), the last for the token
    that the target adds. `with_replacement` False: siblings are different tokens, and those before a token are taken
    out of its row, in case the drafter left them in. One wait for the device at each depth, and one at the end.
    """
    children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
    for i, parent in enumerate(parents):
        children[parent + 1].append(i)
    branch: list[int] = []
    num_tested = 0
    rest = p[0]
    while siblings := children[branch[-1] + 1 if branch else 0]:
        num_tested += 1
        # Everything of a depth is decided before the first answer is read: residuals do not depend on uniforms.
        accepted = []
        for place, i in enumerate(siblings):
            before = [] if with_replacement else [tokens[sibling] for sibling in siblings[:place]]
            drawn = _one_hot(rest, tokens[i]) if q is None else _without(q[i], before)
            mass = rest.sum()
            accepted.append(uniforms[i] * drawn[tokens[i]] * mass < rest[tokens[i]])
            rest = still_left((rest - mass * drawn).clamp_min(0.0), rest)
        answers: list[bool] = torch.stack(accepted).tolist()
        if not any(answers):
            break
        branch.append(siblings[answers.index(True)])
        rest = p[branch[-1] + 1]
    return Verdict(len(branch), draw(rest, uniforms[-1]), tuple(branch), num_tested)


def _branch(end: int, parents: Sequence[int]) -> tuple[int, ...]:
    branch: list[int] = []
    while end >= 0:
        branch.append(end)
        end = parents[end]
    return tuple(reversed(branch))


def _one_hot(like: Tensor, token: int) -> Tensor:
    drawn = torch.zeros_like(like)
    drawn[token] = 1.0
    return drawn


def _without(q: Tensor, tokens: Sequence[int]) -> Tensor:
    if not tokens:
        return q
    left = q.clone()
    left[list(tokens)] = 0.0
    return left / left.sum()
