"""How one job's tokens are chosen: from logits to scores, to a distribution, to a token; and its random numbers.

`TokenChooser` is the job's rule, and has the order of its steps; the rest of the module is these steps, in that order.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphaloop.engine import Sampling
from engine.distribution import BLOCK, LANES, candidates, draw_rows, in_blocks, not_finite, probabilities

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
        """The same distribution as the tokens that have a share of it: probabilities, and token ids ascending.

        Both [rows, n], padded with 0. Without cuts all [rows, vocabulary] and None: column i is token i.
        """
        if not self.sampling.is_cut:
            return probabilities(scores, self.sampling), None
        return candidates(scores, self.sampling).on(scores.device)

    @property
    def cut(self) -> tuple[float, int, float, float]:
        """What `probabilities` depends on beside the scores."""
        sampling = self.sampling
        return (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    def tokens(self, scores: Tensor, positions: Sequence[int]) -> list[int]:
        """The token of each row: the argmax of a greedy job, argmax(log p + noise) of a reproducible one.

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


def tokens_of(scores: Tensor, choices: Sequence[tuple[TokenChooser, int]]) -> list[int]:
    """As `TokenChooser.tokens`, each row with its own job and position; the jobs' `cut` is the same."""
    first = choices[0][0]
    if first.is_greedy:
        best: list[int] = scores.argmax(dim=-1).tolist()
        return best
    keys = np.array([choice.noise_key(position) for choice, position in choices], dtype=np.int64)
    return _perturbed_tokens(scores, first.sampling, keys)


def drawn_tokens(scores: Tensor, choices: Sequence[tuple[TokenChooser, int]]) -> list[int]:
    """A token of each row, drawn with the next random number of its job; a job has as many rows as `choices` says.

    The jobs' `cut` is the same.
    """
    uniforms, sampling = uniforms_of(choices), choices[0][0].sampling
    if sampling.is_cut:
        return candidates(scores, sampling).drawn(uniforms)
    columns = draw_rows(probabilities(scores, sampling), torch.from_numpy(uniforms[:, None]).to(scores.device))
    drawn: list[int] = columns.flatten().tolist()
    return drawn


def uniforms_of(choices: Sequence[tuple[TokenChooser, int]]) -> NDArray[np.float64]:
    """As `TokenChooser.uniforms`, on the host, the numbers of one job after those of the other."""
    counters = np.array([number for choice, num in choices for number in choice.counters(num)], dtype=np.int64)
    keys = np.array([choice.job_key for choice, num in choices for _ in range(num)], dtype=np.int64)
    return host_uniforms(keys, counters)


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


def token_noise(
    key: int | NDArray[np.int64], block: NDArray[np.int64], lane: NDArray[np.int64], vocabulary: int
) -> NDArray[np.float64]:
    """Gumbel noise of token `block * BLOCK + lane`; `key` [rows, 1 …], block and lane are broadcast.

    One independent Gumbel draw a token, from the top down (Maddison, Tarlow, Minka 2014, "A* Sampling"). For each block
    of tokens first the largest of its draws, Gumbel(log size), then which of its tokens has it, then the other draws,
    which are Gumbel draws of at most that.
    """
    size = _sizes(block, vocabulary)
    largest = -np.log(-np.log1p(-host_uniforms(key, -1 - 2 * block))) + _log_sizes(size)
    owner = (host_uniforms(key, -2 - 2 * block) * size).astype(np.int64)
    others = -np.log(np.exp(-largest) - np.log(host_uniforms(key, block * BLOCK + lane)))
    return np.where(lane == owner, largest, others)


