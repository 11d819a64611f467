"""From scores to a job's distribution, temperature and cuts applied; and tokens drawn from it.

Of a distribution that is cut a few tokens have a share. The device bounds what they must reach, first among blocks of
the vocabulary, and hands over the blocks that have such tokens; everything else is done on the host, for all rows at
once. So a round reads twice from the device, whatever its number of sequences, and sorts no vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from alphaloop.engine import Sampling
from alphaloop.errors import DecodeFailed

#: Tokens a block, a power of two: large enough that the blocks' maxima are few, small enough that a block read in vain
#: costs little.
BLOCK: Final = 64
LANES: Final = np.arange(BLOCK)  #: places in a block
# Tokens with less than this share of the likeliest one's probability are looked at only if top_p needs them.
_HOPE: Final = 2.0**-10


def probabilities(scores: Tensor, sampling: Sampling) -> Tensor:
    """Distribution of each row of `scores` [rows, vocabulary], in float64: [rows, vocabulary].

    Temperature, then top_k, top_p and min_p: the order of transformers (`_get_logits_processor`). vLLM takes min_p
    before top_k and top_p; which tokens min_p itself removes is the same there, as its bound is a share of the
    likeliest token's probability.

    top_k keeps ties with the k-th likeliest token. top_p keeps the smallest set of likeliest tokens whose probability
    reaches it, the token that crosses it included; of equally likely ones the lower id is taken first. min_p keeps
    tokens with at least that share of the likeliest one's probability. The temperature must be above 0: at 0 decoding
    is greedy. Raises DecodeFailed where a row has no finite maximum.
    """
    if not sampling.is_cut:
        whole = _softmax(scores, sampling)
        if not bool(whole[:, 0].isfinite().all()):
            raise not_finite()
        return whole
    weights, tokens = candidates(scores, sampling).on(scores.device)
    # The padding adds 0 to token 0.
    whole = torch.zeros(scores.shape, dtype=torch.float64, device=scores.device)
    return whole.scatter_add_(-1, tokens, weights)


def draw_rows(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Columns drawn in proportion to `weights` [rows, columns], one a row, by inverting its cumulative sum: [rows, 1].

    `uniforms` [rows, 1]: below 1.
    """
    cumulative = weights.cumsum(dim=-1)
    # A uniform is below 1 by at least 2^-53, so no product rounds up to the whole sum. Sums taken in parallel may rise
    # by a bit where there is no weight.
    places = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return torch.where(weights.gather(1, places) > 0, places, weights.argmax(dim=-1, keepdim=True))


def not_finite() -> DecodeFailed:
    """The error of scores whose highest is not finite: what is drawn from such means nothing."""
    return DecodeFailed("the target returned logits that are not finite")


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The tokens that share each row's distribution, on the host. A narrower row is padded with weights of 0."""

    weights: NDArray[np.float64]  #: [rows, columns], not normalised
    tokens: NDArray[np.int64]  #: [rows, columns], ascending but for the padding, which is token 0

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Probabilities and tokens, both [rows, columns]."""
        # A running sum, because its bits do not depend on the row's padding, and so not on the other rows.
        p = self.weights / self.weights.cumsum(axis=1)[:, -1:]
        return torch.from_numpy(p).to(device), torch.from_numpy(self.tokens).to(device)

    def drawn(self, uniforms: NDArray[np.float64]) -> list[int]:
        """A token a row, as `draw_rows` draws. `uniforms` [rows]: below 1."""
        cumulative = self.weights.cumsum(axis=1)
        columns = (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(axis=1)
        tokens: list[int] = self.tokens[np.arange(len(columns)), columns].tolist()
        return tokens


def candidates(scores: Tensor, sampling: Sampling) -> Candidates:
    """What shares the distribution of each row of `scores` [rows, vocabulary]; `sampling` must be cut.

    Two waits for the device. Raises DecodeFailed where a row has no finite maximum.
    """
    is_top_k = 0 < sampling.top_k < scores.shape[-1]
    if not is_top_k and sampling.top_p < 1:
        values, tokens = _at_least(*_reaching(scores, sampling), padding=0.0)
        return Candidates(_cut(values, sampling), tokens)
    blocks = in_blocks(scores if scores.dtype in _COMPARABLE else scores.float())
    peaks = blocks.amax(dim=-1)
    best = peaks.amax(dim=-1, keepdim=True)
    bound = _kth(blocks, peaks, sampling.top_k) if is_top_k else _least(best.double(), sampling)
    # The sum is no number where the maximum is not finite, and nothing reaches it.
    bound = bound.clamp_min(torch.finfo(blocks.dtype).min).add_(best, alpha=0)
    values, tokens = _at_least(blocks, peaks, bound, padding=-math.inf)
    if is_top_k and values.shape[1] > sampling.top_k:
        place = values.shape[1] - sampling.top_k
        values[values < np.partition(values, place, axis=1)[:, place : place + 1]] = -math.inf
    with np.errstate(over="ignore"):  # a temperature near 0
        weights = np.exp((values - values.max(axis=1, keepdims=True)) / sampling.temperature)
    if sampling.top_p < 1:
        weights /= weights.cumsum(axis=1)[:, -1:]
    return Candidates(_cut(weights, sampling), tokens)


#: Maxima of 16-bit numbers take longer than turning them into float32.
_COMPARABLE: Final = (torch.float32, torch.float64)


def _kth(blocks: Tensor, peaks: Tensor, top_k: int) -> Tensor:
    """What each row's top_k likeliest tokens reach: [rows, 1]."""
    # Each of the top_k highest blocks has a token that reaches the lowest of their maxima.
    among = peaks if top_k <= peaks.shape[-1] else blocks.flatten(1)
    return among.topk(top_k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)


