"""What a model's own modules say, with which passes over slots are compared when it is loaded.

A pass that is long enough to leave a window of thousands of tokens would take longer than loading. So the pass is short
and the window is made shorter still; that masks and rotations hold at the real boundaries is checked on these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function

from worker.decoding.network.groups import Group, Placed, Read
from worker.decoding.text_facts import TextFacts, layer_configs, text_config

#: A window that the tokens of `some_tokens` cross before the first logits that are compared.
_SHORT_WINDOW: Final = 4
NUM_HELD: Final = (5, 4)  #: tokens of each text that its slot holds before
NUM_READ: Final = 4  #: tokens of each that the compared pass reads
#: Positions before and behind a boundary that are compared.
_REACH: Final = 2
#: Of a rotation, whose numbers are at most about 1: above float32's rounding of an angle, below another frequency.
_ROTATION_TOLERANCE: Final = 1e-3


def some_tokens(num_rows: int) -> Tensor:
    """Tokens [2, 9] of two texts that are read in both ways, of embeddings with that many rows."""
    return torch.randint(0, num_rows, (2, max(NUM_HELD) + NUM_READ), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def reference(model: Any, facts: TextFacts) -> tuple[int | None, Tensor]:
    """A window, and the logits [2 * NUM_READ, vocabulary] of the model's own pass with it.

    The window is a short one if the model has any: what is within a longer one is seen by all layers.
    """
    if facts.window is None:
        return None, _logits(model)
    with _shortened(model, _SHORT_WINDOW):
        return _SHORT_WINDOW, _logits(model)


def mask_error(window: int) -> str | None:
    """How the mask around the end of a window differs from transformers' own rule; None if it does not."""
    first = max(0, window - _REACH)
    read = Read(0, [0] * (2 * _REACH + 1))
    group = Group((Placed(read, first, 0),), window, torch.float32, torch.device("cpu"))
    allowed = sliding_window_causal_mask_function(window)
    queries, keys = torch.arange(first, first + group.width)[:, None], torch.arange(group.num_keys)
    batch = torch.zeros((), dtype=torch.long)
    mask = group.local_mask
    seen = torch.ones(group.width, group.num_keys, dtype=torch.bool) if mask is None else mask[0, 0] == 0
    if bool((seen == allowed(batch, batch, queries, keys)).all()):
        return None
    return f"the mask around a window of {window} tokens differs from the model's own"


@torch.inference_mode()
def rotation_error(model: Any, facts: TextFacts, num_positions: int) -> str | None:
    """A position whose rotation depends on the positions that are computed with it; None if there is none.

    Compared are the first positions, and those around each window and boundary that the config names: each alone, and
    with the last position of the context.
    """
    marks = {0, num_positions - 1, *_boundaries(model, facts)}
    near = {mark + by for mark in marks for by in range(-_REACH, _REACH + 1)}
    positions = sorted(position for position in near if 0 <= position < num_positions)
    for rotate in _rotaries(model, facts):
        alone = torch.stack([rotate([position])[0] for position in positions])
        together = rotate([*positions, num_positions - 1])[: len(positions)]
        error = (alone - together).abs().amax(dim=-1)
        if float(error.max()) > _ROTATION_TOLERANCE:
            first = positions[int((error > _ROTATION_TOLERANCE).nonzero()[0])]
            return (
                f"the rotation of position {first} depends on the length of the text, so a text would depend on the "
                f"others in its batch: expected fixed frequencies up to a context of {num_positions}"
            )
    return None


def _logits(model: Any) -> Tensor:
    token_ids = some_tokens(model.get_input_embeddings().weight.shape[0]).to(model.device)
    first = min(NUM_HELD)
    kept = token_ids.shape[1] - first
    logits: Tensor = model(input_ids=token_ids, use_cache=False, logits_to_keep=kept).logits.float()
    return torch.cat([row[held - first : held - first + NUM_READ] for row, held in zip(logits, NUM_HELD, strict=True)])


@contextmanager
def _shortened(model: Any, window: int) -> Iterator[None]:
    """The model's own modules with another window: they read it from the config in every pass."""
    configs = [text_config(model.config), *layer_configs(model.config)]
    before = [
        (config, config.__dict__["sliding_window"]) for config in configs if config.__dict__.get("sliding_window")
    ]
    try:
        for config, _ in before:
            config.sliding_window = window
        yield
    finally:
        for config, own in before:
            config.sliding_window = own


def _boundaries(model: Any, facts: TextFacts) -> set[int]:
    rope = getattr(text_config(model.config), "rope_parameters", None) or {}
    parts = (rope, *(part for part in rope.values() if isinstance(part, dict)))
    named = [part.get("original_max_position_embeddings") for part in parts]
    return {int(one) for one in (*named, facts.window, facts.rope_boundary, facts.longest) if one}


def _rotaries(model: Any, facts: TextFacts) -> Iterator[Any]:
    """Functions from positions to rotations [positions, size], one a kind of layer of each rotary embedding."""
    own = text_config(model.config).model_type
    for module in model.modules():
        config = getattr(module, "config", None)
        if not type(module).__name__.endswith("RotaryEmbedding") or getattr(config, "model_type", None) != own:
            continue
        types = getattr(module, "rope_type", None)
        for kind in sorted(set(facts.kinds)) if isinstance(types, dict) else [None]:
            yield _rotary(module, kind, model.device)


def _rotary(module: Any, kind: str | None, device: torch.device) -> Any:
    like = torch.empty(0, dtype=torch.float32, device=device)

    def rotate(positions: list[int]) -> Tensor:
        places = torch.tensor([positions], device=device)
        found = module(like, places) if kind is None else module(like, places, kind)
        parts = found if isinstance(found, tuple) else (torch.view_as_real(found).flatten(-2),)
        return torch.cat([part.reshape(len(positions), -1).float() for part in parts], dim=-1)

    return rotate
