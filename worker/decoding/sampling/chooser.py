"""How one job's tokens are chosen: its scores, its distribution, and its randomness."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.decoding.sampling import randomness
from worker.decoding.sampling.distribution import probabilities as probabilities
from worker.decoding.sampling.penalties import Penalties
from worker.decoding.sampling.perturbed import perturbed_tokens, vocabulary_noise
from worker.engine import Sampling


class TokenChooser:
    """One job's rule from logits to tokens, and the source of its randomness.

    Randomness never depends on the batch, the device or the process. With a seed a token's noise follows from the seed
    and the token's position alone; without one the draws follow, in order, from the job_id, so that a job that is
    decoded again after a crash in the same way gets the same text.
    """

    def __init__(self, job_id: str, sampling: Sampling, num_prompt: int) -> None:
        self.sampling = sampling
        self.is_greedy = sampling.temperature == 0
        #: Drawn with noise that the draft shares (`noise`, `tokens`): the same text in every mode, k, drafter, batch.
        self.is_reproducible = sampling.is_reproducible
        self._penalties = Penalties(sampling, num_prompt)
        #: No bias and no penalty: `scores` are the logits.
        self.is_plain = self._penalties.is_neutral
        self._job_key = randomness.key_of("job", job_id)
        self._num_drawn = 0

    def scores(
        self, logits: Tensor, text: Sequence[int], drafts: Sequence[int] = (), parents: Sequence[int] | None = None
    ) -> Tensor:
        """`logits` [1 + len(drafts), vocabulary] with bias and penalties, at least float32 unless the job is plain.

        Row 0 stands behind `text` (prompt and output with the pending token), row i + 1 behind drafts[i], whose history
        is the text and its own ancestors. `parents` as in Proposal. `text` may only grow between calls.
        """
        return self.scores_behind(logits, text, _paths(drafts, parents))

    def scores_behind(self, logits: Tensor, text: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """The same where row i of `logits` stands behind `text` and the tokens of paths[i]."""
        return logits if self.is_plain else self._penalties.adjust(logits, text, paths)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Distribution of each row [rows, vocabulary], in float64. Jobs of equal `cut` may share a call."""
        return probabilities(scores, self.sampling)

    @property
    def cut(self) -> tuple[float, int, float, float]:
        """What `probabilities` depends on beside the scores."""
        sampling = self.sampling
        return (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    def tokens(self, scores: Tensor, positions: Sequence[int]) -> Tensor:
        """The token of each row [rows]: the argmax of a greedy job, argmax(log p + noise) of a reproducible one.

        `positions`: where in prompt and output each token will stand. A draft that equals its row's token is accepted.
        """
        if self.is_greedy:
            return scores.argmax(dim=-1)
        if not self.is_reproducible:
            raise ValueError("a job without a seed has no token that follows from its scores")
        return perturbed_tokens(scores, self.sampling, [self._noise_key(position) for position in positions])

    def noise(self, position: int, vocabulary: int, device: torch.device) -> Tensor:
        """Gumbel noise [vocabulary] in float64 for the token at `position`; only for reproducible jobs."""
        return vocabulary_noise(self._noise_key(position), vocabulary, device)

    def uniforms(self, num: int, device: torch.device) -> Tensor:
        """The job's next `num` independent draws from (0, 1) in float64."""
        counters = torch.arange(self._num_drawn, self._num_drawn + num, device=device)
        self._num_drawn += num
        return randomness.uniforms(self._job_key, counters)

    def _noise_key(self, position: int) -> int:
        if not self.is_reproducible or self.sampling.seed is None:
            raise ValueError("only a sampled job with a seed has noise")
        return randomness.key_of("seed", self.sampling.seed, position)


def _paths(drafts: Sequence[int], parents: Sequence[int] | None) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for index, token in enumerate(drafts):
        parent = index - 1 if parents is None else parents[index]
        paths.append((*paths[parent + 1], token))
    return paths
