"""The reproducible coupling: target and drafter choose with the same noise, keyed by position.

The choice at a position is argmax(log p + g), with Gumbel noise g that depends on the job's seed and the position only;
its distribution is p (the Gumbel-max trick). A drafter that chooses by argmax(log q + g) agrees often. Its draft is
accepted where it equals the target's choice, and nothing else of it enters the text, so the text is a function of seed
and target: the same in every mode, k, drafter, tree and batch, as far as p is the same to the bits that decide.
Verification is the greedy one over these choices: `verify_greedy`, `verify_tree_greedy`. This is the rule as it is
proved; `perturbed.py` finds the same token without most of the noise and is held to it.

Both agree with probability sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i), which is at least
(1 - TV) / (1 + TV), TV = total variation of p and q (Daliri, Musco, Suresh 2025, "Coupling without Communication and
Drafter-Invariant Speculative Decoding", arXiv 2408.07978). The maximal coupling accepts 1 - TV.
"""

from __future__ import annotations

import torch
from torch import Tensor


def coupled_tokens(p: Tensor, noise: Tensor) -> Tensor:
    """argmax(log p + noise) of each row: [rows].

    `p` [rows, vocabulary]: probabilities (float64). `noise` [rows, vocabulary]: Gumbel noise of each row's position;
    rows of one position, as in a tree, have the same. A token without probability is never chosen, whatever its noise.
    """
    return (p.log() + noise).masked_fill(p <= 0, -torch.inf).argmax(dim=-1)
