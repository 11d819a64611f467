"""The reproducible coupling: argmax(log p + noise), with noise drawn so that most of it need never be looked at.

The noise of a position is Gumbel noise that depends on the job's seed and the position only, so the choice's
distribution is p (the Gumbel-max trick). A drafter that chooses by argmax(log q + noise) agrees often. Its draft is
accepted where it equals the target's choice, and nothing else of it enters the text. So the text is a function of seed
and target: the same in every mode, k, drafter, tree and batch, as far as p is the same to the bits that decide.

Target and drafter agree with probability sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i), which is at least
(1 - TV) / (1 + TV), TV = total variation of p and q (Daliri, Musco, Suresh 2025, "Coupling without Communication and
Drafter-Invariant Speculative Decoding", arXiv 2408.07978). The maximal coupling accepts 1 - TV.

The noise of a vocabulary is one independent Gumbel draw a token, drawn from the top down (Maddison, Tarlow, Minka 2014,
"A* Sampling"): for each block of tokens first the largest of its draws, Gumbel(log size), then which of its tokens has
it, then the other draws, which are Gumbel draws of at most that. A block's highest score and largest draw together
bound all of its sums, so few blocks remain in question. The draws are the same everywhere; their logarithms may differ
in the last bit between processors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.decoding.sampling.distribution import BLOCK, candidates, in_blocks, refuse_infinite
from worker.decoding.sampling.randomness import gumbel, uniforms
from worker.engine import Sampling


def token_noise(key: int | Tensor, block: Tensor, lane: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise in float64 of token `block * BLOCK + lane`; `key` [rows, 1 …], block and lane are broadcast."""
    size = _sizes(block, vocabulary)
    largest = _largest_noise(key, block, size)
    owner = (uniforms(key, -2 - 2 * block) * size).long()
    others = ((-largest).exp_() - uniforms(key, block * BLOCK + lane).log_()).log_().neg_()
    return torch.where(lane == owner, largest, others)


def vocabulary_noise(key: int, vocabulary: int, device: torch.device) -> Tensor:
    """The noise of every token [vocabulary]."""
    block = torch.arange(-(-vocabulary // BLOCK), device=device)[:, None]
    return token_noise(key, block, torch.arange(BLOCK, device=device), vocabulary).flatten()[:vocabulary]


def perturbed_tokens(scores: Tensor, sampling: Sampling, keys: Sequence[int]) -> Tensor:
    """argmax(log p + noise) of each row of `scores` [rows, vocabulary]: [rows]. keys[i] is the key of row i's noise."""
    vocabulary = scores.shape[-1]
    key = torch.tensor(keys, dtype=torch.long, device=scores.device)[:, None]
    if sampling.is_cut:
        p, tokens = candidates(scores, sampling)
        block = tokens.div(BLOCK, rounding_mode="floor")
        best = (p.log() + token_noise(key, block, tokens - block * BLOCK, vocabulary)).argmax(dim=-1, keepdim=True)
        return tokens.gather(-1, best).squeeze(-1)
    # log p is (score - best score) / temperature up to a constant of the row; without the best score, a score over a
    # temperature near 0 would have no float64.
    inside = in_blocks(scores)
    block = torch.arange(inside.shape[-2], device=scores.device)
    peaks = inside.amax(dim=-1).double()
    top = peaks.amax(dim=-1)
    bounds = (peaks - top[:, None]) / sampling.temperature + _largest_noise(key, block, _sizes(block, vocabulary))
    lanes = torch.arange(BLOCK, device=scores.device)

    def sums(row: Tensor, block: Tensor) -> Tensor:
        noise = token_noise(key[row], block[:, None], lanes, vocabulary)
        return (inside[row, block].double() - top[row, None]) / sampling.temperature + noise

    reached = sums(torch.arange(len(scores), device=scores.device), bounds.argmax(dim=-1)).amax(dim=-1, keepdim=True)
    refuse_infinite(reached)
    row, block = (bounds >= reached).nonzero(as_tuple=True)
    best, lane = sums(row, block).max(dim=-1)
    highest = reached.squeeze(-1).scatter_reduce(0, row, best, "amax")
    winners = best == highest[row]
    tokens = torch.empty(len(scores), dtype=torch.long, device=scores.device)
    tokens[row[winners]] = (block * BLOCK + lane)[winners]
    return tokens


def _sizes(block: Tensor, vocabulary: int) -> Tensor:
    return (vocabulary - block * BLOCK).clamp_(max=BLOCK)


def _largest_noise(key: int | Tensor, block: Tensor, size: Tensor) -> Tensor:
    return gumbel(key, -1 - 2 * block) + size.log()
