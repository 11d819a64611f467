"""A draft model from its settings: checked against the target first, then loaded."""

from __future__ import annotations

import logging
from dataclasses import replace

from alphaloop.settings.models import DraftModelDrafterSettings, TargetSettings
from worker.decoding.drafters.draft_model import DraftModelDrafter
from worker.decoding.drafters.draft_tokens import DraftTokens
from worker.decoding.drafters.draft_vocabulary import read_draft_vocabulary, restrict_head
from worker.decoding.memory import available_bytes
from worker.decoding.models import load_weights
from worker.decoding.network.language_model import LanguageModel
from worker.decoding.pairing.facts import facts_of
from worker.decoding.pairing.pair import ModelFacts, check_pair, num_shared_tokens, refuse_incompatible
from worker.decoding.target import Target

log = logging.getLogger(__name__)


def load_draft_model(
    name: str, settings: DraftModelDrafterSettings, served: TargetSettings, target: Target, *, num_slots: int
) -> DraftModelDrafter:
    """Load the drafter `name` for a target that is loaded already, and served as `served` says.

    What `alphaloop check-pair` warns of is logged. Raises IncompatiblePair for what it refuses, ModelNotFound, or
    UnsupportedModel.
    """
    dtype = settings.dtype or served.dtype
    context_length = target.identity.context_length
    of_target = facts_of(
        served.source, dtype=served.dtype, revision=served.revision, context_length=context_length
    )  # fmt: skip
    of_draft = facts_of(settings.source, dtype=dtype, revision=settings.revision, context_length=context_length)
    _check(name, settings, of_target, of_draft, num_slots, available_bytes(target.device))
    loaded = load_weights(settings.source, settings.revision, dtype, target.device)
    token_ids = read_draft_vocabulary(loaded.folder)
    if token_ids is not None:
        restrict_head(loaded.model, token_ids)
        token_ids = token_ids.to(target.device)
    tokens = DraftTokens(
        vocabulary=target.model.vocabulary_size,
        num_shared=num_shared_tokens(of_target, of_draft),
        end_tokens=target.end_tokens,
        token_ids=token_ids,
    )
    # Another dtype rounds otherwise, so its acceptance is another history. The target's own is in the engine's name.
    revision = loaded.revision if dtype == served.dtype else f"{loaded.revision}-{dtype}"
    if settings.min_probability:
        revision += f"-p{settings.min_probability:g}"  # it decides which positions are tried
    if settings.num_branches > 1:
        revision += f"-b{settings.num_branches}"
    if settings.max_prompt_tokens is not None:
        revision += f"-t{settings.max_prompt_tokens}"  # what it has not read makes it guess worse
    model = LanguageModel(loaded.model, of_draft.context_length, gpu_kernels=served.gpu_kernels)
    state = replace(settings.state(name, revision), cache_bytes_per_token=model.kv_shape.bytes_per_token)
    return DraftModelDrafter(
        state, model, tokens, num_slots=num_slots, context_length=of_draft.context_length,
        min_probability=settings.min_probability, num_branches=settings.num_branches,
    )  # fmt: skip


def _check(
    name: str, settings: DraftModelDrafterSettings, target: ModelFacts, draft: ModelFacts, num_slots: int, free: int
) -> None:
    findings = check_pair(
        target, draft, num_slots=num_slots, max_draft_tokens=settings.max_draft_tokens,
        available_bytes=free + target.weight_bytes,
    )  # fmt: skip
    refuse_incompatible(draft, findings)
    for finding in findings:
        if finding.verdict == "warning":
            log.warning(
                "%s: %s", finding.check, finding.sentence,
                extra={"action": "pair_warning", "drafter": name, "check": finding.check},
            )  # fmt: skip
