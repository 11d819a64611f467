"""A device that is no CPU: `meta`, like a GPU, refuses what lies elsewhere, and needs no kernels of a CPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers

from tests.fixtures.models import FUSED
from worker.decoding.network.fused import FusedDecoder
from worker.decoding.network.passes import Read, plan_pass
from worker.decoding.network.slots import SlotCache


@pytest.mark.parametrize("family", FUSED)
@torch.inference_mode()
def test_a_plain_pass_mixes_nothing_of_the_host_with_what_is_on_the_device(
    tiny_models: dict[str, Path], family: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_models[family], dtype=torch.bfloat16)
    network = FusedDecoder(model.eval().to("meta"), 512)
    cache = SlotCache(network.kv_shape, 4, torch.device("meta"))
    cache.lengths = [3, 40, 7, 0]
    reads = [
        Read(0, [1, 2, 3], num_logits=3, parents=[-1, 0, 0]),
        Read(2, [5]),
        Read(1, [6] * 40),
        Read(3, [4] * 20, num_logits=2),
    ]
    logits = network(cache, plan_pass(cache, reads, network.window))
    assert (logits.device.type, logits.shape) == ("meta", (7, network.num_outputs))


def test_a_device_that_is_no_cpu_needs_no_numba() -> None:
    """In a process of its own, in which numba and LLVM cannot be imported."""
    program = """
        import sys
        sys.modules["numba"] = sys.modules["llvmlite"] = None
        import torch, transformers
        from worker.decoding import load, measuring
        from worker.decoding.network.fused import FusedDecoder
        from worker.decoding.network.passes import Read, plan_pass
        from worker.decoding.network.slots import SlotCache
        from worker.decoding.verification import verdicts
        shape = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16,
        )
        network = FusedDecoder(transformers.LlamaForCausalLM(shape).to("meta"), 64)
        cache = SlotCache(network.kv_shape, 1, torch.device("meta"))
        with torch.inference_mode():
            print(tuple(network(cache, plan_pass(cache, [Read(0, [1, 2])], None)).shape))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=170, check=False
    )
    assert (ran.stdout, ran.returncode) == ("(1, 64)\n", 0), ran.stderr
