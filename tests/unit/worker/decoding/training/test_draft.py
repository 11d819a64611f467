"""Cutting a draft out of a target, its head to a vocabulary, and writing it down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alphaloop.errors import UnsupportedModel
from worker.decoding.device import find_device
from worker.decoding.drafters.draft_vocabulary import read_draft_vocabulary, write_draft_vocabulary
from worker.decoding.models import load_weights
from worker.decoding.sources import DRAFT_VOCABULARY, find_weights
from worker.decoding.training.distil import cut_draft, num_layers, save_draft

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6]])


def target_of(folder: Path) -> Any:
    return load_weights(str(folder), None, "float64", find_device("cpu"))


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_draft_of_all_layers_is_the_target(tiny_models: dict[str, Path], family: str) -> None:
    target = target_of(tiny_models[family]).model
    draft = cut_draft(target, (0, 1))
    torch.testing.assert_close(logits_of(draft).double(), logits_of(target), atol=1e-3, rtol=1e-3)
    trained = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".layers." in name for name in trained)
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.float32}


def test_a_text_model_inside_of_another_is_refused() -> None:
    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": 8,
        "vocab_size": 8,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    config = transformers.Gemma3Config(text_config=sizes)
    with torch.device("meta"):
        target = transformers.AutoModelForCausalLM.from_config(config)
    assert num_layers(target) == 3
    with pytest.raises(UnsupportedModel, match="gemma3 cannot be taken out: expected a text model"):
        cut_draft(target, (0, 1))


def test_a_draft_keeps_the_layers_chosen_and_copies_them(tiny_models: dict[str, Path]) -> None:
    target = target_of(tiny_models["llama"]).model
    draft = cut_draft(target, (1,))
    assert draft.config.num_hidden_layers == 1
    name = "self_attn.q_proj.weight"
    taken, given = draft.model.layers[0].get_parameter(name), target.model.layers[1].get_parameter(name)
    torch.testing.assert_close(taken.double(), given, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        taken.zero_()
    assert bool(given.detach().any())


def test_a_saved_draft_is_a_plain_model_that_computes_the_same(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    loaded = target_of(tiny_models["qwen3"])
    draft = cut_draft(loaded.model, (0,))
    with torch.no_grad():
        draft.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    save_draft(draft, loaded.tokenizer, tmp_path, torch.float64)
    before = find_weights(str(tmp_path)).revision
    write_draft_vocabulary(tmp_path, torch.tensor([1, 5]))
    again = target_of(tmp_path)
    assert find_weights(str(tmp_path)).revision != before, "another vocabulary is another draft"
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"], "vLLM reads all of these"
    assert again.model.config.num_hidden_layers == 1
    assert again.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
    torch.testing.assert_close(logits_of(again.model), logits_of(draft).double(), atol=1e-3, rtol=1e-3)
    assert logits_of(draft).dtype == torch.float32


def test_a_vocabulary_comes_back_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    assert read_draft_vocabulary(tmp_path) is None
    write_draft_vocabulary(tmp_path, torch.tensor([2, 3, 9]))
    found = read_draft_vocabulary(tmp_path)
    assert found is not None
    assert found.tolist() == [2, 3, 9]
    for wrong in (torch.tensor([3, 2]), torch.tensor([2, 2]), torch.tensor([-1, 2]), torch.tensor([[1, 2]])):
        write_draft_vocabulary(tmp_path, wrong)
        with pytest.raises(UnsupportedModel, match=DRAFT_VOCABULARY):
            read_draft_vocabulary(tmp_path)
    (tmp_path / DRAFT_VOCABULARY).write_bytes(b"no JSON")
    with pytest.raises(UnsupportedModel, match=DRAFT_VOCABULARY):
        read_draft_vocabulary(tmp_path)
