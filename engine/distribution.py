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
_HOPE: Final = 2.0**-12
# What a score or a sum may lose by rounding.
_ROUNDING: Final = 1e-9


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

    Two waits for the device, four where top_p needs tokens of less than `_HOPE`. Raises DecodeFailed where a row has no
    finite maximum.
    """
    blocks = in_blocks(scores)
    comparable = blocks if blocks.dtype in _COMPARABLE else blocks.float()
    peaks = comparable.amax(dim=-1)
    best = peaks.amax(dim=-1, keepdim=True).double()
    is_top_k = 0 < sampling.top_k < scores.shape[-1]
    is_top_p = sampling.top_p < 1 and not is_top_k
    if is_top_k:
        bound = _kth(comparable, peaks, sampling.top_k).double()
    else:
        share = max(sampling.min_p, _HOPE) if is_top_p else sampling.min_p
        # Without min_p top_k asks for more than the vocabulary: no token is cut.
        bound = best + (sampling.temperature * math.log(share) - _ROUNDING if share else -math.inf)
    masses = None
    if is_top_p:
        masses = _masses(comparable.clone() if comparable is blocks else comparable, best, sampling)
    reached = _reaching(blocks, peaks, best, bound, masses, sampling)
    if is_top_p and (is_short := reached.sums < sampling.top_p * (1 + _ROUNDING) * reached.wholes).any():
        # All tokens with less of the probability than this have at most half of 1 - top_p.
        shares = np.maximum((1 - sampling.top_p) / (2 * scores.shape[-1]) * reached.wholes, sampling.min_p)
        lower = reached.best + sampling.temperature * np.log(shares) - _ROUNDING
        bound = torch.where(torch.from_numpy(is_short).to(best.device), torch.from_numpy(lower).to(best.device), bound)
        reached = _reaching(blocks, peaks, best, bound, masses, sampling)
    return Candidates(_cut(reached, sampling), reached.tokens)


#: Maxima of 16-bit numbers take longer than turning them into float32.
_COMPARABLE: Final = (torch.float32, torch.float64)


def _kth(blocks: Tensor, peaks: Tensor, top_k: int) -> Tensor:
    """What each row's top_k likeliest tokens reach: [rows, 1]."""
    # Each of the top_k highest blocks has a token that reaches the lowest of their maxima.
    among = peaks if top_k <= peaks.shape[-1] else blocks.flatten(1)
    return among.topk(top_k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)


