"""What `alphaloop measure` reports beside its measurements: the models' memory, how a pair fits, a draft's record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from alphaloop.draft_card import DraftJudgement, read_card
from alphaloop.engine import Engine, ModelSize
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.payoff.report import Footprint
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry, DraftRevision
from worker.measuring.report import DrafterRecords, HeldOut, peak_process_bytes


class MemoryWatch:
    """The most memory that an engine has taken of each GPU."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._most: dict[str, int] = {}

    def sample(self) -> None:
        """Take in what is held now."""
        for gpu, held in self._engine.gpu_bytes().items():
            self._most[gpu] = max(self._most.get(gpu, 0), held)

    def footprint(self, parts: tuple[ModelSize, ...]) -> Footprint:
        """The process's memory up to now. Main memory has a measure of its own."""
        self.sample()
        return Footprint(parts, peak_process_bytes(), sum(self._most.values()) if self._most else None, self._most)


def records_of(settings: Settings, engine: Engine) -> tuple[tuple[ModelSize, ...], DrafterRecords, list[str]]:
    """Every loaded model's size, and what is on record of each draft model; the last are notes for a person."""
    loaded = engine.loaded_models()
    held_out, notes = {}, []
    registered, trouble = _registered(settings)
    for name, drafter in settings.models.drafters.items():
        if drafter.draft_model is None:
            continue
        revision = next(state.revision for state in engine.drafters if state.name == name)
        judged = _from_folder(Path(drafter.draft_model.source), revision)
        record = _held_out(judged or _judged(registered, engine.identity.target_revision, revision))
        if record is not None:
            held_out[name] = record
        elif trouble:
            notes.append(f"no record of {name} on held-out text: {trouble}")
    findings = {
        name: [(finding.check, finding.sentence) for finding in warnings] for name, warnings in loaded.warnings.items()
    }
    return loaded.sizes, DrafterRecords(findings, held_out), notes


def _from_folder(folder: Path, revision: str) -> DraftJudgement | None:
    """The card that `alphaloop draft train` wrote beside the weights; None for other drafts."""
    try:
        card = read_card(folder)
    except ConfigError:
        return None
    return card.judgement if revision.startswith(card.draft_revision) else None


def _registered(settings: Settings) -> tuple[list[DraftRevision], str]:
    """What the database has of drafts, if one is configured, and why it did not answer; empty where it did."""
    if settings.postgres.url is None:
        return [], ""
    try:
        with Database(settings.postgres.url, limits=settings.postgres.long_limits()) as database:
            return DraftRegistry(database).all(), ""
    except AlphaloopError as error:
        return [], error.message


def _judged(known: Sequence[DraftRevision], target_revision: str, revision: str) -> DraftJudgement | None:
    """The same weights with a gate or in another dtype have a revision that begins with theirs."""
    same = (d for d in known if d.target_revision == target_revision and revision.startswith(d.draft_revision))
    return next((DraftJudgement.model_validate(d.figures) for d in same if d.figures), None)


def _held_out(judgement: DraftJudgement | None) -> HeldOut | None:
    if judgement is None or not (alphas := judgement.total.alphas()):
        return None
    return HeldOut(alphas[0], f"its {judgement.total.num_texts} held-out texts")
