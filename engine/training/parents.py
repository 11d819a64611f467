"""Heads that were trained before: what training goes on from, and what its result is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alphaloop.draft_card import DraftMethod
from alphaloop.errors import ConfigError, UnsupportedModel
from engine.drafters.head_files import HeadFacts, find_heads, read_heads
from engine.models import find_weights
from engine.text_facts import text_config
from engine.training.eagle3 import Eagle3HeadsInTraining
from engine.training.heads import HeadsInTraining, SequentialHeadsInTraining
from engine.training.recipe import Recipe

_KINDS = {"heads": "sequential", "eagle3": "eagle3"}


@dataclass(frozen=True, slots=True)
class ParentHeads:
    """The files of heads."""

    facts: HeadFacts
    path: Path
    revision: str

    def tensors(self) -> dict[str, Tensor]:
        """All of them, float32, by their names in the files."""
        return read_heads(self.path, torch.float32, torch.device("cpu"))


def read_parent(source: str, method: DraftMethod) -> ParentHeads:
    """The heads in a folder or under a hub name.

    Raises ModelNotFound; ConfigError for what `method` does not make; UnsupportedModel for heads of another arithmetic.
    """
    if method == "draft_model":
        raise ConfigError("expected --method heads or eagle3 with --from, found draft_model")
    facts = find_heads(source)
    if facts is None or facts.kind != _KINDS[method]:
        found = "a model" if facts is None else f"{facts.kind} heads"
        raise ConfigError(f"--from: expected heads of the method {method}, found {found}")
    if facts.norm_before_residual:
        raise UnsupportedModel(f"{source}: expected heads without norm_before_residual: training does not compute it")
    weights = find_weights(source)
    return ParentHeads(facts, weights.path, weights.revision)


def new_heads(
    method: DraftMethod, target: Any, token_ids: Tensor | None, recipe: Recipe, taps: tuple[int, ...]
) -> HeadsInTraining[Any]:
    """New heads of `target`, a transformers model, that draft these tokens; None: every token."""
    embeddings, head = (
        model.weight.detach().cpu() for model in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    if method == "eagle3":
        return Eagle3HeadsInTraining(embeddings, head, token_ids, recipe, target=text_config(target.config), taps=taps)
    return SequentialHeadsInTraining(embeddings, head, token_ids, recipe)