def _least(best: Tensor, sampling: Sampling) -> Tensor:
    """What tokens reach that min_p can keep, less the error of its rounding: [rows, 1]. `best` [rows, 1]: float64."""
    # Without min_p top_k asks for more than the vocabulary: no token is cut.
    distance = sampling.temperature * math.log(sampling.min_p) if sampling.min_p else -math.inf
    return (best + (distance - 1e-9)).sub_(best.abs(), alpha=1e-9)


def _reaching(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities in blocks, the blocks' maxima, and what tokens reach that top_p and min_p can keep: [rows, 1]."""
    p = _softmax(scores, sampling)
    blocks = in_blocks(p, 0.0)
    peaks = blocks.amax(dim=-1)
    best = peaks.amax(dim=-1, keepdim=True)
    # 1e-9 covers the error of rounded sums.
    bound = (max(_HOPE, sampling.min_p) * (1 - 1e-9)) * best
    if sampling.min_p < _HOPE:
        # Tokens with that share are all that top_p keeps if together they reach top_p, as they nearly always do. Else:
        # all tokens below this probability have at most half of 1 - top_p.
        certain = (1 - sampling.top_p) / (2 * scores.shape[-1])
        is_enough = p.mul(p >= bound).sum(dim=-1, keepdim=True) > sampling.top_p + 1e-9
        least: Tensor | float = (sampling.min_p * (1 - 1e-9) * best).clamp_min_(certain) if sampling.min_p else certain
        bound = torch.where(is_enough, bound, least)
    return blocks, peaks, bound


def _softmax(scores: Tensor, sampling: Sampling) -> Tensor:
    # Less the best score first, because a score over a temperature near 0 has no float64.
    best = scores.amax(dim=-1, keepdim=True).double()
    return scores.sub(best).div_(sampling.temperature).softmax(dim=-1)


def in_blocks(values: Tensor, padding: float = -math.inf) -> Tensor:
    """[rows, blocks, BLOCK] of values [rows, vocabulary], the last block padded."""
    surplus = -values.shape[-1] % BLOCK
    padded = functional.pad(values, (0, surplus), value=padding) if surplus else values
    return padded.reshape(len(values), -1, BLOCK)


def _at_least(
    blocks: Tensor, peaks: Tensor, bound: Tensor, *, padding: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The values of each row of `blocks` [rows, blocks, BLOCK] that reach its `bound` [rows, 1], in order of token id.

    And their token ids; both [rows, columns], a narrower row padded, with token 0. `peaks` [rows, blocks]: the blocks'
    maxima. Two waits for the device. Raises DecodeFailed where nothing reaches the bound.
    """
    pairs = (peaks >= bound).nonzero()
    row, block = pairs.unbind(1)
    # Read together, because each read waits for a GPU: a float32 holds the number of a row or a block exactly.
    read = torch.cat((blocks[row, block], bound[row], pairs), dim=1).cpu().numpy()
    inside = read[:, :BLOCK]
    is_reached = inside >= read[:, BLOCK : BLOCK + 1]
    rows, first = read[:, BLOCK + 1].astype(np.int64), read[:, BLOCK + 2].astype(np.int64) * BLOCK
    nums = np.bincount(rows, weights=is_reached.sum(axis=1), minlength=len(blocks))
    if not nums.all():
        raise not_finite()
    is_filled = np.arange(nums.max()) < nums[:, None]
    values = np.full(is_filled.shape, padding)
    values[is_filled] = inside[is_reached]
    tokens = np.zeros(is_filled.shape, dtype=np.int64)
    tokens[is_filled] = (first[:, None] + LANES)[is_reached]
    return values, tokens


def _cut(weights: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """`weights` [rows, columns] with 0 for what top_p and min_p leave out; for top_p a whole row's add up to 1."""
    if sampling.top_p < 1:
        ascending = np.sort(weights, axis=1)
        cumulative = ascending.cumsum(axis=1)
        # Those before which likelier ones have less than top_p.
        num_left_out = (cumulative[:, -1:] - cumulative >= sampling.top_p).sum(axis=1)
        least = ascending[np.arange(len(weights)), num_left_out][:, None]
        surplus = (weights >= least).sum(axis=1) - (weights.shape[1] - num_left_out)
        if surplus.any():
            equal = weights == least
            places = equal.cumsum(axis=1)
            weights[equal & (places > places[:, -1:] - surplus[:, None])] = 0.0
        weights[weights < least] = 0.0
    if sampling.min_p > 0:
        weights[weights < sampling.min_p * weights.max(axis=1, keepdims=True)] = 0.0
    return weights
