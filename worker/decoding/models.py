"""Loading a target and its tokenizer, and refusing what cannot be decoded exactly here."""

from __future__ import annotations

import inspect
import logging
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from alphaloop.errors import ConfigError, ModelError, UnsupportedModel
from alphaloop.settings import TaskSettings
from alphaloop.settings.models import TargetSettings
from worker.decoding.conversation import check_template
from worker.decoding.device import Placement, find_device
from worker.decoding.network.fused import VERSION as FUSED_VERSION
from worker.decoding.network.fused import can_fuse
from worker.decoding.network.language_model import LanguageModel
from worker.decoding.sources import Weights, converted_folder, find_weights, publish_folder, working_folder
from worker.decoding.target import Target
from worker.engine import EngineIdentity
from worker.sampling import SamplingDefaults

log = logging.getLogger(__name__)

LONGEST_DEFAULT_CONTEXT: Final = 8192
_TRANSFORMERS: Final = f"transformers-{transformers.__version__}"
# These change the frequencies of all positions with the longest one seen, so a batch would depend on its neighbours.
UNSTABLE_ROPE: Final = frozenset({"dynamic", "longrope"})


#: Fields of a generation config that would change texts beside those of TaskSettings.
UNSUPPORTED_DEFAULTS: Final = (
    "no_repeat_ngram_size",
    "min_new_tokens",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "num_beams",
    "penalty_alpha",
    "guidance_scale",
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A transformers model on its device with its tokenizer, and which weights they are."""

    model: Any
    tokenizer: Any
    folder: Path
    revision: str


def load_target(settings: TargetSettings, placement: Placement | None = None) -> Target:
    """Load, check, and name what was loaded; raises ModelNotFound or UnsupportedModel.

    `placement` says where draft models will lie, which is part of the name; None: there are none. Without it, raises
    ConfigError for a device that is not there.
    """
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    placement = placement or Placement(find_device(settings.device))
    loaded = load_weights(settings.source, settings.revision, settings.dtype, placement.target)
    check_template(loaded.tokenizer)
    context_length = _context_length(settings, loaded.model.config)
    ends = end_tokens(loaded.model, loaded.tokenizer)
    defaults = sampling_defaults(loaded.model.generation_config, are_used=settings.use_generation_config)
    if sentence := defaults.sentence():
        log.info("generation_config.json of the model: %s", sentence, extra={"action": "sampling_defaults"})
    model = LanguageModel(loaded.model, context_length, gpu_kernels=settings.gpu_kernels)
    library = f"fused{FUSED_VERSION}-torch-{torch.__version__}" if model.is_fused else _TRANSFORMERS
    if model.is_recorded:
        library += "-recorded"
    identity = EngineIdentity(
        engine=f"{library}-{settings.dtype}",
        target=settings.name,
        target_revision=loaded.revision,
        dtype=settings.dtype,
        device=placement.name,
        context_length=context_length,
        host=socket.gethostname(),
    )
    return Target(model, loaded.tokenizer, identity, ends, defaults)


def load_weights(source: str, revision: str | None, dtype: str, device: torch.device) -> Loaded:
    """Load a model that the slot cache can serve; raises ModelNotFound or UnsupportedModel."""
    weights = find_weights(source, revision)
    # Bars on a server are noise between lines of its log, which may be JSON.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        folder = _dense_copy(weights, dtype) if weights.is_gguf else weights.path
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, clean_up_tokenization_spaces=False)
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as error:
        raise UnsupportedModel(f"{source}: {error}") from error
    refuse_unsupported(model)
    return Loaded(model.to(device).eval(), tokenizer, folder, weights.revision)


def refuse_unsupported(model: Any) -> None:
    """Raise UnsupportedModel for a model whose attention the slot cache and its mask would not reproduce."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    # One dictionary, or one for each kind of layer.
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if (rope_type := part.get("rope_type")) in UNSTABLE_ROPE:
            raise UnsupportedModel(f"rope type {rope_type} makes a text depend on the others in its batch")
    if can_fuse(config):
        return
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or (not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None)):
        raise UnsupportedModel(
            f"expected full attention in every layer of {config.model_type}, "
            f"found {', '.join(sorted(kinds)) or 'a sliding window'}"
        )
    if config.is_encoder_decoder or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"expected a decoder-only language model, found {config.model_type}")


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a text, as the generation config, the config and the tokenizer name them."""
    found: set[int] = set()
    for named in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        found.update(named if isinstance(named, list) else [] if named is None else [named])
    return frozenset(found)


def sampling_defaults(config: Any, *, are_used: bool) -> SamplingDefaults:
    """What a generation config says of sampling, as transformers reads it: it draws only where `do_sample` is true.

    Raises ConfigError where jobs are to take settings that no job may have.
    """
    names = ("temperature", "top_p", "top_k", "min_p") if config.do_sample else ()
    found = {name: getattr(config, name, None) for name in (*names, "repetition_penalty")}
    suggested = {name: value for name, value in found.items() if value is not None}
    if config.do_sample:
        suggested = {"temperature": 1.0, **suggested}
    try:
        checked = TaskSettings.model_validate(suggested)
    except ValidationError as error:
        if are_used:
            wrong = error.errors(include_url=False)[0]
            raise ConfigError(
                f"models.target.use_generation_config: {wrong['loc'][0]} of the model's generation_config.json: "
                f"{wrong['msg']}",
                hint="leave the setting out, and write what you want in [tasks.NAME]",
            ) from error
    else:
        suggested = {name: getattr(checked, name) for name in suggested}
    unsupported = tuple(name for name in UNSUPPORTED_DEFAULTS if getattr(config, name, None) not in (None, 0, 1, []))
    return SamplingDefaults(suggested, unsupported, are_used)


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
