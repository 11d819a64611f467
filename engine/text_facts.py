"""Every fact of a model that its config states, read from the config of its text model.

A checkpoint of the multimodal form (Gemma 3 of 4B and more) holds several models, and the fields of its outer config
are not those of the model that decodes. So loading, `check-pair` and training ask here, and read no config themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from alphaloop.errors import UnsupportedModel

LONGEST_DEFAULT_CONTEXT: Final = 8192
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
#: With these the frequencies of all positions depend on the longest one of a pass, once that passes a boundary.
_UNSTABLE_ROPE: Final = frozenset({"dynamic", "longrope"})
#: Fields that limit what a token sees. Only `sliding_window` is understood; these have nothing to do with it.
_LIMITS: Final = re.compile(r"(window|chunk|local_attention|index_topk)(?!.*_pattern$)")
_NO_LIMITS: Final = frozenset({"sliding_window", "max_window_layers", "use_sliding_window", "chunk_size_feed_forward"})


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What the config of a text model says."""

    model_type: str
    longest: int  #: positions that it was made for
    kinds: tuple[str, ...]  #: one a layer: FULL, SLIDING, or one that is not decoded here
    window: int | None  #: tokens that a sliding layer sees, the current one included; None without such layers
    has_kinds: bool  #: whether the config names the kind of each layer; otherwise all layers have one
    rope_boundary: int | None  #: positions up to which a rotation depends on its position only; None: always
    rope_type: str | None  #: which has that boundary
    refusal: str | None  #: why a model of this config cannot be decoded exactly here, whatever its context

    def refusal_at(self, context_length: int) -> str | None:
        """Why it cannot be decoded exactly with that context; None if it can."""
        if self.refusal is not None:
            return self.refusal
        if self.rope_boundary is not None and context_length > self.rope_boundary:
            return (
                f"rope type {self.rope_type} makes a text depend on the others in its batch beyond "
                f"{self.rope_boundary} positions, found a context of {context_length} (context_length: "
                f"{self.rope_boundary} would serve it)"
            )
        return None


def text_config(config: Any) -> Any:
    """The config of the model that reads and writes text. Raises UnsupportedModel where there are several."""
    try:
        return config.get_text_config()
    except ValueError as error:
        raise UnsupportedModel(f"expected one text model in {config.model_type}: {error}") from error


def text_facts(config: Any) -> TextFacts:
    """What `config` says, the model's own or its text model's. Raises UnsupportedModel where it has several."""
    text = text_config(config)
    windows = {int(window) for layer in layer_configs(config) if (window := getattr(layer, "sliding_window", None))}
    kinds = _kinds(text, windows)
    longest = (
        getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None) or LONGEST_DEFAULT_CONTEXT
    )
    rope_type, boundary = _unstable_rope(text, longest)
    return TextFacts(
        model_type=config.model_type,
        longest=longest,
        kinds=kinds,
        window=max(windows, default=None) if SLIDING in kinds else None,
        has_kinds=bool(getattr(text, "layer_types", None)),
        rope_boundary=boundary,
        rope_type=rope_type,
        refusal=_refusal(config, text, kinds, windows),
    )


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer, where layers differ; otherwise the one of all."""
    text = text_config(config)
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]


def _kinds(text: Any, windows: set[int]) -> tuple[str, ...]:
    if kinds := getattr(text, "layer_types", None):
        return tuple(str(kind) for kind in kinds)
    # GPT-Neo's windows are counted in the cache's columns, so they are of a kind of their own.
    if kinds := getattr(text, "attention_layers", None):
        return tuple(FULL if kind == "global" else f"{kind}_attention" for kind in kinds)
    return (SLIDING if windows else FULL,) * int(text.num_hidden_layers)


def _refusal(config: Any, text: Any, kinds: tuple[str, ...], windows: set[int]) -> str | None:
    if method := _quantization(config) or _quantization(text):
        return f"expected dense weights, found {method}"
    if getattr(config, "is_encoder_decoder", False) or not getattr(text, "is_causal", True):
        return f"expected a decoder-only language model, found {config.model_type}"
    if getattr(text, "use_bidirectional_attention", False) is True:
        return f"expected causal attention in {config.model_type}, found attention in both directions"
    if getattr(text, "alibi", False) or text.model_type in {"bloom", "mpt"}:
        return (
            f"expected positions as numbers, found ALiBi in {config.model_type}: it is computed from a batch's padding"
        )
    if others := sorted(set(kinds) - {FULL, SLIDING}):
        return (
            f"expected full attention or a sliding window in every layer of {config.model_type}, "
            f"found {', '.join(others)}"
        )
    if SLIDING in kinds and len(windows) != 1:
        return f"expected one length of sliding windows in {config.model_type}, found {sorted(windows) or 'none'}"
    limits = sorted(
        f"{name} = {value}"
        for name, value in text.to_dict().items()
        if _LIMITS.search(name) and name not in _NO_LIMITS and isinstance(value, int) and value
    )
    if limits:
        return f"expected no limit of attention but sliding_window in {config.model_type}, found {', '.join(limits)}"
    return None


def _quantization(config: Any) -> str | None:
    if not (quantization := getattr(config, "quantization_config", None)):
        return None
    is_dict = isinstance(quantization, dict)
    method = quantization.get("quant_method") if is_dict else getattr(quantization, "quant_method", None)
    return str(getattr(method, "value", method) or "quantized ones")


def _unstable_rope(text: Any, longest: int) -> tuple[str | None, int | None]:
    """The first rope type whose frequencies change with the length of a text, and up to which length they do not."""
    rope = getattr(text, "rope_parameters", None) or {}
    # One dictionary, or one for each kind of layer.
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part.get("rope_type") in _UNSTABLE_ROPE:
            return str(part["rope_type"]), int(part.get("original_max_position_embeddings") or longest)
    return None, None
