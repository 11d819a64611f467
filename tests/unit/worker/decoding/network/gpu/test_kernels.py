"""Triton's kernels beside torch: on a GPU, or without one in Triton's interpreter where Triton is installed."""

from __future__ import annotations

import importlib.util
import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fixtures.recording import ReferenceAttention
from worker.decoding.network.groups import Read
from worker.decoding.network.kv_shape import KvShape
from worker.decoding.network.operations import ACTIVATIONS, Heads
from worker.decoding.network.slots import SlotCache
from worker.decoding.network.static_inputs import InputBlock, StaticShape
from worker.decoding.network.torch_operations import TorchOperations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Triton's interpreter multiplies the bits of bfloat16 as if they were whole numbers.
NARROW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which torch for GPUs brings"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # what is behind the last token is anything at all
]


@pytest.fixture(scope="module")
def gpu() -> Any:
    """The module of the kernels' operations."""
    if DEVICE.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are made
    from worker.decoding.network.gpu import operations

    return operations


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_norms_and_gates(gpu: Any, rng: random.Random, dtype: torch.dtype, limit: float) -> None:
    made, plain = gpu.GpuOperations(num_processors=1), TorchOperations()
    for num_rows, size in ((1, 192), (3, 576), (0, 192)):
        x = _random(rng, num_rows, size).to(DEVICE, dtype)
        weight = _random(rng, size).to(DEVICE, dtype)
        assert _distance(made.norm(x, weight, 1e-6), plain.norm(x, weight, 1e-6)) <= limit
        for activation in ACTIVATIONS:
            assert _distance(made.gate(x, activation), plain.gate(x, activation)) <= limit


@pytest.mark.parametrize("num_processors", [1, 8])
@pytest.mark.parametrize(("window", "has_norms", "shared"), [(None, False, 2), (6, True, 1), (6, False, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@torch.inference_mode()
def test_attention_over_ragged_reads_chains_and_trees(
    gpu: Any,
    rng: random.Random,
    num_processors: int,
    window: int | None,
    has_norms: bool,
    shared: int,
    dtype: torch.dtype,
) -> None:
    num_keys, head_dim = 2, 16
    heads = Heads(
        num_queries=num_keys * shared,
        num_keys=num_keys,
        head_dim=head_dim,
        scaling=0.3,
        kind="full",
        is_local=window is not None,
        epsilon=1e-6,
        norms=_random(rng, num_keys * (shared + 1), head_dim).to(DEVICE, dtype) if has_norms else None,
    )
    angles = _random(rng, 512, head_dim // 2)
    rotations = {"full": torch.polar(torch.ones_like(angles), angles)}
    cache = SlotCache(KvShape(1, num_keys, head_dim, dtype), 4, DEVICE)
    cache.lengths = [0, rng.randrange(1, 5), 120 + rng.randrange(20), 200]
    cache.reserve(dict.fromkeys(range(4), 300))
    cache.layers[0].copy_(_random(rng, *cache.layers[0].shape))
    before = cache.layers[0].clone()
    reads = [Read(2, [1, 2, 3, 4], parents=[-1, 0, 0, 1]), Read(0, [5]), Read(1, [6, 7, 8])]
    shape = StaticShape.of(reads)
    assert shape is not None
    block, plain = InputBlock(1, DEVICE), InputBlock(1, torch.device("cpu"))
    block.fill(shape, reads, cache)
    qkv = _random(rng, shape.num_tokens, num_keys * (shared + 2) * head_dim).to(dtype)
    operations = gpu.GpuOperations(num_processors)
    table = {kind: one.to(DEVICE) for kind, one in rotations.items()}
    attention = operations.static_attention(block.views(shape), table, window)
    seen = attention(qkv.to(DEVICE, copy=True), block.views(shape).addresses, heads)[:8]

    # The reference reads and writes a cache of its own, in float64.
    other = SlotCache(KvShape(1, num_keys, head_dim, torch.float64), 4, torch.device("cpu"))
    other.lengths = list(cache.lengths)
    other.reserve(dict.fromkeys(range(4), 300))
    other.layers[0].copy_(before)
    plain.fill(shape, reads, other)
    inputs = plain.views(shape)
    exact = Heads(
        heads.num_queries,
        num_keys,
        head_dim,
        heads.scaling,
        heads.kind,
        heads.is_local,
        None if heads.norms is None else heads.norms.cpu().double(),
        heads.epsilon,
    )
    expected = ReferenceAttention(inputs, {"full": rotations["full"].to(torch.complex128)}, window)(
        qkv.double(), inputs.addresses, exact
    )[:8]
    limit = 1e-5 if dtype == torch.float32 else 0.02
    assert _distance(seen, expected) <= limit
    assert _distance(cache.layers[0], other.layers[0]) <= limit
    written = torch.zeros_like(before, dtype=torch.bool)
    for read in reads:
        begin = cache.lengths[read.slot]
        written[read.slot, :, begin : begin + len(read.token_ids)] = True
    assert torch.equal(cache.layers[0][~written], before[~written]), "nothing else is written"


def test_float64_and_odd_heads_are_left_to_torch(gpu: Any) -> None:
    assert torch.float64 not in gpu.DTYPES
    assert 80 not in gpu.HEAD_DIMS


def _random(rng: random.Random, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))


def _distance(seen: Tensor, expected: Tensor) -> float:
    seen, expected = seen.double().cpu(), expected.double().cpu()
    if not expected.numel():
        return 0.0 if seen.shape == expected.shape else torch.inf
    return float((seen - expected).norm() / expected.norm())
