"""Which of the models that a server lists is asked for."""

from __future__ import annotations

from typing import Final

from alphaloop.errors import ConfigError, ModelNotServed
from worker.servers.forms import ModelCard

_MOST_NAMED: Final = 8


def card_of(cards: tuple[ModelCard, ...], model: str) -> ModelCard:
    """The card of `model`, or of the only one where it is empty.

    Raises ConfigError where the server lists several or none and no model is named, and ModelNotServed.
    """
    listed = ", ".join(card.id for card in cards[:_MOST_NAMED]) or "none"
    if not model and len(cards) != 1:
        raise ConfigError(
            f"expected the name of a model, because the server lists {len(cards)}",
            hint=f"name one of {listed}" if cards else None,
        )
    for card in cards:
        if model in ("", card.id):
            return card
    raise ModelNotServed(f"expected the model {model!r} at /models, found {listed}")
