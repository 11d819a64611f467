"""What a pass computes with lies on the model's device: `meta`, like a GPU, refuses what lies elsewhere."""

from __future__ import annotations

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
