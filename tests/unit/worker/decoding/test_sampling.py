"""Temperature, top_k and top_p against a plain restatement, and where randomness comes from."""

from __future__ import annotations

import math
import random

import pytest
import torch

from worker.decoding.sampling import job_generator, probabilities, uniforms
from worker.engine import Sampling


def restated(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The same in plain Python for one position without ties."""
    scaled = [value / temperature for value in logits]
    best = max(scaled)
    p = [math.exp(value - best) for value in scaled]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if top_k:
        order = order[:top_k]
    total = sum(p[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        if reached >= top_p:
            break
        kept.append(i)
        reached += p[i] / total
    mass = sum(p[i] for i in kept)
    return [p[i] / mass if i in kept else 0.0 for i in range(len(p))]


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95, 1.0])
def test_probabilities_are_the_restated_ones(temperature: float, top_k: int, top_p: float, rng: random.Random) -> None:
    rows = [[rng.gauss(0, 3) for _ in range(12)] for _ in range(5)]
    sampling = Sampling(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
    found = probabilities(torch.tensor(rows, dtype=torch.float64), sampling)
    expected = torch.tensor([restated(row, temperature, top_k, top_p) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_bfloat16_logits_give_a_float64_distribution() -> None:
    p = probabilities(torch.randn(3, 50_000).bfloat16(), Sampling(max_tokens=1, temperature=1.0, top_p=0.9))
    assert p.dtype == torch.float64
    torch.testing.assert_close(p.sum(-1), torch.ones(3, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_top_k_keeps_ties() -> None:
    p = probabilities(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), Sampling(max_tokens=1, temperature=1.0, top_k=2))
    assert p[0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])


@pytest.mark.parametrize("seed", [None, 0, 5, -(2**63), 2**63 - 1])
def test_a_job_draws_the_same_numbers_each_time(seed: int | None) -> None:
    cpu = torch.device("cpu")
    first, again = (uniforms(job_generator("job-1", seed), 8, cpu) for _ in range(2))
    assert torch.equal(first, again)
    other = uniforms(job_generator("job-2", None if seed is None else seed ^ 1), 8, cpu)
    assert not torch.equal(first, other)
