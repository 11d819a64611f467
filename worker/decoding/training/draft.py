"""A draft made from a target: some of its layers, and a copy of everything else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from alphaloop.errors import UnsupportedModel
from worker.decoding.models import attention_of
from worker.decoding.text_facts import text_config

# `model.layers.7.…` of Llama, Qwen, Gemma, Mistral …, `transformer.h.7.…` of GPT-2.
_LAYER: Final = re.compile(r"^(.*\.(?:layers|h)\.)(\d+)(\..+)$")


def cut_draft(target: Any, layers: Sequence[int]) -> Any:
    """A model of `target`'s kind with these of its layers, ascending, and copies of everything else; in float32.

    Only the layers can be trained: embeddings, final norm and head require no gradient. The head is never tied to the
    embeddings, so that a map can be folded into it. Raises UnsupportedModel if the target's layers differ in kind.
    """
    if text_config(target.config) is not target.config:
        raise UnsupportedModel(
            f"layers of {target.config.model_type} cannot be taken out: expected a text model, found one of several "
            f"models in a checkpoint"
        )
    settings = {**target.config.to_dict(), "tie_word_embeddings": False}
    if kinds := settings.get("layer_types"):
        settings["layer_types"] = [kinds[layer] for layer in layers]
    settings["num_hidden_layers"] = len(layers)
    # Qwen2 stores the number of its first sliding layer. It must not make a layer of the draft slide.
    if settings.get("max_window_layers") is not None:
        settings["max_window_layers"] = len(layers)
    try:
        draft = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            type(target.config)(**settings), dtype=torch.float32, attn_implementation=attention_of(target.config)
        )
        draft.load_state_dict(_cut_state(target.state_dict(), layers))
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UnsupportedModel(f"layers of {target.config.model_type} cannot be taken out: {error}") from error
    draft.generation_config = target.generation_config
    for name, parameter in draft.named_parameters():
        parameter.requires_grad_(_LAYER.match(name) is not None)
    return draft.eval()


def num_layers(model: Any) -> int:
    """Layers of a model."""
    return int(text_config(model.config).num_hidden_layers)


def save_draft(draft: Any, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write a plain model folder in `dtype`. Does not change the given draft."""
    state = {name: tensor.to(dtype) for name, tensor in draft.state_dict().items()}
    copy = AutoModelForCausalLM.from_config(draft.config, dtype=dtype)  # type: ignore[no-untyped-call]
    copy.load_state_dict(state)
    copy.generation_config = draft.generation_config
    copy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _cut_state(state: dict[str, torch.Tensor], layers: Sequence[int]) -> dict[str, torch.Tensor]:
    place = {layer: position for position, layer in enumerate(layers)}
    kept = {}
    for name, tensor in state.items():
        match = _LAYER.match(name)
        if match is None:
            kept[name] = tensor
        elif int(match[2]) in place:
            kept[f"{match[1]}{place[int(match[2])]}{match[3]}"] = tensor
    return kept
