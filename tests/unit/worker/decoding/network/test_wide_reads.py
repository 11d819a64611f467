"""Long reads in compiled kernels: as in float32, for every size of heads, and the same however a text is cut."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from worker.decoding.network.compiled import PlacedReads, layer_arguments
from worker.decoding.network.kernels.attention import wide_kernel
from worker.decoding.network.kernels.multiplying import has_pair_products
from worker.decoding.network.kv_layout import KvShape, to_paired
from worker.decoding.network.operations import Heads, attend
from worker.decoding.network.passes import WIDEST_SHARED, Read, plan_pass
from worker.decoding.network.slots import SlotCache

CPU = torch.device("cpu")
BF16 = torch.bfloat16

pytestmark = pytest.mark.skipif(not has_pair_products(), reason="the processor has no products of bfloat16 pairs")


def attended(qkv: Tensor, held: Tensor, heads: Heads, *, length: int, window: int = 0) -> Tensor:
    """What the kernel finds for a read of all of `qkv` in slot 1, behind `length` tokens; `held` is plain."""
    read = Read(1, [1] * len(qkv), num_logits=1)
    cache = SlotCache(KvShape(1, heads.num_keys, heads.head_dim, BF16), 2, CPU)
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
    """The same by torch in float32."""
    cache = SlotCache(KvShape(1, heads.num_keys, heads.head_dim, torch.float32), 2, CPU)
    cache.lengths = [0, length]
    group = plan_pass(cache, [Read(1, [1] * len(qkv))], window).groups[0]
    queries = qkv.view(len(qkv), -1, heads.head_dim)[:, : heads.num_queries]
    return attend(queries.float(), held.float(), group, heads)


def noise(rng: random.Random, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))).to(BF16)


def drawn(rng: random.Random, heads: Heads, width: int, length: int) -> tuple[Tensor, Tensor]:
    qkv = noise(rng, width, (heads.num_queries + 2 * heads.num_keys) * heads.head_dim)
    capacity = -(-(length + width) // 128) * 128
    return qkv, noise(rng, 2, 2 * heads.num_keys, capacity, heads.head_dim)


@torch.inference_mode()
@pytest.mark.parametrize(("num_queries", "num_keys", "head_dim"), [(9, 3, 64), (4, 4, 96), (8, 1, 32), (4, 2, 128)])
@pytest.mark.parametrize("window", [None, 50])
def test_as_in_float32(num_queries: int, num_keys: int, head_dim: int, window: int | None, rng: random.Random) -> None:
    heads = Heads(num_queries, num_keys, head_dim, head_dim**-0.5, "some", window is not None, None, 1e-6)
    for _ in range(4):
        width, length = rng.randint(WIDEST_SHARED + 1, 200), rng.choice([0, 1, 63, 64, rng.randint(2, 300)])
        qkv, held = drawn(rng, heads, width, length)
        expected = in_float32(qkv, held, heads, length=length, window=window)
        found = attended(qkv, held, heads, length=length, window=window or 0)
        # Weights and results are rounded to bfloat16, eight bits each.
        assert float((found.float() - expected).norm() / expected.norm()) < 2**-8


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_token_attends_alike_however_its_text_is_cut(
    num_threads: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: read in one piece and in two."""
    heads = Heads(6, 2, 64, 0.125, "some", False, None, 1e-6)
    width, length = 150, rng.randint(0, 100)
    qkv, held = drawn(rng, heads, width, length)
    whole = attended(qkv, held, heads, length=length)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    cut = rng.randint(WIDEST_SHARED + 1, width - WIDEST_SHARED - 1)
    assert torch.equal(attended(qkv[:cut].contiguous(), held, heads, length=length), whole[:cut])
    assert torch.equal(attended(qkv[cut:].contiguous(), held, heads, length=length + cut), whole[cut:])


@torch.inference_mode()
def test_what_lies_behind_a_text_counts_for_nothing(rng: random.Random) -> None:
    heads = Heads(2, 2, 64, 0.125, "some", False, None, 1e-6)
    qkv, held = drawn(rng, heads, 70, 20)
    before = attended(qkv, held, heads, length=20)
    held[:, :, 90:] = 1e30
    assert torch.equal(attended(qkv, held, heads, length=20), before)
