"""From logits to the distribution that is sampled, and where a job's randomness comes from."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from worker.engine import Sampling


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Distribution after temperature, top_k and top_p, in that order, in float64: [positions, vocabulary].

    top_k keeps ties with the k-th likeliest token. top_p keeps the smallest set of likeliest tokens whose probability
    reaches it, the token that crosses it included. The temperature must be above 0: at 0 decoding is greedy.
    """
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        kth = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    p = scaled.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
        p = p.masked_fill(beyond.scatter(-1, order, beyond), 0.0)
        p = p / p.sum(dim=-1, keepdim=True)
    return p


def job_generator(job_id: str, seed: int | None) -> torch.Generator:
    """The job's own source of randomness, on the CPU.

    Without a seed it follows from the job_id, so that a job that is decoded again after a crash gets the same text.
    """
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8], "big", signed=True)
    return torch.Generator("cpu").manual_seed(seed)


def uniforms(generator: torch.Generator, num: int, device: torch.device) -> Tensor:
    """`num` independent draws from [0, 1) in float64."""
    return torch.rand(num, generator=generator, dtype=torch.float64).to(device)
