"""Every way of drafting: its name in the settings, and how a drafter of it is opened.

A new way is a file of this folder with a `Drafter` (`engine.proposal` shows one of four lines), a class of settings
with its `method` among `alphaloop.settings.models.DrafterSettings`, and a line of METHODS. A row in
tests/integration/test_texts_are_the_targets.py proves that texts stay the target's with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from alphaloop.logs import START_PROGRESS
from alphaloop.settings.models import ModelSettings
from engine.device import Placement
from engine.drafters.draft_model import DraftModels
from engine.drafters.head_loading import load_heads
from engine.drafters.hybrid import HybridDrafter
from engine.drafters.layer_skip import load_layer_skip
from engine.drafters.lookup import LookupDrafter
from engine.drafters.recycling import RecyclingDrafter
from engine.models import Target
from engine.proposal import Drafter

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Opening:
    """What drafters are opened with."""

    models: ModelSettings
    target: Target
    placement: Placement
    num_slots: int
    opened: dict[str, Drafter] = field(default_factory=dict)  #: so far, by name

    @cached_property
    def draft_models(self) -> DraftModels:
        """Loads each set of weights once."""
        drafts = {
            name: draft
            for name, settings in self.models.drafters.items()
            if (draft := settings.draft_model) is not None
        }
        return DraftModels(drafts, self.models.target, self.target, placement=self.placement, num_slots=self.num_slots)


#: Opens the drafter of a name and its settings. Raises AlphaloopError.
Open = Callable[[str, Any, Opening], Drafter]

METHODS: Final[dict[str, Open]] = {
    "lookup": lambda name, settings, _: LookupDrafter(name, settings),
    "draft_model": lambda name, _, opening: opening.draft_models.load(name),
    "heads": lambda name, settings, o: load_heads(name, settings, o.target, num_slots=o.num_slots),
    "eagle3": lambda name, settings, o: load_heads(name, settings, o.target, num_slots=o.num_slots),
    "layer_skip": lambda name, settings, o: load_layer_skip(name, settings, o.target, num_slots=o.num_slots),
    "recycling": lambda name, settings, o: RecyclingDrafter(name, settings, o.target.end_tokens),
    "hybrid": lambda name, settings, o: HybridDrafter(
        name, settings, {source: o.opened[source] for source in settings.asks}
    ),
}


def open_drafters(models: ModelSettings, target: Target, placement: Placement, *, num_slots: int) -> dict[str, Drafter]:
    """The drafters of the settings, by name, in their order; those that ask others are opened last.

    Raises ConfigError, ModelNotFound, UnsupportedModel, or IncompatiblePair for what cannot draft for this target.
    """
    opening = Opening(models, target, placement, num_slots)
    for name, settings in sorted(models.drafters.items(), key=lambda item: bool(item[1].asks)):
        place = f"{len(opening.opened) + 1} of {len(models.drafters)}"
        log.info("loading the drafter %s, %s", name, place, extra={"action": START_PROGRESS})
        opening.opened[name] = METHODS[settings.method](name, settings, opening)
    return opening.opened
