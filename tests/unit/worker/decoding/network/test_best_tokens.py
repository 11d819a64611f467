"""The likeliest tokens by the kernel and by torch: the first of equals, none where logits cannot be compared."""

from __future__ import annotations

import math
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from worker.decoding.network.operations import best_tokens

DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 2048, 2049, 5000])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 9])
def test_the_first_of_the_largest(dtype: torch.dtype, size: int, num_rows: int, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    for spread in (0.01, 3.0):  # with many equals, and with few
        logits = (torch.randn((num_rows, size), generator=generator) * spread - 1).to(dtype)
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert best_tokens(logits) == (expected, True)
    whole = torch.randn((size, num_rows), generator=generator).to(dtype)
    assert best_tokens(whole.T) == best_tokens(whole.T.contiguous())


@given(st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_of_any_numbers(numbers: list[float]) -> None:
    logits = torch.tensor([numbers]).bfloat16()
    ((token,), are_finite) = best_tokens(logits)
    assert are_finite
    row = logits.tolist()[0]
    assert row[token] == max(row)
    assert all(number < max(row) or math.copysign(1, number) < 0 for number in row[:token])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [math.nan, -math.nan, math.inf])
def test_logits_that_are_not_finite(dtype: torch.dtype, broken: float, rng: random.Random) -> None:
    logits = torch.zeros((3, 5000), dtype=dtype)
    assert best_tokens(logits)[1]
    logits[rng.randrange(3), rng.randrange(5000)] = broken
    assert not best_tokens(logits)[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_are_ruled_out(dtype: torch.dtype) -> None:
    """A logit of minus infinity is a token that cannot be, unless there is no other."""
    logits = torch.full((2, 300), -math.inf, dtype=dtype)
    assert not best_tokens(logits)[1]
    logits[:, 7] = torch.tensor([-3e38, 2.0]).to(dtype)
    assert best_tokens(logits) == ([7, 7], True)
