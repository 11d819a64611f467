"""From scores to the distribution that is sampled: temperature, then top_k, top_p and min_p, in that order.

The order is that of transformers (`_get_logits_processor`). vLLM takes min_p before top_k and top_p; which tokens
min_p itself removes is the same there, as its bound is a share of the likeliest token's probability.
A whole vocabulary is never sorted where a few of its tokens can stay: those are found by a bound that every token that
stays must reach, first among blocks of the vocabulary, then inside the blocks that reach it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from worker.engine import Sampling

# Tokens a block: large enough that the blocks' maxima are few, small enough that a block read in vain costs little.
BLOCK: Final = 64


class Candidates(NamedTuple):
    """The tokens of each row that can be sampled, likeliest first, ties in order of token id.

    `p` [rows, n] in float64, padded with 0; `tokens` [rows, n]. n is the longest row's.
    """

    p: Tensor
    tokens: Tensor


def probabilities(scores: Tensor, sampling: Sampling) -> Tensor:
    """Distribution of each row of `scores` [rows, vocabulary], in float64: [rows, vocabulary].

    top_k keeps ties with the k-th likeliest token. top_p keeps the smallest set of likeliest tokens whose probability
    reaches it, the token that crosses it included; of equally likely ones the lower id is taken first. min_p keeps
    tokens with at least that share of the likeliest one's probability. The temperature must be above 0: at 0 decoding
    is greedy. Raises RuntimeError where a row has no finite maximum.
    """
    if not sampling.is_cut:
        return (scores.double() / sampling.temperature).softmax(dim=-1)
    p, tokens = candidates(scores, sampling)
    # The padding adds 0 to token 0.
    return torch.zeros(scores.shape, dtype=torch.float64, device=scores.device).scatter_add_(-1, tokens, p)


def candidates(scores: Tensor, sampling: Sampling) -> Candidates:
    """The same distribution as the few tokens that share it; `sampling` must be cut."""
    vocabulary = scores.shape[-1]
    top_k = sampling.top_k if 0 < sampling.top_k < vocabulary else 0
    if top_k:
        values, tokens = _largest(scores, top_k)
        scaled = values / sampling.temperature
        p = scaled.masked_fill(values < values[:, top_k - 1 : top_k], -torch.inf).softmax(dim=-1)
    else:
        whole = (scores.double() / sampling.temperature).softmax(dim=-1)
        peaks = _peaks(whole)
        bound = sampling.min_p * _maximum(peaks)
        if sampling.top_p < 1:
            # All tokens below the bound together have less than 1 - top_p. Half of it, as sums are rounded.
            bound = bound.clamp_min((1 - sampling.top_p) / (2 * vocabulary))
        p, tokens = _at_least(whole, peaks, bound)
        p = p.clamp_min(0.0)
    if sampling.top_p < 1:
        p = p.masked_fill(p.cumsum(dim=-1) - p >= sampling.top_p, 0.0)
    if sampling.min_p > 0:
        p = p.masked_fill(p < sampling.min_p * p[:, :1], 0.0)
    return Candidates(p / p.sum(dim=-1, keepdim=True), tokens)


def _largest(scores: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """At least the `num` largest of each row and their ties, in descending order."""
    peaks = _peaks(scores)
    _maximum(peaks)
    # Each of the `num` highest blocks has a token that reaches the lowest of their maxima.
    among = peaks if num <= peaks.shape[-1] else scores
    return _at_least(scores, peaks, among.topk(num, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True))


def _at_least(values: Tensor, peaks: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Values [rows, n] in float64 that reach their row's bound, descending, padded with -inf; and their tokens."""
    rows, blocks = (peaks >= bound).nonzero(as_tuple=True)
    inside = _in_blocks(values)[rows, blocks]
    place, lane = (inside >= bound[rows]).nonzero(as_tuple=True)
    row, token = rows[place], blocks[place] * BLOCK + lane
    num = torch.bincount(row, minlength=len(values))
    column = torch.arange(len(row), device=row.device) - (num.cumsum(0) - num)[row]
    shape = (len(values), int(num.max()))
    packed = torch.full(shape, -torch.inf, dtype=torch.float64, device=values.device)
    packed[row, column] = inside[place, lane].double()
    tokens = torch.zeros(shape, dtype=torch.long, device=values.device)
    tokens[row, column] = token
    packed, order = packed.sort(dim=-1, descending=True, stable=True)
    return packed, tokens.gather(-1, order)


def _in_blocks(values: Tensor) -> Tensor:
    surplus = -values.shape[-1] % BLOCK
    padded = functional.pad(values, (0, surplus), value=-torch.inf) if surplus else values
    return padded.reshape(*padded.shape[:-1], -1, BLOCK)


def _peaks(values: Tensor) -> Tensor:
    return _in_blocks(values).amax(dim=-1)


def _maximum(peaks: Tensor) -> Tensor:
    best = peaks.amax(dim=-1, keepdim=True)
    if not bool(best.isfinite().all()):
        raise RuntimeError("the target returned logits that are not finite")
    return best
