"""From settings to an engine."""

from __future__ import annotations

from alphaloop.settings.model import ModelSettings
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.engine import TransformersEngine
from worker.decoding.models import load_target


def load_engine(models: ModelSettings, *, num_slots: int) -> TransformersEngine:
    """Load the target and its drafters; raises ModelNotFound or UnsupportedModel. Seconds, and 14 of a first GGUF."""
    drafters = {name: LookupDrafter(name, settings) for name, settings in models.drafters.items()}
    return TransformersEngine(load_target(models.target), drafters, num_slots=num_slots)
