"""What `alphaloop measure` reports beside its measurements: the models' memory, how a pair fits, a draft's record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from alphaloop.draft_card import DraftJudgement, read_card
from alphaloop.engine import Engine
from alphaloop.errors import AlphaloopError, ConfigError
from alphaloop.payoff.report import Footprint, Part
from alphaloop.settings import Settings
from alphaloop.settings.models import ModelSettings
from alphaloop.store.database import Database
from alphaloop.store.drafts import DraftRegistry, DraftRevision
from engine.device import Placement, available_bytes
from engine.pairing import DeviceRoom, ModelFacts, check_pair, facts_of, translation_between
from worker.measuring.report import DrafterRecords, HeldOut, peak_process_bytes


class MemoryWatch:
    """How much of the GPUs is taken, from when this is made; make it before anything is loaded."""

    def __init__(self, models: ModelSettings) -> None:
        # Main memory has a measure of its own.
        self._gpus = [device for device in Placement.of(models).devices if device.type != "cpu"]
        self._before = {gpu: available_bytes(gpu) for gpu in self._gpus}
        self._least = dict(self._before)

    def sample(self) -> None:
        """Take notice of what is free now."""
        for gpu in self._gpus:
            self._least[gpu] = min(self._least[gpu], available_bytes(gpu))

    def footprint(self, parts: tuple[Part, ...]) -> Footprint:
        """Everything up to now."""
        self.sample()
        held = {str(gpu): self._before[gpu] - self._least[gpu] for gpu in self._gpus}
        return Footprint(parts, peak_process_bytes(), sum(held.values()) if held else None, held)


def records_of(settings: Settings, engine: Engine) -> tuple[tuple[Part, ...], DrafterRecords, list[str]]:
    """Every loaded model's size, and what is on record of each draft model; the last are notes for a person."""
    served, length = settings.models.target, engine.identity.context_length
    target = facts_of(served.source, dtype=served.dtype, revision=served.revision, context_length=length)
    placement = Placement.of(settings.models)
    parts = [_part("target", target, length, str(placement.target))]
    findings, held_out, notes = {}, {}, []
    registered, trouble = _registered(settings)
    for name, configured in settings.models.drafters.items():
        if (drafter := configured.draft_model) is None:
            continue
        draft = facts_of(
            drafter.source, dtype=drafter.dtype or served.dtype, revision=drafter.revision, context_length=length
        )
        device = placement.drafts[name]
        parts.append(_part(name, draft, min(length, draft.context_length), str(device)))
        # Both are loaded by now.
        room = DeviceRoom(str(placement.target), target.weight_bytes + available_bytes(placement.target))
        draft_room = DeviceRoom(str(device), draft.weight_bytes + available_bytes(device))
        if device == placement.target:
            room = draft_room = replace(room, free=room.free + draft.weight_bytes)
        found = check_pair(
            target,
            draft,
            num_slots=engine.load().num_slots,
            max_draft_tokens=drafter.max_draft_tokens,
            room=room,
            draft_room=draft_room,
            translation=translation_between(target, draft),
        )
        findings[name] = [(one.check, one.sentence) for one in found if one.verdict == "warning"]
        revision = next(state.revision for state in engine.drafters if state.name == name)
        judged = _from_folder(Path(drafter.source), revision)
        record = _held_out(judged or _judged(registered, engine.identity.target_revision, revision))
        if record is not None:
            held_out[name] = record
        elif trouble:
            notes.append(f"no record of {name} on held-out text: {trouble}")
    return tuple(parts), DrafterRecords(findings, held_out), notes


def _part(name: str, facts: ModelFacts, context_length: int, device: str) -> Part:
    per_token = facts.kv_bytes_per_token
    return Part(name, facts.weight_bytes, per_token, per_token * context_length, device)


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
