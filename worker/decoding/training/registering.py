"""Registers a trained draft in the database."""

from __future__ import annotations

from pathlib import Path

from alphaloop.draft_card import DraftCard, read_card
from alphaloop.embedded.stack import with_running_stack
from alphaloop.errors import ConfigError
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry, DraftStatus
from worker.decoding.sources import find_weights


def register_folder(folder: Path, settings: Settings, name: str | None = None) -> tuple[DraftCard, DraftStatus]:
    """Register the draft in `folder`, under `name` if one is given. Returns its card and its status in the database.

    Raises ConfigError for a folder without a card or with other weights than the card's, or if no database is
    configured; StoreError if the database cannot be used.
    """
    card = read_card(folder)
    revision = find_weights(str(folder)).revision
    if revision != card.draft_revision:
        raise ConfigError(
            f"the card in {folder} was written for weights {card.draft_revision}, found {revision}",
            hint="its figures are another draft's: train again",
        )
    url = with_running_stack(settings).postgres.url
    if url is None:
        raise ConfigError("no database is configured", hint="set DATABASE_URL, or start everything with `alphaloop up`")
    postgres = settings.postgres
    with Database(url, pool_size=1, connect_timeout_s=postgres.connect_timeout_s, limits=postgres.limits()) as database:
        database.check_revision()
        status = DraftRegistry(database).register_trained(
            name or card.name,
            card.draft_revision,
            card.target_revision,
            parent_revision=card.target_revision,
            trained_on=card.trained_on,
            figures=card.judgement.model_dump(mode="json"),
        )
    return card, status
