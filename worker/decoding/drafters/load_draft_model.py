"""Draft models from their settings: checked against the target first, then loaded, each set of weights once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from alphaloop.deciding.goodput import DrafterState
from alphaloop.settings.models import DraftModelDrafterSettings, Dtype, TargetSettings
from worker.decoding.device import Placement
from worker.decoding.drafters.draft_model import DraftModelDrafter
from worker.decoding.drafters.draft_tokens import DraftTokens
from worker.decoding.drafters.draft_vocabulary import read_draft_vocabulary, restrict_head
from worker.decoding.memory import available_bytes
from worker.decoding.models import load_weights
from worker.decoding.network.language_model import LanguageModel
from worker.decoding.pairing.facts import facts_of
from worker.decoding.pairing.pair import ModelFacts, check_pair, num_shared_tokens, refuse_incompatible
from worker.decoding.pairing.room import DeviceRoom
from worker.decoding.shared_weights import SharedWeightDrafter
from worker.decoding.target import Target

log = logging.getLogger(__name__)


class _Source(NamedTuple):
    """Where weights come from, their dtype, and where they go."""

    name: str
    revision: str | None
    dtype: Dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Weights:
    """A loaded model, which any number of drafters may read with: each has slots of its own."""

    model: LanguageModel
    revision: str
    token_ids: Tensor | None


class DraftModels:
    """The draft models of one target that is loaded already, and served as `served` says.

    Drafters of the same weights, dtype and device share the weights in memory, also with another gate or
    `max_prompt_tokens`.
    Those that read the same tokens and propose chains are shared-weight drafters: rounds of one count for the others.
    """

    def __init__(
        self,
        drafters: Mapping[str, DraftModelDrafterSettings],
        served: TargetSettings,
        target: Target,
        *,
        placement: Placement | None = None,
        num_slots: int,
    ) -> None:
        """`placement` None: all lie where the target does."""
        self._drafters = drafters
        self._served = served
        self._target = target
        self._placement = placement or Placement(target.device)
        self._num_slots = num_slots
        self._loaded: dict[_Source, _Weights] = {}

    def load(self, name: str) -> DraftModelDrafter:
        """The drafter of that name.

        What `alphaloop check-pair` warns of is logged. Raises IncompatiblePair for what it refuses, ModelNotFound, or
        UnsupportedModel.
        """
        settings, target = self._drafters[name], self._target
        source = self._source(name)
        of_target = self._of_target
        of_draft = self._facts(source)
        weights = self._loaded.get(source)
        self._check(name, source, of_draft, is_loaded=weights is not None)
        if weights is None:
            weights = self._loaded[source] = self._load(source, of_draft)
        tokens = DraftTokens(
            vocabulary=target.model.vocabulary_size,
            num_shared=num_shared_tokens(of_target, of_draft),
            end_tokens=target.end_tokens,
            token_ids=weights.token_ids,
        )
        state = self._state(name, settings, weights)
        return DraftModelDrafter(
            state,
            weights.model,
            tokens,
            num_slots=self._num_slots,
            context_length=of_draft.context_length,
            min_probability=settings.min_probability,
            num_branches=settings.num_branches,
            shared_weights=self._shared_weights(state, weights),
        )

    @cached_property
    def _of_target(self) -> ModelFacts:
        served = self._served
        return self._facts(_Source(served.source, served.revision, served.dtype, self._target.device))

    def _source(self, name: str) -> _Source:
        settings = self._drafters[name]
        device = self._placement.drafts.get(name, self._target.device)
        return _Source(settings.source, settings.revision, settings.dtype or self._served.dtype, device)

    def _facts(self, source: _Source) -> ModelFacts:
        context_length = self._target.identity.context_length
        return facts_of(source.name, dtype=source.dtype, revision=source.revision, context_length=context_length)

    def _state(self, name: str, settings: DraftModelDrafterSettings, weights: _Weights) -> DrafterState:
        dtype = settings.dtype or self._served.dtype
        # Another dtype rounds otherwise, so its history is another. The target's own is in the engine's name.
        # A device changes no history: it decides what a draft costs, and costs are stored under the placement.
        base = weights.revision if dtype == self._served.dtype else f"{weights.revision}-{dtype}"
        # What it has not read makes it guess worse.
        read = "" if settings.max_prompt_tokens is None else f"-t{settings.max_prompt_tokens}"
        # These decide which positions are tried.
        gate = f"-p{settings.min_probability:g}" if settings.min_probability else ""
        branches = f"-b{settings.num_branches}" if settings.num_branches > 1 else ""
        return replace(
            settings.state(name, base + gate + branches + read),
            cache_bytes_per_token=weights.model.kv_shape.bytes_per_token,
        )

    def _shared_weights(self, state: DrafterState, weights: _Weights) -> list[SharedWeightDrafter]:
        """The other shared-weight drafters with these weights."""
        return [
            SharedWeightDrafter(self._state(other, settings, weights), settings.min_probability)
            for other, settings in self._drafters.items()
            if settings.state(other, "").shares_weights_with(state)
        ]

    def _load(self, source: _Source, facts: ModelFacts) -> _Weights:
        loaded = load_weights(
            source.name, source.revision, source.dtype, source.device, context_length=facts.context_length
        )
        token_ids = read_draft_vocabulary(loaded.folder)
        if token_ids is not None:
            restrict_head(loaded.model, token_ids)
            token_ids = token_ids.to(source.device)
        model = loaded.over_slots(facts.context_length)
        return _Weights(model, loaded.revision, token_ids)

    def _check(self, name: str, source: _Source, draft: ModelFacts, *, is_loaded: bool) -> None:
        """Refuse the pair, or log its warnings. Memory counts as before anything was loaded."""
        target, settings = self._target, self._drafters[name]
        rooms = [DeviceRoom(str(target.device), available_bytes(target.device) + self._of_target.weight_bytes)]
        if source.device != target.device:
            rooms.append(DeviceRoom(str(source.device), available_bytes(source.device)))
        if is_loaded:
            rooms[-1] = replace(rooms[-1], free=rooms[-1].free + draft.weight_bytes)
        findings = check_pair(
            self._of_target,
            draft,
            num_slots=self._num_slots,
            max_draft_tokens=settings.max_draft_tokens,
            room=rooms[0],
            draft_room=rooms[-1],
        )
        refuse_incompatible(draft, findings)
        for finding in findings:
            if finding.verdict == "warning":
                log.warning(
                    "%s: %s",
                    finding.check,
                    finding.sentence,
                    extra={"action": "pair_warning", "drafter": name, "check": finding.check},
                )
