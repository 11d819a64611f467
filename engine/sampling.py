"""How one job's tokens are chosen: from logits to scores, to a distribution, to a token; and its random numbers.

`TokenChooser` is the job's rule, and has the order of its steps; the rest of the module is these steps, in that order.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from alphaloop.engine import Sampling
from alphaloop.errors import DecodeFailed

if TYPE_CHECKING:
    from engine.constraint import ConstrainedText


@dataclass(frozen=True, slots=True)
class Barred:
    """Tokens that a job may not write, beside those that its `allowed_token_ids` leave out."""

    #: The last token of each is barred where the output ends with the others; of one token it is barred everywhere.
    bad_words: tuple[tuple[int, ...], ...] = ()
    end_tokens: frozenset[int] = frozenset()  #: barred until the output has `min_tokens`


NOTHING_BARRED: Final = Barred()


class TokenChooser:
    """One job's rule from logits to tokens, and the source of its randomness.

    The steps, in the order of vLLM's sampler:

    1. Logprobs, if the job wants them, are those of the logits as they come (`verification`).
    2. Bar: what `allowed_token_ids` leaves out, `bad_words`, and end tokens before `min_tokens`.
    3. Add `logit_bias`.
    4. Penalise repetition, frequency and presence.
    5. Mask what the constraint refuses.
    6. A greedy job takes the likeliest token. If its text is compared with another, the second choice is noted.
    7. Otherwise divide by the temperature and cut to top_k, top_p and min_p.
    8. Draw: with noise that follows from the seed, or from the job's own random numbers.

    `scores` has steps 2 to 5, `tokens` 6, and 7 and 8 of a job with a seed; without one, `probabilities` is step 7, and
    a rule of `verification` draws with `uniforms`. A drafter goes the same way with its own logits.

    Randomness never depends on the batch, the device or the process. With a seed a token's noise follows from the seed
    and the token's position alone; without one the draws follow, in order, from the job_id, so that a job that is
    decoded again after a crash in the same way gets the same text.
    """

    def __init__(
        self,
        job_id: str,
        sampling: Sampling,
        num_prompt: int,
        *,
        barred: Barred = NOTHING_BARRED,
        constrained: ConstrainedText | None = None,
    ) -> None:
        self.sampling = sampling
        #: What the text has to match, which cuts the target's scores and a drafter's alike; None: anything.
        self.constrained = constrained
        self.is_greedy = sampling.temperature == 0
        #: Drawn with noise that the draft shares (`tokens`): the same text in every mode, k, drafter, batch.
        self.is_reproducible = sampling.is_reproducible
        #: Whether some tokens cannot be written.
        self.is_barring = bool(
            barred.bad_words or sampling.allowed_token_ids or (sampling.min_tokens and barred.end_tokens)
        )
        #: Its token is the likeliest that its constraint allows.
        self.takes_likeliest = self.is_greedy and not self.is_barring
        #: Nothing barred, no bias, no penalty, no constraint: `scores` are the logits.
        self.is_plain = not (sampling.is_adjusted or self.is_barring or constrained is not None)
        self._num_prompt = num_prompt
        self._barred = barred
        # A draft on another device has numbers of its own there: shared ones would cross with every token.
        self._adjustments: dict[torch.device, _Adjustments] = {}
        self.job_key = key_of("job", job_id)
        self._num_drawn = 0

    def scores(self, logits: Tensor, text: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """`logits` [rows, vocabulary] with bias and penalties, -inf where a token is barred or refused.

        At least float32 unless the job is plain. What is barred stays so, whatever is added. Row i stands after `text`
        (prompt and output with the pending token, which may only grow between calls) and the tokens of paths[i]. Where
        the constraint and the rest leave nothing, the whole row is -inf.
        """
        if self.is_plain:
            return logits
        scores = self.adjusted(logits, text, paths)
        if self.constrained is not None:
            self.constrained.restrict(scores, [tuple(path) for path in paths])
        return scores

    def adjusted(self, logits: Tensor, text: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """A copy of `logits` with all of that but the constraint."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        device = scores.device
        if (adjustments := self._adjustments.get(device)) is None:
            adjustments = _Adjustments(self.sampling, self._barred, self._num_prompt, device)
            self._adjustments[device] = adjustments
        if self.is_barring:
            adjustments.bar(scores, text, paths)
        if self.sampling.logit_bias:
            adjustments.add_bias(scores)
        if self.sampling.has_penalty:
            adjustments.penalise(scores, text, paths)
        return scores

    def probabilities(self, scores: Tensor) -> Tensor:
        """Distribution of each row [rows, vocabulary], in float64. Jobs of equal `cut` may share a call."""
        return probabilities(scores, self.sampling)

    def candidates(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same distribution as the tokens that have a share of it: weights, and token ids ascending.

        Both [rows, n], padded with 0; weights are not `normalised`. Without cuts all [rows, vocabulary] and None:
        column i is token i.
        """
        if not self.sampling.is_cut:
            return probabilities(scores, self.sampling), None
        return _candidates(scores, self.sampling)

    @property
    def cut(self) -> tuple[float, int, float, float]:
        """What `probabilities` depends on beside the scores."""
        sampling = self.sampling
        return (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    def tokens(self, scores: Tensor, positions: Sequence[int]) -> Tensor:
        """The token of each row [rows]: the argmax of a greedy job, argmax(log p + noise) of a reproducible one.

        `positions`: where in prompt and output each token will stand. A draft that equals its row's token is accepted.
        """
        return tokens_of(scores, [(self, position) for position in positions])

    def uniforms(self, num: int, device: torch.device) -> Tensor:
        """The job's next `num` independent draws from (0, 1) in float64."""
        return torch.from_numpy(uniforms_of([(self, num)])).to(device)

    def counters(self, num: int) -> range:
        """What the job's next `num` draws are numbered: each number is given once."""
        self._num_drawn += num
        return range(self._num_drawn - num, self._num_drawn)

    def noise_key(self, position: int) -> int:
        """The key of the noise of the token at `position`; only for reproducible jobs."""
        if not self.is_reproducible or self.sampling.seed is None:
            raise ValueError("only a sampled job with a seed has noise")
        return key_of("seed", self.sampling.seed, position)


def tokens_of(scores: Tensor, choices: Sequence[tuple[TokenChooser, int]]) -> Tensor:
    """As `TokenChooser.tokens`, each row with its own job and position; the jobs' `cut` is the same: [rows]."""
    first = choices[0][0]
    if first.is_greedy:
        return scores.argmax(dim=-1)
    return _perturbed_tokens(scores, first.sampling, [choice.noise_key(position) for choice, position in choices])


def uniforms_of(choices: Sequence[tuple[TokenChooser, int]]) -> NDArray[np.float64]:
    """As `TokenChooser.uniforms`, on the host, the numbers of one job after those of the other."""
    counters = np.array([number for choice, num in choices for number in choice.counters(num)], dtype=np.int64)
    keys = np.array([choice.job_key for choice, num in choices for _ in range(num)], dtype=np.int64)
    drawn: NDArray[np.float64] = (_mixed(counters * _GAMMA + keys).astype(np.float64) + 0.5) * 2.0**-52
    return drawn


class _Adjustments:
    """What one job's settings and its own text change of scores on one device.

    Exact under drafts, because each row is judged by its own path.
    """

    def __init__(self, sampling: Sampling, barred: Barred, num_prompt: int, device: torch.device) -> None:
        self._sampling = sampling
        self._num_prompt = num_prompt
        self._device = device
        self._end_tokens = sorted(barred.end_tokens)
        self._allowed = self._ids(sampling.allowed_token_ids)
        self._always = self._ids(sorted({word[0] for word in barred.bad_words if len(word) == 1}))
        self._after: dict[tuple[int, ...], list[int]] = {}  # what the rest of a bad word bars
        for *before, last in barred.bad_words:
            if before:
                self._after.setdefault(tuple(before), []).append(last)
        self._longest = max(map(len, self._after), default=0)
        self._biased = self._ids([token for token, _ in sampling.logit_bias])
        self._biases = torch.tensor([bias for _, bias in sampling.logit_bias], dtype=torch.float64, device=device)
        # Only the repetition penalty looks at the prompt.
        self._num_read = 0 if sampling.repetition_penalty != 1 else num_prompt
        # Tokens that were read, in order of first appearance, each with its place and how often the output has it.
        self._places: dict[int, int] = {}
        self._in_output: Counter[int] = Counter()
        self._tokens = self._ids(())
        self._counts = self._ids(())

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.long, device=self._device)

    def bar(self, scores: Tensor, text: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """-inf into `scores` [rows, vocabulary] for every token that cannot follow the text and the row's path."""
        if len(self._allowed):
            kept = scores[:, self._allowed]
            scores.fill_(-torch.inf)
            scores[:, self._allowed] = kept
        scores[:, self._always] = -torch.inf
        cells: list[tuple[int, int]] = []
        last = list(text[max(self._num_prompt, len(text) - self._longest) :]) if self._after else []
        for row, path in enumerate(paths):
            if self._after:
                output = (*last, *path)[-self._longest :]
                ends = (output[begin:] for begin in range(len(output)))
                cells += ((row, token) for end in ends for token in self._after.get(end, ()))
            if len(text) - self._num_prompt + len(path) < self._sampling.min_tokens:
                cells += ((row, token) for token in self._end_tokens)
        if cells:
            rows, tokens = torch.tensor(cells, dtype=torch.long, device=self._device).unbind(1)
            scores[rows, tokens] = -torch.inf

    def add_bias(self, scores: Tensor) -> None:
        """Add `logit_bias` to `scores` [rows, vocabulary]."""
        scores.index_add_(1, self._biased, self._biases.to(scores.dtype).expand(len(scores), -1))

    def penalise(self, scores: Tensor, text: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Penalise tokens of the text and of each row's path in `scores` [rows, vocabulary]. Reads each token once.

        The repetition penalty (Keskar et al. 2019) divides positive and multiplies negative scores of every token of
        prompt and output; the frequency penalty is subtracted once for each time a token stands in the output, the
        presence penalty once for each token that does (OpenAI).
        """
        self._read(text)
        ahead = [
            (row, token, num + self._in_output[token])
            for row, path in enumerate(paths)
            for token, num in Counter(path).items()
        ]
        rows, tokens, counts = torch.tensor(ahead, dtype=torch.long, device=self._device).reshape(-1, 3).unbind(1)
        # Read before the text's tokens are written: a token ahead may be one of them.
        before = scores[rows, tokens]
        scores[:, self._tokens] = self._penalised(scores[:, self._tokens], self._counts)
        scores[rows, tokens] = self._penalised(before, counts)

    def _penalised(self, scores: Tensor, counts: Tensor) -> Tensor:
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            scores = torch.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
        if sampling.frequency_penalty:
            scores = scores - sampling.frequency_penalty * counts.to(scores.dtype)
        if sampling.presence_penalty:
            scores = scores - sampling.presence_penalty * (counts > 0).to(scores.dtype)
        return scores

    def _read(self, text: Sequence[int]) -> None:
        """Count what was added to the text."""
        fresh: list[int] = []
        places: list[int] = []
        for index in range(self._num_read, len(text)):
            token = text[index]
            if token not in self._places:
                self._places[token] = len(self._places)
                fresh.append(token)
            if index >= self._num_prompt:
                self._in_output[token] += 1
                places.append(self._places[token])
        self._num_read = len(text)
        added, where = self._ids(fresh), self._ids(places)
        self._tokens = torch.cat((self._tokens, added))
        counts = torch.cat((self._counts, torch.zeros_like(added)))
        self._counts = counts.index_add(0, where, torch.ones_like(where))


# Tokens a block, a power of two: large enough that the blocks' maxima are few, small enough that a block read in vain
# costs little.
BLOCK: Final = 64
# Tokens with less than this share of the likeliest one's probability are looked at only if top_p needs them.
_HOPE: Final = 2.0**-10


def probabilities(scores: Tensor, sampling: Sampling) -> Tensor:
    """Distribution of each row of `scores` [rows, vocabulary], in float64: [rows, vocabulary].

    Temperature, then top_k, top_p and min_p: the order of transformers (`_get_logits_processor`). vLLM takes min_p
    before top_k and top_p; which tokens min_p itself removes is the same there, as its bound is a share of the
    likeliest token's probability. A whole vocabulary is never sorted where a few of its tokens can stay: those are
    found by a bound that every token that stays must reach, first among blocks of the vocabulary, then inside the
    blocks that reach it.

    top_k keeps ties with the k-th likeliest token. top_p keeps the smallest set of likeliest tokens whose probability
    reaches it, the token that crosses it included; of equally likely ones the lower id is taken first. min_p keeps
    tokens with at least that share of the likeliest one's probability. The temperature must be above 0: at 0 decoding
    is greedy. Raises RuntimeError where a row has no finite maximum.
    """
    if not sampling.is_cut:
        whole = _softmax(scores, sampling)
        _refuse_infinite(whole[:, 0])
        return whole
    weights, tokens = _candidates(scores, sampling)
    # The padding adds 0 to token 0.
    whole = torch.zeros(scores.shape, dtype=torch.float64, device=scores.device)
    return whole.scatter_add_(-1, tokens, normalised(weights))


def _candidates(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The same distribution as the few tokens that share it; `sampling` must be cut.

    Weights [rows, n] in float64, not normalised and padded with 0, and their tokens [rows, n], ascending but for the
    padding. n is the longest row's. Two waits for the device.
    """
    if 0 < sampling.top_k < scores.shape[-1]:
        weights, order, tokens = _top_k(_in_blocks(_comparable(scores)), sampling)
        if sampling.top_p < 1 or sampling.min_p > 0:
            weights = normalised(weights)
    elif sampling.top_p < 1:
        weights, order, tokens = _reaching(scores, sampling)
    else:
        blocks = _in_blocks(_comparable(scores))
        peaks = blocks.amax(dim=-1)
        best = peaks.amax(dim=-1, keepdim=True).double()
        # Less the error of its rounding. Without min_p top_k asks for more than the vocabulary: no token is cut.
        distance = sampling.temperature * math.log(sampling.min_p) if sampling.min_p else -math.inf
        bound = best + (distance - 1e-9)
        values, order, tokens = _at_least(blocks, peaks, bound.sub_(best.abs(), alpha=1e-9), -torch.inf)
        weights = _weights(values, best, sampling)
    if sampling.top_p < 1:
        weights = weights.masked_fill(weights.cumsum(dim=-1) - weights >= sampling.top_p, 0.0)
    if sampling.min_p > 0:
        weights = weights.masked_fill(weights < sampling.min_p * weights[:, :1], 0.0)
    return weights.scatter(1, order, weights), tokens


def _top_k(blocks: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """As `_at_least`, weights of the top_k likeliest tokens and of those that equal the last of them."""
    peaks = blocks.amax(dim=-1)
    best = peaks.amax(dim=-1, keepdim=True)
    # Each of the top_k highest blocks has a token that reaches the lowest of their maxima.
    among = peaks if sampling.top_k <= peaks.shape[-1] else blocks.flatten(1)
    kth = among.topk(sampling.top_k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    values, order, tokens = _at_least(blocks, peaks, kth, -torch.inf)
    if values.shape[-1] > sampling.top_k:
        values = values.masked_fill(values < values[:, sampling.top_k - 1 : sampling.top_k], -torch.inf)
    return _weights(values, best, sampling), order, tokens


def _reaching(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """As `_at_least`, probabilities of all tokens that top_p and min_p can keep."""
    p = _softmax(scores, sampling)
    blocks = _in_blocks(p, 0.0)
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
    return _at_least(blocks, peaks, bound, 0.0)


def _comparable(scores: Tensor) -> Tensor:
    """Maxima of 16-bit numbers take longer than turning them into float32."""
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()


def _weights(values: Tensor, best: Tensor, sampling: Sampling) -> Tensor:
    return ((values - best) / sampling.temperature).exp_()


def normalised(weights: Tensor) -> Tensor:
    """Each row of `weights` [rows, columns] over its sum."""
    # A running sum, because its bits do not depend on the row's padding, and so not on the other rows.
    return weights / weights.cumsum(dim=-1)[:, -1:]


def _softmax(scores: Tensor, sampling: Sampling) -> Tensor:
    # Less the best score first, because a score over a temperature near 0 has no float64.
    best = scores.amax(dim=-1, keepdim=True).double()
    return scores.sub(best).div_(sampling.temperature).softmax(dim=-1)


def _refuse_infinite(best: Tensor) -> None:
    """Raise DecodeFailed unless all are finite: what is drawn from other numbers means nothing."""
    if not bool(best.isfinite().all()):
        raise DecodeFailed("the target returned logits that are not finite")


def _in_blocks(values: Tensor, padding: float = -torch.inf) -> Tensor:
    """[..., blocks, BLOCK] of values [..., vocabulary], the last block padded."""
    surplus = -values.shape[-1] % BLOCK
    padded = functional.pad(values, (0, surplus), value=padding) if surplus else values
    return padded.reshape(*padded.shape[:-1], -1, BLOCK)


def _at_least(blocks: Tensor, peaks: Tensor, bound: Tensor, padding: float) -> tuple[Tensor, Tensor, Tensor]:
    """The values of each row [rows, blocks, BLOCK] that reach its bound [rows, 1] and are more than `padding`.

    Returns these values [rows, n] in float64, descending, equal ones by token id, padded; the column of each in the
    tokens; and their token ids [rows, n], ascending but for the padding. `peaks` [rows, blocks] are the blocks' maxima.
    Two waits for the device. Raises DecodeFailed where a row has no finite maximum.
    """
    lowest = torch.finfo(blocks.dtype).tiny if padding == 0 else torch.finfo(blocks.dtype).min
    # No number reaches the sum where the maximum is not finite.
    bound = bound.clamp_min(lowest).add_(peaks.amax(dim=-1, keepdim=True), alpha=0)
    nums_blocks: list[int] = (peaks >= bound).sum(dim=-1).tolist()
    if not all(nums_blocks):
        raise DecodeFailed("the target returned logits that are not finite")
    places = peaks.topk(max(nums_blocks), dim=-1).indices.sort(dim=-1).values
    tokens = torch.add(_lanes(blocks.device), places[:, :, None], alpha=BLOCK).flatten(1)
    inside = blocks.flatten(1).gather(1, tokens)
    is_reached = inside >= bound
    column = is_reached.cumsum(dim=-1)
    num = int(column.amax())
    # What is not reached goes into the first column, which is left out.
    column = column.mul_(is_reached)
    packed = torch.full((len(inside), 1 + num), padding, dtype=torch.float64, device=inside.device)
    packed = packed.scatter_(1, column, inside.double())[:, 1:]
    tokens = tokens.new_zeros((len(inside), 1 + num)).scatter_(1, column, tokens)[:, 1:]
    packed, order = packed.sort(dim=-1, descending=True, stable=True)
    return packed, order, tokens


@lru_cache(maxsize=8)
def _lanes(device: torch.device) -> Tensor:
    """The places in a block [BLOCK]."""
    return torch.arange(BLOCK, device=device)


def token_noise(key: int | Tensor, block: Tensor, lane: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise in float64 of token `block * BLOCK + lane`; `key` [rows, 1 …], block and lane are broadcast."""
    size, first = _sizes(block, vocabulary), -2 * block
    tokens = torch.add(lane, block, alpha=BLOCK)
    # All draws in one call: each takes some twenty operations of integers.
    counters = torch.stack(torch.broadcast_tensors(first - 1, first - 2, tokens))
    of_largest, of_owner, of_token = uniforms(key, counters).unbind()
    largest = _gumbel(of_largest).add_(size.log())
    owner = (of_owner * size).long()
    others = ((-largest).exp_() - of_token.log_()).log_().neg_()
    return torch.where(lane == owner, largest, others)


def _perturbed_tokens(scores: Tensor, sampling: Sampling, keys: Sequence[int]) -> Tensor:
    """argmax(log p + noise) of each row of `scores` [rows, vocabulary]: [rows]. keys[i] is the key of row i's noise.

    The reproducible coupling. The noise of a position is Gumbel noise that depends on the job's seed and the position
    only, so the choice's distribution is p (the Gumbel-max trick). A drafter that chooses by argmax(log q + noise)
    agrees often. Its draft is accepted where it equals the target's choice, and nothing else of it enters the text. So
    the text is a function of seed and target: the same in every mode, k, drafter, tree and batch, as far as p is the
    same to the bits that decide.

    Target and drafter agree with probability sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i), which is at
    least (1 - TV) / (1 + TV), TV = total variation of p and q (Daliri, Musco, Suresh 2025, "Coupling without
    Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978). The maximal coupling accepts 1 - TV.

    The noise is drawn so that most of it need never be looked at: it is one independent Gumbel draw a token, from the
    top down (Maddison, Tarlow, Minka 2014, "A* Sampling"). For each block of tokens first the largest of its draws,
    Gumbel(log size), then which of its tokens has it, then the other draws, which are Gumbel draws of at most that. A
    block's highest score and largest draw together bound all of its sums, so few blocks remain in question. The draws
    are the same everywhere; their logarithms may differ in the last bit between processors.
    """
    vocabulary = scores.shape[-1]
    key = torch.tensor(keys, dtype=torch.long, device=scores.device)[:, None]
    if sampling.is_cut:
        weights, tokens = _candidates(scores, sampling)
        noise = token_noise(key, tokens >> BLOCK.bit_length() - 1, tokens & BLOCK - 1, vocabulary)
        best = weights.log_().add_(noise).argmax(dim=-1, keepdim=True)
        return tokens.gather(-1, best).squeeze(-1)
    # log p is (score - best score) / temperature up to a constant of the row; without the best score, a score over a
    # temperature near 0 would have no float64.
    inside = _in_blocks(scores)
    block = torch.arange(inside.shape[-2], device=scores.device)
    peaks = inside.amax(dim=-1).double()
    top = peaks.amax(dim=-1)
    bounds = (peaks - top[:, None]) / sampling.temperature + _largest_noise(key, block, _sizes(block, vocabulary))
    lanes = torch.arange(BLOCK, device=scores.device)

    def sums(row: Tensor, block: Tensor) -> Tensor:
        noise = token_noise(key[row], block[:, None], lanes, vocabulary)
        return (inside[row, block].double() - top[row, None]) / sampling.temperature + noise

    reached = sums(torch.arange(len(scores), device=scores.device), bounds.argmax(dim=-1)).amax(dim=-1, keepdim=True)
    _refuse_infinite(reached)
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


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GAMMA: Final = _signed(0x9E3779B97F4A7C15)
# Shift and multiplier of each mixing step; torch shifts int64 arithmetically, the mask makes it logical.
_STEPS: Final = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


_Bits = TypeVar("_Bits", Tensor, NDArray[np.int64])


def key_of(*parts: int | str) -> int:
    """A key, signed 64 bits, for what the parts name."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big", signed=True)


def uniforms(key: int | Tensor, counters: Tensor) -> Tensor:
    """Draws from (0, 1) in float64, one a counter. `key` and `counters` (int64) broadcast against each other.

    They follow from key and counter: the same in every process, on every device, in any order. SplitMix64 (Steele, Lea,
    Flood 2014, with the finaliser of its reference code) over `key + counter · γ`. Only integers are mixed, which are
    exact everywhere, so a number can be computed where and when it is needed, for a few tokens as well as for the whole
    vocabulary. torch's CPU generator keeps 32 bits of its seed, which makes different seeds equal.
    """
    # 52 bits and a half are still exact, so that neither 0 nor 1 is ever drawn.
    return _mixed(counters * _GAMMA + key).double().add_(0.5).mul_(2.0**-52)


def _mixed(bits: _Bits) -> _Bits:
    """52 random bits of each number, which is changed."""
    for shift, multiplier in _STEPS:
        shifted = bits >> shift
        shifted &= (1 << (64 - shift)) - 1
        bits ^= shifted
        if multiplier != 1:
            bits *= multiplier
    bits >>= 12
    bits &= (1 << 52) - 1
    return bits


def gumbel(key: int | Tensor, counters: Tensor) -> Tensor:
    """Standard Gumbel draws in float64, one a counter.

    argmax(log p + gumbel) is distributed as p (Gumbel 1954; Maddison et al. 2014). Taken as -log(-log1p(-u)): winners
    have a small u, where it is the most precise.
    """
    return _gumbel(uniforms(key, counters))


def _gumbel(uniforms: Tensor) -> Tensor:
    """In place."""
    return uniforms.neg_().log1p_().neg_().log_().neg_()
