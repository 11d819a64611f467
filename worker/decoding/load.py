"""From settings to an engine."""

from __future__ import annotations

import logging

from alphaloop.settings.models import DraftModelDrafterSettings, LookupDrafterSettings, ModelSettings
from worker.decoding.device import Placement
from worker.decoding.drafters.draft_model import DraftModelDrafter
from worker.decoding.drafters.load_draft_model import DraftModels
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.engine import TransformersEngine
from worker.decoding.memory import available_bytes
from worker.decoding.models import load_target
from worker.decoding.proposal import Drafter
from worker.engine import target_limit

log = logging.getLogger(__name__)


def load_engine(models: ModelSettings, *, num_slots: int) -> TransformersEngine:
    """Load the target and its drafters. Seconds, and 14 of a first GGUF.

    Raises ConfigError for a device that is not there, ModelNotFound, UnsupportedModel, or IncompatiblePair for a draft
    model that cannot draft for this target.
    """
    placement = Placement.of(models)
    target = load_target(models.target, placement)
    drafters: dict[str, Drafter] = {}
    draft_models = DraftModels(
        {name: one for name, one in models.drafters.items() if isinstance(one, DraftModelDrafterSettings)},
        models.target,
        target,
        placement=placement,
        num_slots=num_slots,
    )
    for name, settings in models.drafters.items():
        if isinstance(settings, LookupDrafterSettings):
            drafters[name] = LookupDrafter(name, settings)
        else:
            drafters[name] = draft_models.load(name)
    own = target.model.kv_shape.bytes_per_token
    drafted = sum(
        drafter.bytes_per_token
        for drafter in drafters.values()
        if isinstance(drafter, DraftModelDrafter) and drafter.device == target.device
    )
    max_cache_bytes = models.target.max_cache_bytes or target_limit(available_bytes(target.device), own, drafted)
    log.info(
        "keys and values: %d bytes a token, at most %d MiB for %d slots, on %s",
        own,
        max_cache_bytes >> 20,
        num_slots,
        placement.name,
        extra={"action": "cache_sized"},
    )
    return TransformersEngine(target, drafters, num_slots=num_slots, max_cache_bytes=max_cache_bytes)