def _perturbed_tokens(scores: Tensor, sampling: Sampling, keys: NDArray[np.int64]) -> list[int]:
    """argmax(log p + noise) of each row of `scores` [rows, vocabulary]. keys[i] is the key of row i's noise.

    The reproducible coupling. The noise of a position is Gumbel noise that depends on the job's seed and the position
    only, so the choice's distribution is p (the Gumbel-max trick). A drafter that chooses by argmax(log q + noise)
    agrees often. Its draft is accepted where it equals the target's choice, and nothing else of it enters the text. So
    the text is a function of seed and target: the same in every mode, k, drafter, tree and batch, as far as p is the
    same to the bits that decide.

    Target and drafter agree with probability sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i), which is at
    least (1 - TV) / (1 + TV), TV = total variation of p and q (Daliri, Musco, Suresh 2025, "Coupling without
    Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978). The maximal coupling accepts 1 - TV.

    The draws are the same everywhere; their logarithms may differ in the last bit between processors.
    """
    if not sampling.is_cut:
        return _perturbed_among_all(scores, sampling, keys)
    shared = candidates(scores, sampling)
    rows, columns = shared.weights.nonzero()
    tokens = shared.tokens[rows, columns]
    noise = token_noise(keys[rows], tokens // BLOCK, tokens % BLOCK, scores.shape[-1])
    sums = np.full(shared.weights.shape, -math.inf)
    sums[rows, columns] = np.log(shared.weights[rows, columns]) + noise
    chosen: list[int] = shared.tokens[np.arange(len(sums)), sums.argmax(axis=1)].tolist()
    return chosen


def _perturbed_among_all(scores: Tensor, sampling: Sampling, keys: NDArray[np.int64]) -> list[int]:
    """The same without a cut. Most of the noise is never looked at, and three waits for the device.

    A block's highest score and largest draw together bound all of its sums. So the device hands over each row's block
    of the highest bound, and then those whose bounds are no lower than what that one reaches.
    """
    vocabulary, device = scores.shape[-1], scores.device
    # log p is (score - best score) / temperature up to a constant of the row; without the best score, a score over a
    # temperature near 0 would have no float64.
    best = scores.amax(dim=-1, keepdim=True).double()
    blocks = in_blocks(scores.sub(best).div_(sampling.temperature))
    bounds = blocks.amax(dim=-1).add_(_largest_noise(keys, blocks.shape[1], vocabulary, device))
    highest = bounds.argmax(dim=-1, keepdim=True)
    read = torch.cat((blocks.take_along_dim(highest[:, :, None], 1).flatten(1), highest), dim=1).cpu().numpy()
    _, reached = _highest_sums(read, keys, vocabulary)
    if not np.isfinite(reached).all():
        raise not_finite()
    # Less the error of logarithms on another processor.
    pairs = (bounds >= torch.from_numpy(reached[:, None] - 1e-9).to(device)).nonzero()
    row, block = pairs.unbind(1)
    read = torch.cat((blocks[row, block], pairs), dim=1).cpu().numpy()
    rows = read[:, BLOCK].astype(np.int64)
    tokens, sums = _highest_sums(read[:, [*range(BLOCK), BLOCK + 1]], keys[rows], vocabulary)
    by_row = np.lexsort((sums, rows))
    chosen: list[int] = tokens[by_row[np.diff(rows[by_row], append=-1) != 0]].tolist()
    return chosen


def _highest_sums(
    read: NDArray[np.float64], keys: NDArray[np.int64], vocabulary: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The token of the highest sum of log p and noise in each block, and that sum, both [rows].

    `read` [rows, BLOCK + 1]: log p of a block's tokens, and the block's number.
    """
    block = read[:, BLOCK:].astype(np.int64)
    sums = read[:, :BLOCK] + token_noise(keys[:, None], block, LANES, vocabulary)
    lanes = sums.argmax(axis=1)
    return block[:, 0] * BLOCK + lanes, sums[np.arange(len(sums)), lanes]


def _largest_noise(keys: NDArray[np.int64], num_blocks: int, vocabulary: int, device: torch.device) -> Tensor:
    """The largest noise of each block's tokens: [rows, blocks]."""
    block = np.arange(num_blocks)
    key, counters, log_sizes = (
        torch.from_numpy(of).to(device) for of in (keys[:, None], -1 - 2 * block, _log_sizes(_sizes(block, vocabulary)))
    )
    return gumbel(key, counters).add_(log_sizes)


def _sizes(block: NDArray[np.int64], vocabulary: int) -> NDArray[np.int64]:
    return np.minimum(vocabulary - block * BLOCK, BLOCK)


def _log_sizes(sizes: NDArray[np.int64]) -> NDArray[np.float32]:
    # Rounded to float32, so that a seed means what it has always meant: it moves all whole blocks alike.
    return np.log(sizes.astype(np.float32))


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


def host_uniforms(key: int | NDArray[np.int64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """The same draws as arrays, without a call of torch."""
    drawn: NDArray[np.float64] = (_mixed(counters * _GAMMA + key).astype(np.float64) + 0.5) * 2.0**-52
    return drawn


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
    return uniforms(key, counters).neg_().log1p_().neg_().log_().neg_()
