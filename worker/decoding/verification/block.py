"""Verification of a drafted chain as one block: Sun et al. 2024, "Block Verification Accelerates Speculative Decoding",
Algorithm 2 (arXiv 2403.10444).

Token-wise verification stops at the first rejection. Here the longest prefix wins whose own test passes, so a likely
continuation can save an unlikely token. For every pair of models it accepts at least as many tokens in expectation. It
pays where drafts are drawn; for a one-hot q both rules accept alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.decoding.verification.chain import Verdict, draw, still_left


def verify_block(p: Tensor, q: Tensor, draft: Tensor, uniforms: Tensor) -> Verdict:
    """One sequence whose drafts were drawn from `q`.

    `p` [k + 1, vocabulary]: the target's probabilities (float64). `q` [k, vocabulary] (float64): what the drafts were
    drawn from. `draft` [k]. `uniforms` [k + 1]: independent draws from [0, 1), the last for the token that the target
    adds.

    With w_0 = 1 and w_i = min(1, w_(i-1) p(x_i) / q(x_i)), the prefix of length i < k passes with probability
    S_i / (S_i + 1 - w_i), where S_i is the sum of max(w_i p - q, 0) behind it, and the whole draft with w_k. The next
    token is drawn from norm(max(w p - q, 0)) behind the longest prefix that passes, or from p behind the whole draft.
    """
    k = draft.shape[0]
    kept = _kept(p, q, draft)
    residuals = (kept[:-1, None] * p[:-1] - q).clamp_min(0.0)
    sums = residuals[1:].sum(dim=1)
    # 0 / 0, which no number is below, stands where w_i = 1 and p = q behind it: a longer prefix passes there anyway.
    passing = torch.cat(((sums / (sums + 1 - kept[1:-1])), kept[-1:])) if k else kept[:0]
    lengths = torch.arange(1, k + 1, device=p.device)
    num_accepted = int(((uniforms[:-1] < passing) * lengths).amax()) if k else 0
    rest = p[num_accepted]
    if num_accepted < k:
        rest = still_left(residuals[num_accepted], rest)
    return Verdict(num_accepted, draw(rest, uniforms[-1]))


def _kept(p: Tensor, q: Tensor, draft: Tensor) -> Tensor:
    """w_0 … w_k of the algorithm, [k + 1]."""
    ratios = (p[:-1].gather(1, draft[:, None]) / q.gather(1, draft[:, None])).squeeze(1)
    kept = [torch.ones((), dtype=p.dtype, device=p.device)]
    for ratio in ratios:
        kept.append((kept[-1] * ratio).clamp_max(1.0))
    return torch.stack(kept)
