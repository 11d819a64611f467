"""Bias and penalties: how a job's settings and its own text change the scores before a token is chosen.

In this order, which is that of vLLM's sampler: `logit_bias` is added; the repetition penalty (Keskar et al. 2019)
divides positive and multiplies negative scores of every token of prompt and output; the frequency penalty is
subtracted once for each time a token stands in the output, the presence penalty once for each token that does (OpenAI).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from worker.engine import Sampling


class Penalties:
    """One job's bias and penalties. It reads each token of the text once for each device that chooses its tokens."""

    def __init__(self, sampling: Sampling, num_prompt: int) -> None:
        self._sampling = sampling
        self._num_prompt = num_prompt
        # A draft on another device has numbers of its own there: shared ones would cross with every token.
        self._by_device: dict[torch.device, _TextCounts] = {}

    @property
    def is_neutral(self) -> bool:
        """Whether scores stay what they are."""
        return not self._sampling.is_adjusted

    def adjust(self, logits: Tensor, text: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """Scores [rows, vocabulary], at least float32; `logits` stay as they are.

        Row i stands behind `text` and the tokens of `paths[i]`. `text` is prompt and output; between calls it may only
        grow.
        """
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        counts = self._by_device.get(scores.device)
        if counts is None:
            counts = self._by_device[scores.device] = _TextCounts(self._sampling, self._num_prompt, scores.device)
        return counts.adjust(scores, text, paths)


class _TextCounts:
    """What one device holds of a job: its biases, and how often each token stands in the text."""

    def __init__(self, sampling: Sampling, num_prompt: int, device: torch.device) -> None:
        self._sampling = sampling
        self._num_prompt = num_prompt
        self._device = device
        self._has_penalty = replace(sampling, logit_bias=()).is_adjusted
        self._biased = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.long, device=device)
        self._biases = torch.tensor([bias for _, bias in sampling.logit_bias], dtype=torch.float64, device=device)
        # Only the repetition penalty looks at the prompt.
        self._num_read = 0 if sampling.repetition_penalty != 1 else num_prompt
        # Tokens that were read, in order of first appearance, each with its place and how often the output has it.
        self._places: dict[int, int] = {}
        self._in_output: Counter[int] = Counter()
        self._tokens = torch.empty(0, dtype=torch.long, device=device)
        self._counts = torch.empty(0, dtype=torch.long, device=device)

    def adjust(self, scores: Tensor, text: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """`scores`, changed in place."""
        if len(self._biased):
            scores.index_add_(1, self._biased, self._biases.to(scores.dtype).expand(len(scores), -1))
        if self._has_penalty:
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
        return scores

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
        """Take in what was added to the text."""
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
        added = torch.tensor(fresh, dtype=torch.long, device=self._device)
        self._tokens = torch.cat((self._tokens, added))
        where = torch.tensor(places, dtype=torch.long, device=self._device)
        counts = torch.cat((self._counts, torch.zeros_like(added)))
        self._counts = counts.index_add(0, where, torch.ones_like(where))
