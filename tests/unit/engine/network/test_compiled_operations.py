"""Compiled kernels beside torch's calls: the same numbers, in both dtypes, for every kind of read and of heads.

Long reads are as in float32, and the same however a text is cut.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.network.compiled import CompiledOperations, PlacedReads, can_compile, layer_arguments
from engine.network.fused import operations_for
from engine.network.kernels import threads
from engine.network.kernels.attending import attends_in_tiles
from engine.network.kernels.attention import wide_kernel
from engine.network.kernels.multiplying import has_pair_products
from engine.network.kv_layout import KvShape, to_paired, to_plain
from engine.network.operations import ACTIVATIONS, Heads, TorchOperations, attend
from engine.network.passes import WIDEST_SHARED, Read, plan_pass
from engine.network.slots import SlotCache

NUM_KEYS, NUM_QUERIES = 2, 4
#: One that is attended to token by token in every dtype, and one in tiles where there are kernels for them.
HEAD_DIMS = [16, 64]
NUM_POSITIONS = 256
WINDOW = 24
CPU = torch.device("cpu")
#: Of the results' norm: float32 rounds alike in both, torch rounds bfloat16 more often than the kernels do.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
DTYPES = list(TOLERANCE)

pytestmark = pytest.mark.skipif(not can_compile(torch.float32), reason="no OpenMP runtime to call")
paired = pytest.mark.skipif(not has_pair_products(), reason="the processor has no products of bfloat16 pairs")


def noise(rng: random.Random, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_alike(found: Tensor, expected: Tensor) -> None:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert error < TOLERANCE[found.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_norms_and_gates(dtype: torch.dtype, num_rows: int, rng: random.Random) -> None:
    """40 rows of 1,000 are shared by threads; nothing is a multiple of a vector."""
    x, weight = noise(rng, num_rows, 1000, dtype=dtype), noise(rng, 1000, dtype=dtype)
    ours, torchs = CompiledOperations(dtype), TorchOperations()
    assert_alike(ours.norm(x, weight, 1e-5), torchs.norm(x, weight, 1e-5))
    for activation in ACTIVATIONS:
        assert_alike(ours.gate(10 * x, activation), torchs.gate(10 * x, activation))


def test_a_gate_far_from_zero_is_finite() -> None:
    x = torch.tensor([[-1e4, -100.0, -0.0, 0.0, 100.0, 1e4] + [1.0] * 6], dtype=torch.bfloat16)
    for activation in ACTIVATIONS:
        found = CompiledOperations(torch.bfloat16).gate(x, activation)
        assert torch.equal(found, TorchOperations().gate(x, activation))


def reads(rng: random.Random, cache: SlotCache) -> list[Read]:
    """Ragged: chains, trees, a piece of a prompt, and a slot in between that is not read."""
    slots = [cache.acquire() for _ in range(6)]
    found = [Read(slots[0], [1]), Read(slots[1], [1] * rng.randint(2, WIDEST_SHARED))]
    width = rng.randint(2, 12)
    found.append(Read(slots[3], [1] * width, parents=[rng.randint(-1, token - 1) for token in range(width)]))
    found.append(Read(slots[4], [1] * (WIDEST_SHARED + rng.randint(1, 20))))
    found.append(Read(slots[5], [1] * 3))
    for slot in slots[:5]:
        cache.lengths[slot] = rng.randint(0, 90)
    rng.shuffle(found)
    return found


def heads(rng: random.Random, dtype: torch.dtype, head_dim: int, *, is_local: bool, is_normed: bool) -> Heads:
    norms = noise(rng, NUM_QUERIES + NUM_KEYS, head_dim, dtype=dtype) if is_normed else None
    return Heads(NUM_QUERIES, NUM_KEYS, head_dim, 0.3, "some", is_local, norms, 1e-6)


def rotations(dtype: torch.dtype, head_dim: int) -> dict[str, Tensor]:
    angles = torch.arange(NUM_POSITIONS)[:, None] * 0.7 ** torch.arange(head_dim // 2)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    return {"some": torch.polar(torch.ones_like(angles), angles).to(torch.complex(*torch.zeros(2, dtype=real)).dtype)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("is_local", "is_normed"), [(False, False), (True, True)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_of_ragged_reads(
    dtype: torch.dtype, is_local: bool, is_normed: bool, head_dim: int, rng: random.Random
) -> None:
    cache = SlotCache(KvShape(1, NUM_KEYS, head_dim, dtype), 6, CPU)
    plan = plan_pass(cache, reads(rng, cache), WINDOW)
    of_layer = heads(rng, dtype, head_dim, is_local=is_local, is_normed=is_normed)
    qkv = noise(rng, plan.num_tokens, (NUM_QUERIES + 2 * NUM_KEYS) * head_dim, dtype=dtype)
    before = noise(rng, *cache.layers[0].shape, dtype=dtype)
    results = []
    is_paired = attends_in_tiles(dtype, head_dim)
    for operations in (CompiledOperations(dtype), TorchOperations()):
        is_other = is_paired and isinstance(operations, CompiledOperations)
        held = to_paired(before) if is_other else before.clone()
        attention = operations.attention(plan, rotations(dtype, head_dim), WINDOW)
        seen = attention(qkv.clone(), held, of_layer)
        results.append((seen, to_plain(held) if is_other else held))
    (found, found_held), (expected, expected_held) = results
    assert_alike(found, expected)
    assert_alike(found_held, expected_held)
    elsewhere = torch.ones(before.numel() // head_dim, dtype=torch.bool)
    elsewhere[plan.stored] = False
    assert torch.equal(found_held.view(-1, head_dim)[elsewhere], before.view(-1, head_dim)[elsewhere])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_token_attends_alike_alone_and_among_others(
    dtype: torch.dtype, num_threads: int, head_dim: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: a text read token by token, and in one pass beside another sequence."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    of_layer = heads(rng, dtype, head_dim, is_local=False, is_normed=True)
    num, length = rng.randint(2, WIDEST_SHARED), rng.randint(0, 150)
    qkv = noise(rng, num + 5, (NUM_QUERIES + 2 * NUM_KEYS) * head_dim, dtype=dtype)
    operations = CompiledOperations(dtype)

    def attended_by(cache: SlotCache, wanted: list[Read], rows: Tensor) -> Tensor:
        plan = plan_pass(cache, wanted, None)
        return operations.attention(plan, rotations(dtype, head_dim), None)(rows.clone(), cache.layers[0], of_layer)

    def filled(num_slots: int) -> SlotCache:
        shape = KvShape(1, NUM_KEYS, head_dim, dtype, is_paired=attends_in_tiles(dtype, head_dim))
        cache = SlotCache(shape, num_slots, CPU, most_positions=length + num)
        cache.reserve(dict.fromkeys(range(num_slots), length + num))
        cache.layers[0][:] = 0.5  # in both layouts
        return cache

    together = filled(2)
    slots = [together.acquire(), together.acquire()]
    together.lengths = [length, 7]
    in_one = attended_by(together, [Read(slots[0], [1] * num), Read(slots[1], [1] * 5)], qkv)
    alone = filled(1)
    slot = alone.acquire()
    for token in range(num):
        alone.lengths[slot] = length + token
        assert torch.equal(attended_by(alone, [Read(slot, [1])], qkv[token : token + 1])[0], in_one[token])


def test_without_an_openmp_runtime_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(1)
    assert isinstance(operations_for(weight, is_twice=False), CompiledOperations)
    assert isinstance(operations_for(weight.half(), is_twice=False), TorchOperations)
    monkeypatch.setattr(torch.backends.openmp, "is_available", lambda: False)
    threads.openmp.cache_clear()
    try:
        assert isinstance(operations_for(weight, is_twice=False), TorchOperations)
    finally:
        threads.openmp.cache_clear()


def attended(qkv: Tensor, held: Tensor, heads: Heads, *, length: int, window: int = 0) -> Tensor:
    """What the kernel finds for a read of all of `qkv` in slot 1, behind `length` tokens; `held` is plain."""
    read = Read(1, [1] * len(qkv), num_logits=1)
    cache = SlotCache(KvShape(1, heads.num_keys, heads.head_dim, torch.bfloat16), 2, CPU)
    cache.lengths = [0, length]
    reads = PlacedReads(plan_pass(cache, [read], None))
    seen = qkv.new_empty((len(qkv), heads.num_queries * heads.head_dim))
    paired = to_paired(held)
    reads.set_cache_layout(paired)
    told = layer_arguments(replace(heads, is_local=window > 0), torch.empty((0, heads.head_dim // 2, 2)), window)
    told.qkv, told.held, told.seen, told.of_pass = qkv.data_ptr(), paired.data_ptr(), seen.data_ptr(), reads.address
    wide_kernel(heads.head_dim, heads.num_queries // heads.num_keys)(told, torch.get_num_threads())
    return seen


def in_float32(qkv: Tensor, held: Tensor, heads: Heads, *, length: int, window: int | None) -> Tensor:
    cache = SlotCache(KvShape(1, heads.num_keys, heads.head_dim, torch.float32), 2, CPU)
    cache.lengths = [0, length]
    group = plan_pass(cache, [Read(1, [1] * len(qkv))], window).groups[0]
    queries = qkv.view(len(qkv), -1, heads.head_dim)[:, : heads.num_queries]
    return attend(queries.float(), held.float(), group, heads)


def drawn(rng: random.Random, heads: Heads, width: int, length: int) -> tuple[Tensor, Tensor]:
    qkv = noise(rng, width, (heads.num_queries + 2 * heads.num_keys) * heads.head_dim, dtype=torch.bfloat16)
    capacity = -(-(length + width) // 128) * 128
    return qkv, noise(rng, 2, 2 * heads.num_keys, capacity, heads.head_dim, dtype=torch.bfloat16)


@paired
@torch.inference_mode()
@pytest.mark.parametrize(("num_queries", "num_keys", "head_dim"), [(9, 3, 64), (4, 4, 96), (8, 1, 32), (4, 2, 128)])
@pytest.mark.parametrize("window", [None, 50])
def test_long_reads_are_as_in_float32(
    num_queries: int, num_keys: int, head_dim: int, window: int | None, rng: random.Random
) -> None:
    heads = Heads(num_queries, num_keys, head_dim, head_dim**-0.5, "some", window is not None, None, 1e-6)
    for _ in range(4):
        width, length = rng.randint(WIDEST_SHARED + 1, 200), rng.choice([0, 1, 63, 64, rng.randint(2, 300)])
        qkv, held = drawn(rng, heads, width, length)
        expected = in_float32(qkv, held, heads, length=length, window=window)
        found = attended(qkv, held, heads, length=length, window=window or 0)
        # Weights and results are rounded to bfloat16, eight bits each.
        assert float((found.float() - expected).norm() / expected.norm()) < 2**-8


@paired
@torch.inference_mode()
def test_what_lies_behind_a_text_counts_for_nothing(rng: random.Random) -> None:
    heads = Heads(2, 2, 64, 0.125, "some", False, None, 1e-6)
    qkv, held = drawn(rng, heads, 70, 20)
    before = attended(qkv, held, heads, length=20)
    held[:, :, 90:] = 1e30
    assert torch.equal(attended(qkv, held, heads, length=20), before)
