"""The figures of docs/guides/gpus.md, computed from the models' configs by the functions that a worker uses."""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from alphaloop.settings.models import DraftModelDrafterSettings, ModelSettings
from worker.decoding.device import pass_bytes
from worker.decoding.network.kv_layout import KvShape
from worker.decoding.pairing import DeviceRoom, ModelFacts, _shapes, memory_finding, shown_bytes
from worker.engine import target_limit

GUIDE: Final = (Path(__file__).parents[5] / "docs/guides/gpus.md").read_text(encoding="utf-8")
CONTEXT: Final = 8192
#: What the models' config.json say: hidden size, intermediate size, layers, heads, key/value heads, head size, rows of
#: the embeddings, and whether the head shares them.
CONFIGS: Final[dict[str, tuple[type[Any], int, int, int, int, int, int, int, bool]]] = {
    "Qwen2.5 0.5B": (transformers.Qwen2Config, 896, 4864, 24, 14, 2, 64, 151_936, True),
    "Qwen2.5 1.5B": (transformers.Qwen2Config, 1536, 8960, 28, 12, 2, 128, 151_936, True),
    "Qwen2.5 7B": (transformers.Qwen2Config, 3584, 18944, 28, 28, 4, 128, 152_064, False),
    "Qwen2.5 14B": (transformers.Qwen2Config, 5120, 13824, 48, 40, 8, 128, 152_064, False),
    "Qwen2.5 32B": (transformers.Qwen2Config, 5120, 27648, 64, 40, 8, 128, 152_064, False),
    "Llama 3.1 8B": (transformers.LlamaConfig, 4096, 14336, 32, 32, 8, 128, 128_256, False),
    "Llama 3.1 70B": (transformers.LlamaConfig, 8192, 28672, 80, 64, 8, 128, 128_256, False),
    "Llama 3.2 1B": (transformers.LlamaConfig, 2048, 8192, 16, 32, 8, 64, 128_256, True),
    "Qwen3 8B": (transformers.Qwen3Config, 4096, 12288, 36, 32, 8, 128, 151_936, False),
    "Qwen3 0.6B": (transformers.Qwen3Config, 1024, 3072, 28, 16, 8, 128, 151_936, True),
}


@functools.cache
def facts(name: str) -> ModelFacts:
    """In bfloat16, with what memory does not depend on left out."""
    made, hidden, between, layers, heads, kv_heads, head_dim, rows, is_tied = CONFIGS[name]
    config = made(
        hidden_size=hidden,
        intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=rows,
        tie_word_embeddings=is_tied,
    )
    num_parameters = sum(weight.numel() for weight in _shapes(config, None).parameters())
    return ModelFacts(
        source=name,
        family=config.model_type,
        refusal=None,
        tokens={},
        num_rows=rows,
        end_tokens=frozenset(),
        bos_token=None,
        pad_token=None,
        chat_template=None,
        num_parameters=num_parameters,
        num_parameters_read=num_parameters,
        dtype="bfloat16",
        itemsize=2,
        kv_bytes_per_token=KvShape.of(config, torch.bfloat16).bytes_per_token,
        pass_bytes_per_row=pass_bytes(rows, 1),
        context_length=CONTEXT,
    )


def full_slots(target: ModelFacts, draft: ModelFacts, gpu: int, *, is_beside: bool) -> str:
    """Sequences of 8,192 tokens for which a worker takes memory of a GPU with `gpu` bytes; – if weights do not fit."""
    left = gpu - target.weight_bytes - (draft.weight_bytes if is_beside else 0)
    if left <= 0:
        return "–"
    limit = target_limit(left, target.kv_bytes_per_token, draft.kv_bytes_per_token if is_beside else 0)
    return str(limit // target.kv_bytes_per_slot)


def rows_of(header: str) -> list[list[str]]:
    lines = GUIDE[GUIDE.index(header) :].splitlines()
    table = lines[2 : next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_table_of_models_is_what_their_configs_give() -> None:
    rows = rows_of("| model | parameters |")
    assert [row[0] for row in rows] == list(CONFIGS)
    for name, parameters, weights, arithmetic, per_token, per_slot in rows:
        model = facts(name)
        _, _, _, layers, _, kv_heads, head_dim, _, _ = CONFIGS[name]
        assert parameters == f"{model.num_parameters:,}"
        assert weights == shown_bytes(model.weight_bytes)
        assert arithmetic == f"2 · {layers} · {kv_heads} · {head_dim} · 2"
        assert per_token == f"{2 * layers * kv_heads * head_dim * 2:,}" == f"{model.kv_bytes_per_token:,}"
        assert per_slot == shown_bytes(model.kv_bytes_per_slot)


def test_the_table_of_pairs_is_what_a_worker_would_do() -> None:
    rows = rows_of("| pair ")
    sizes = [int(size) for size in re.findall(r"(\d+) GB", GUIDE[GUIDE.index("| pair ") :].splitlines()[0])]
    assert len(rows) == 6
    for pair, *cells in rows:
        target, draft = (facts(name) for name in pair.split(" + "))
        assert cells == [
            f"{full_slots(target, draft, size * 10**9, is_beside=True)} → "
            f"{full_slots(target, draft, size * 10**9, is_beside=False)}"
            for size in sizes
        ], pair


@pytest.mark.parametrize(
    ("layout", "draft_room"), [("together", None), ("apart", DeviceRoom("cuda:1", 16 * 10**9))], ids=str
)
def test_the_worked_example_is_what_check_pair_says(layout: str, draft_room: DeviceRoom | None) -> None:
    blocks = re.findall(r"^```text\n(memory .*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    shown = " ".join(blocks[0 if layout == "together" else 1].split())
    room = DeviceRoom("cuda:0", 24 * 10**9)
    found = memory_finding(facts("Qwen2.5 7B"), facts("Qwen2.5 0.5B"), 16, 5, room, draft_room or room)
    assert shown == f"memory {found.verdict} {found.sentence}"


def test_its_settings_are_settings() -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    read = ModelSettings.model_validate(tomllib.loads(block)["models"])
    small = read.drafters["small"]
    assert isinstance(small, DraftModelDrafterSettings)
    assert (read.target.device, small.device) == ("cuda:0", "cuda:1")


def test_what_crosses_is_what_the_guide_says() -> None:
    (said,) = re.findall(r"5 · 152,064 · 8 bytes = ([\d.]+ MB)", GUIDE)
    assert said == shown_bytes(5 * facts("Qwen2.5 7B").num_rows * torch.float64.itemsize)


def test_the_example_of_the_workers_limit_is_its_arithmetic() -> None:
    target, draft = facts("Qwen2.5 7B"), facts("Qwen2.5 0.5B")
    for beside in (True, False):
        left = 24 * 10**9 - target.weight_bytes - beside * draft.weight_bytes
        limit = target_limit(left, target.kv_bytes_per_token, beside * draft.kv_bytes_per_token)
        said = f"{shown_bytes(left)} are left, the target's keys and values may take {shown_bytes(limit)}"
        assert said in " ".join(GUIDE.split())
