"""The target drafts with some of its own layers left out, and verifies with all of them: weights are there once.

Zhang et al., arXiv 2309.08168 (Draft & Verify: layers in the middle); Elhoushi et al., arXiv 2404.16710 (LayerSkip: the
last layers of a model that was trained for it). Once loaded it is a draft model: it has slots of its own for
the layers that stay, reads the text into them, and what it draws is verified by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from alphaloop.errors import ConfigError
from alphaloop.settings.models import LayerSkipDrafterSettings
from engine.drafters.draft_model import DraftModelDrafter
from engine.drafters.draft_rows import tried_places
from engine.drafters.draft_vocabulary import DraftTokens
from engine.models import Target, as_unsupported


def load_layer_skip(
    name: str, settings: LayerSkipDrafterSettings, target: Target, *, num_slots: int
) -> DraftModelDrafter:
    """The drafter of that name, over the target's own weights.

    Raises ConfigError for layers that the target does not have, and where none would stay; UnsupportedModel for a
    family that cannot leave layers out.
    """
    num_layers, skipped = target.model.num_layers, sorted({*settings.skip_layers})
    if skipped[-1] >= num_layers or len(skipped) == num_layers:
        raise ConfigError(
            f"models.drafters.{name}.skip_layers: expected some of the target's layers 0 to {num_layers - 1}, "
            f"found {_spans(skipped)}",
            hint="at least one layer has to stay",
        )
    with as_unsupported(f"models.drafters.{name}"):
        model = target.model.without(skipped)
    tried = tried_places(settings, siblings="w")
    revision = f"{target.identity.target_revision}-s{_spans(skipped)}{tried}"
    state = replace(settings.state(name, revision), cache_bytes_per_token=model.kv_shape.bytes_per_token)
    return DraftModelDrafter(
        state,
        model,
        DraftTokens(model.vocabulary_size, model.vocabulary_size, target.end_tokens),
        num_slots=num_slots,
        context_length=target.identity.context_length,
        min_probability=settings.min_probability,
        num_branches=settings.num_branches,
    )


def _spans(numbers: Iterable[int]) -> str:
    """Ascending numbers as `2-5.9`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ".".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
