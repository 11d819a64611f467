"""Loading a target and its tokenizer, and refusing what cannot be decoded exactly here."""

from __future__ import annotations

import inspect
import logging
import shutil
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from alphaloop.errors import ModelError, UnsupportedModel
from alphaloop.settings.model import TargetSettings
from worker.decoding.sources import Weights, converted_folder, find_weights, publish_folder, working_folder
from worker.decoding.target import Target
from worker.engine import EngineIdentity

log = logging.getLogger(__name__)

LONGEST_DEFAULT_CONTEXT: Final = 8192
# These change the frequencies of all positions with the longest one seen, so a batch would depend on its neighbours.
UNSTABLE_ROPE: Final = frozenset({"dynamic", "longrope"})


def load_target(settings: TargetSettings) -> Target:
    """Load, check, and name what was loaded; raises ModelNotFound or UnsupportedModel."""
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    device = _device(settings.device)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    weights = find_weights(settings.source, settings.revision)
    # Bars on a server are noise between lines of its log, which may be JSON.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        folder = _dense_copy(weights, settings.dtype) if weights.is_gguf else weights.path
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", use_safetensors=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, clean_up_tokenization_spaces=False)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as error:
        raise UnsupportedModel(f"{settings.source}: {error}") from error
    refuse_unsupported(model)
    identity = EngineIdentity(
        engine=f"transformers-{transformers.__version__}-{settings.dtype}",
        target=settings.name,
        target_revision=weights.revision,
        dtype=settings.dtype,
        device=_device_name(device),
        context_length=_context_length(settings, model.config),
    )
    target = Target(model.to(device).eval(), tokenizer, identity, end_tokens(model, tokenizer))
    target.check_slots()
    return target


def refuse_unsupported(model: Any) -> None:
    """Raise UnsupportedModel for a model whose attention the slot cache and its mask would not reproduce."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or (not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None)):
        raise UnsupportedModel(
            f"expected full attention in every layer of {config.model_type}, "
            f"found {', '.join(sorted(kinds)) or 'a sliding window'}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in UNSTABLE_ROPE:
        raise UnsupportedModel(f"rope type {rope['rope_type']} makes a text depend on the others in its batch")
    if config.is_encoder_decoder or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"expected a decoder-only language model, found {config.model_type}")


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a text, as the generation config, the config and the tokenizer name them."""
    found: set[int] = set()
    for named in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        found.update(named if isinstance(named, list) else [] if named is None else [named])
    return frozenset(found)


def _dense_copy(weights: Weights, dtype: str) -> Path:
    folder = converted_folder(weights, dtype)
    if (folder / "config.json").exists():
        return folder
    log.info("converting %s to %s safetensors, once: %s", weights.path.name, dtype, folder)
    working = working_folder()
    try:
        _convert(weights.path, getattr(torch, dtype), working)
        publish_folder(working, folder)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return folder


def _convert(file: Path, dtype: torch.dtype, folder: Path) -> None:
    parent, name = str(file.parent), file.name
    packed = AutoModelForCausalLM.from_pretrained(
        parent, gguf_file=name, dtype=dtype, quantization_config=GgufConfig(dequantize=True), trust_remote_code=False
    )
    # The unpacked model still calls itself quantized; a dense one with its weights is what can be saved and loaded.
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    dense: Any = AutoModelForCausalLM.from_config(type(packed.config)(**settings), dtype=dtype)  # type: ignore[no-untyped-call]
    dense.load_state_dict(packed.state_dict())
    dense.generation_config = packed.generation_config
    dense.save_pretrained(folder)
    AutoTokenizer.from_pretrained(parent, gguf_file=name, trust_remote_code=False).save_pretrained(folder)


def _context_length(settings: TargetSettings, config: Any) -> int:
    longest = getattr(config, "max_position_embeddings", None) or LONGEST_DEFAULT_CONTEXT
    if settings.context_length is not None and settings.context_length > longest:
        raise UnsupportedModel(
            f"models.target.context_length is {settings.context_length}; the model was made for {longest} positions"
        )
    return settings.context_length or min(longest, LONGEST_DEFAULT_CONTEXT)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedModel(f"models.target.device is {name!r}: {error}", hint="auto, cpu, cuda, cuda:1") from error
    return device


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}-{torch.get_num_threads()}-threads"
