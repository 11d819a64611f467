"""Drafters over heads, from their settings: checked against the target first, then loaded onto its device."""

from __future__ import annotations

from dataclasses import replace

import torch

from alphaloop.errors import UnsupportedModel
from alphaloop.settings.models import HeadsDrafterSettings
from engine.drafters.draft_rows import tried_places
from engine.drafters.draft_vocabulary import DraftTokens
from engine.drafters.eagle3 import Eagle3Drafter, Eagle3Network
from engine.drafters.head_files import check_heads, find_heads, read_heads
from engine.drafters.heads import DraftingHeads, HeadsDrafter, MedusaHeads, SequentialHeads
from engine.models import Target, as_unsupported, find_weights
from engine.pairing import refuse_or_warn


def load_heads(
    name: str, settings: HeadsDrafterSettings, target: Target, *, num_slots: int
) -> HeadsDrafter | Eagle3Drafter:
    """The drafter of that name, on the target's device and in its dtype.

    What `alphaloop check-pair` warns of is logged. Raises IncompatiblePair for what it refuses, ModelNotFound, or
    UnsupportedModel.
    """
    with as_unsupported(settings.source):
        return _loaded(name, settings, target, num_slots)


def _loaded(name: str, settings: HeadsDrafterSettings, target: Target, num_slots: int) -> HeadsDrafter | Eagle3Drafter:
    model, source = target.model, settings.source
    weights, facts = find_weights(source, settings.revision), find_heads(source, settings.revision)
    if facts is None:
        raise UnsupportedModel(
            f"{source}: expected heads of EAGLE-3 or Medusa, or ones that were trained here, found another model",
            hint='a whole model is drafted with as method = "draft_model"',
        )
    if (facts.kind == "eagle3") != (settings.method == "eagle3"):
        raise UnsupportedModel(
            f"models.drafters.{name}: expected heads of the method {settings.method}, found {facts.kind}",
            hint=f'method = "{"eagle3" if facts.kind == "eagle3" else "heads"}" drafts with these',
        )
    sizes = {"hidden_size": model.hidden_size, "num_layers": model.num_layers, "vocabulary": model.vocabulary_size}
    findings = check_heads(facts, **sizes, target_revision=target.identity.target_revision)
    refuse_or_warn(name, facts.source, findings)
    embeddings = model.embeddings
    tensors = read_heads(weights.path, embeddings.dtype, embeddings.device)
    taps = facts.taps_in(model.num_layers)
    layers = f"-l{'.'.join(map(str, taps))}" if facts.kind == "eagle3" else ""
    state = settings.state(name, weights.revision + layers + tried_places(settings))
    state = replace(state, trained_for=facts.trained_for)
    gate_at, num_branches = settings.min_probability, settings.num_branches
    if facts.kind == "eagle3":
        network = Eagle3Network(
            facts, tensors, embeddings, num_taps=len(taps), num_positions=target.identity.context_length
        )
        known = _known(target, network.num_columns, network.token_ids)
        state = replace(state, cache_bytes_per_token=network.kv_shape.bytes_per_token)
        return Eagle3Drafter(
            state, network, known, taps, num_slots=num_slots, min_probability=gate_at, num_branches=num_branches
        )
    heads: DraftingHeads = (
        SequentialHeads(tensors, embeddings)
        if facts.kind == "sequential"
        else MedusaHeads(facts, tensors, model.hidden_size)
    )
    return HeadsDrafter(
        state,
        heads,
        _known(target, heads.num_columns, heads.token_ids),
        hidden_size=model.hidden_size,
        dtype=embeddings.dtype,
        heads_device=embeddings.device,
        min_probability=gate_at,
        num_branches=num_branches,
    )


def _known(target: Target, num_columns: int, token_ids: torch.Tensor | None) -> DraftTokens:
    """The tokens of columns of the heads' logits. Raises UnsupportedModel for one that the target does not have."""
    vocabulary = target.model.vocabulary_size
    highest = num_columns - 1 if token_ids is None else int(token_ids.max())
    if token_ids is not None and len(token_ids) != num_columns:
        raise UnsupportedModel(f"expected a token for each of {num_columns} columns, found {len(token_ids)}")
    if highest >= vocabulary or (token_ids is not None and int(token_ids.min()) < 0):
        raise UnsupportedModel(f"expected tokens below {vocabulary}, found {highest}: does d2t hold offsets?")
    return DraftTokens(vocabulary, highest + 1, target.end_tokens, token_ids)
