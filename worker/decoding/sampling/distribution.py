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

from alphaloop.errors import DecodeFailed
from worker.engine import Sampling

# Tokens a block: large enough that the blocks' maxima are few, small enough that a block read in vain costs little.
BLOCK: Final = 64
# Tokens with less than this share of the likeliest one's probability are looked at only if top_p needs them.
_HOPE: Final = 2.0**-10


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
        whole = torch.stack([_softmax(row, sampling) for row in scores])
        refuse_infinite(whole[:, 0])
        return whole
    p, tokens = candidates(scores, sampling)
    # The padding adds 0 to token 0.
    return torch.zeros(scores.shape, dtype=torch.float64, device=scores.device).scatter_add_(-1, tokens, p)


def candidates(scores: Tensor, sampling: Sampling) -> Candidates:
    """The same distribution as the few tokens that share it; `sampling` must be cut."""
    # Maxima of 16-bit numbers take longer than turning them into float32.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    peaks = in_blocks(scores).amax(dim=-1)
    best = peaks.amax(dim=-1, keepdim=True).double()
    refuse_infinite(best)
    if 0 < sampling.top_k < scores.shape[-1]:
        # Each of the top_k highest blocks has a token that reaches the lowest of their maxima.
        among = peaks if sampling.top_k <= peaks.shape[-1] else scores
        kth = among.topk(sampling.top_k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
        values, tokens = _at_least(scores, peaks, kth)
        if values.shape[-1] > sampling.top_k:
            values = values.masked_fill(values < values[:, sampling.top_k - 1 : sampling.top_k], -torch.inf)
        p = _normalised(_weights(values, best, sampling))
    elif sampling.top_p < 1:
        p, tokens = _reaching(scores, peaks, best, sampling)
    else:
        values, tokens = _at_least(scores, peaks, _bound(best, sampling.min_p, sampling))
        p = _weights(values, best, sampling)
    if sampling.top_p < 1:
        p = p.masked_fill(p.cumsum(dim=-1) - p >= sampling.top_p, 0.0)
    if sampling.min_p > 0:
        p = p.masked_fill(p < sampling.min_p * p[:, :1], 0.0)
    return Candidates(_normalised(p), tokens)


def _reaching(scores: Tensor, peaks: Tensor, best: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities [rows, n] of all tokens that top_p and min_p can keep, descending, and the tokens."""
    p_best = torch.stack([_softmax(row, sampling).amax(dim=-1, keepdim=True) for row in scores])

    def kept(share: Tensor) -> tuple[Tensor, Tensor]:
        values, tokens = _at_least(scores, peaks, _bound(best, share, sampling))
        return _weights(values, best, sampling).mul_(p_best), tokens

    # Tokens that reach a bound are all that top_p keeps if together they reach top_p. The first bound nearly always is
    # low enough; 1e-9 covers the error of rounded sums.
    hope = torch.full_like(best, max(_HOPE, sampling.min_p))
    p, tokens = kept(hope)
    is_enough = p.sum(dim=-1, keepdim=True) > sampling.top_p + 1e-9
    if sampling.min_p >= _HOPE or bool(is_enough.all()):
        return p, tokens
    # All tokens below this probability together have at most half of 1 - top_p.
    certain = (1 - sampling.top_p) / (2 * scores.shape[-1])
    return kept(torch.where(is_enough, hope, (certain / p_best).clamp(min=sampling.min_p, max=1.0)))


def _weights(values: Tensor, best: Tensor, sampling: Sampling) -> Tensor:
    return ((values - best) / sampling.temperature).exp_()


def _normalised(weights: Tensor) -> Tensor:
    # A running sum, because its bits do not depend on the row's padding, and so not on the other rows.
    return weights / weights.cumsum(dim=-1)[:, -1:]


def _bound(best: Tensor, share: Tensor | float, sampling: Sampling) -> Tensor:
    """The score of a token with this share of the likeliest one's probability, less the error of its rounding."""
    distance = sampling.temperature * torch.as_tensor(share, dtype=torch.float64, device=best.device).log()
    return best + distance - 1e-9 * (1 + best.abs() - distance)


def _softmax(scores: Tensor, sampling: Sampling) -> Tensor:
    # Row by row: a row's float64 numbers fit into a core's cache, those of all rows need fresh memory.
    # Less the best score first, because a score over a temperature near 0 has no float64.
    row = scores.to(torch.float64, copy=True)
    return row.sub_(row.amax(dim=-1, keepdim=True)).div_(sampling.temperature).softmax(dim=-1)


def refuse_infinite(best: Tensor) -> None:
    """Raise DecodeFailed unless all are finite: what is drawn from other numbers means nothing."""
    if not bool(best.isfinite().all()):
        raise DecodeFailed("the target returned logits that are not finite")


def in_blocks(values: Tensor) -> Tensor:
    """[..., blocks, BLOCK] of values [..., vocabulary], the last block padded with -inf."""
    surplus = -values.shape[-1] % BLOCK
    padded = functional.pad(values, (0, surplus), value=-torch.inf) if surplus else values
    return padded.reshape(*padded.shape[:-1], -1, BLOCK)


def _at_least(values: Tensor, peaks: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Finite values [rows, n] in float64 that reach their row's bound, descending, padded with -inf; their tokens."""
    bound = bound.clamp_min(torch.finfo(values.dtype).min)
    rows, blocks = (peaks >= bound).nonzero(as_tuple=True)
    inside = in_blocks(values)[rows, blocks]
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