def _masses(blocks: Tensor, best: Tensor, sampling: Sampling) -> Tensor:
    """The sum of each block's probabilities over the likeliest token's: [rows, blocks]. `blocks` are used up.

    In float32: it counts for what does not reach the bound, of which top_p leaves out a part at most.
    """
    # float32 has no lower temperature, and there all but the best have none. On a CPU torch takes 2 ** x in a fifth of
    # the time of e ** x.
    below = blocks.float().sub_(best[:, :, None].float()).div_(max(sampling.temperature, 1e-30) * math.log(2))
    return below.exp2_().sum(dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class _Reached:
    """The tokens that reach a row's bound, on the host, with weights over the likeliest token's."""

    weights: NDArray[np.float64]  #: [rows, columns], a narrower row padded with 0
    tokens: NDArray[np.int64]  #: [rows, columns], ascending but for the padding, which is token 0
    sums: NDArray[np.float64]  #: of the weights, [rows, 1]
    wholes: NDArray[np.float64]  #: with what does not reach the bound, where `masses` are known, [rows, 1]
    best: NDArray[np.float64]  #: the highest score, [rows, 1]


def _reaching(
    blocks: Tensor, peaks: Tensor, best: Tensor, bound: Tensor, masses: Tensor | None, sampling: Sampling
) -> _Reached:
    """What reaches the `bound` [rows, 1] in `blocks` [rows, blocks, BLOCK], whose maxima are `peaks` [rows, blocks].

    `best` [rows, 1]: the highest of each row. `masses` [rows, blocks]: as `_masses`. Two waits for the device. Raises
    DecodeFailed where nothing reaches the bound.
    """
    # The sum is no number where the maximum is not finite, and nothing reaches it.
    bound = bound.clamp_min(torch.finfo(blocks.dtype).min).add(best, alpha=0)
    is_reached = peaks >= bound
    pairs = is_reached.nonzero()
    row, block = pairs.unbind(1)
    of_row = torch.cat((bound, best), dim=1)
    if masses is not None:
        of_row = torch.cat((of_row, masses.masked_fill(is_reached, 0.0).sum(dim=1, keepdim=True)), dim=1)
    # Read together, because each read waits for a GPU: a float64 holds the number of a row or a block exactly.
    read = torch.cat((blocks[row, block], pairs, of_row[row]), dim=1).cpu().numpy()
    rows, first = (read[:, BLOCK + column].astype(np.int64) for column in (0, 1))
    kept = read[:, :BLOCK] >= read[:, BLOCK + 2 : BLOCK + 3]
    with np.errstate(over="ignore"):  # a temperature near 0
        inside = np.exp((read[:, :BLOCK] - read[:, BLOCK + 3 : BLOCK + 4]) / sampling.temperature)
    nums = np.bincount(rows, weights=kept.sum(axis=1), minlength=len(blocks)).astype(np.int64)
    if not nums.all():
        raise not_finite()
    is_filled = np.arange(nums.max()) < nums[:, None]
    weights, tokens, packed = np.zeros(is_filled.shape), np.zeros(is_filled.shape, dtype=np.int64), inside[kept]
    weights[is_filled], tokens[is_filled] = packed, (first[:, None] * BLOCK + LANES)[kept]
    wholes = sums = np.add.reduceat(packed, nums.cumsum() - nums)[:, None]
    begins = np.searchsorted(rows, np.arange(len(blocks)))
    if masses is not None:
        inside[kept] = 0.0
        beside = np.bincount(rows, weights=inside.sum(axis=1), minlength=len(blocks))
        wholes = sums + read[begins, BLOCK + 4 :] + beside[:, None]
    return _Reached(weights, tokens, sums, wholes, read[begins, BLOCK + 3 : BLOCK + 4])


def _cut(reached: _Reached, sampling: Sampling) -> NDArray[np.float64]:
    """The weights [rows, columns], changed, with 0 for what top_k, top_p and min_p leave out."""
    weights, wholes, num_columns = reached.weights, reached.wholes, reached.weights.shape[1]
    if 0 < sampling.top_k < num_columns:
        place = num_columns - sampling.top_k
        weights[weights < np.partition(weights, place, axis=1)[:, place : place + 1]] = 0.0
        wholes = weights.cumsum(axis=1)[:, -1:]
    if sampling.top_p < 1:
        ascending = np.sort(weights, axis=1)
        cumulative = ascending.cumsum(axis=1)
        # Those before which likelier ones have less than top_p.
        num_left_out = (cumulative[:, -1:] - cumulative >= sampling.top_p * wholes).sum(axis=1)
        least = ascending[np.arange(len(weights)), num_left_out][:, None]
        surplus = (weights >= least).sum(axis=1) - (num_columns - num_left_out)
        if surplus.any():
            equal = weights == least
            places = equal.cumsum(axis=1)
            weights[equal & (places > places[:, -1:] - surplus[:, None])] = 0.0
        weights[weights < least] = 0.0
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0.0
    return weights


def _softmax(scores: Tensor, sampling: Sampling) -> Tensor:
    # Less the best score first, because a score over a temperature near 0 has no float64.
    best = scores.amax(dim=-1, keepdim=True).double()
    return scores.sub(best).div_(sampling.temperature).softmax(dim=-1)


def in_blocks(values: Tensor) -> Tensor:
    """[rows, blocks, BLOCK] of values [rows, vocabulary], the last block padded with -inf."""
    surplus = -values.shape[-1] % BLOCK
    padded = functional.pad(values, (0, surplus), value=-math.inf) if surplus else values
    return padded.reshape(len(values), -1, BLOCK)
