"""Whether two models fit into the memory of their devices, in sentences with the arithmetic. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alphaloop.commands import CheckFinding

if TYPE_CHECKING:
    from worker.decoding.pairing.pair import ModelFacts


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """The memory of a device before either model is loaded."""

    device: str  #: `cuda:1`
    free: int  #: bytes


@dataclass(frozen=True, slots=True)
class _Need:
    """What one device has to hold, in bytes, and how that is made up."""

    room: DeviceRoom
    weights: int
    per_slot: int
    said: str  #: up to what a slot takes

    def total(self, num_slots: int) -> int:
        return self.weights + num_slots * self.per_slot

    def sentence(self, num_slots: int) -> str:
        return (
            f"{self.said}; with {num_slots} slots {shown_bytes(self.total(num_slots))}, "
            f"of {shown_bytes(self.room.free)} free on {self.room.device}."
        )


def memory(
    target: ModelFacts,
    draft: ModelFacts,
    num_slots: int,
    max_draft_tokens: int,
    room: DeviceRoom,
    draft_room: DeviceRoom,
) -> CheckFinding:
    """Whether the memory of their devices holds both; of one device where the two rooms name the same."""
    needs = _needs(target, draft, max_draft_tokens, room, draft_room)
    said = " ".join(need.sentence(num_slots) for need in needs)
    full = [need for need in needs if need.total(1) > need.room.free]
    if full:
        return CheckFinding(
            "memory", "refused", f"{said} Not one full slot fits on {full[0].room.device}. {_advice(needs)}"
        )
    short = [need for need in needs if need.total(num_slots) > need.room.free]
    if short:
        num_fitting = min((need.room.free - need.weights) // need.per_slot for need in needs)
        return CheckFinding("memory", "warning", f"{said} Full slots that fit: {num_fitting}. {_advice(needs)}")
    return CheckFinding("memory", "ok", said)


def _advice(needs: Sequence[_Need]) -> str:
    other = "another device for the draft (its `device`), or " if len(needs) == 1 else ""
    return f"What helps: {other}a lower worker.batch_size or models.target.context_length."


def _needs(
    target: ModelFacts, draft: ModelFacts, max_draft_tokens: int, room: DeviceRoom, draft_room: DeviceRoom
) -> tuple[_Need, ...]:
    """What the target's device has to hold, and what the draft's, where that is another."""
    width = max_draft_tokens + 1
    own_slot, draft_slot = (
        target.kv_bytes_per_slot,
        draft.kv_bytes_per_token * min(draft.context_length, target.context_length),
    )
    own = f"{shown_bytes(own_slot)} ({shown_bytes(target.kv_bytes_per_token)} a token)"
    drafted = f"{shown_bytes(draft_slot)} ({shown_bytes(draft.kv_bytes_per_token)} a token)"
    own_rows = width * target.pass_bytes_per_row
    # The draft reads one position a pass, but keeps the distribution of each of its drafts until they are verified.
    draft_rows = max_draft_tokens * draft.pass_bytes_per_row
    if room.device == draft_room.device:
        rows = own_rows + draft_rows
        said = (
            f"Weights {shown_bytes(target.weight_bytes)} + {shown_bytes(draft.weight_bytes)}; a full slot {own} + "
            f"{drafted} + {shown_bytes(rows)} for passes of width {width}"
        )
        return (_Need(room, target.weight_bytes + draft.weight_bytes, own_slot + draft_slot + rows, said),)
    # The distributions cross to the target's device, to be compared there.
    arriving = max_draft_tokens * target.pass_bytes_per_row
    of_target = (
        f"Target: weights {shown_bytes(target.weight_bytes)}; a full slot {own} + "
        f"{shown_bytes(own_rows + arriving)} for passes of width {width}"
    )
    of_draft = (
        f"Draft: weights {shown_bytes(draft.weight_bytes)}; a full slot {drafted} + {shown_bytes(draft_rows)} for its "
        f"distributions"
    )
    return (
        _Need(room, target.weight_bytes, own_slot + own_rows + arriving, of_target),
        _Need(draft_room, draft.weight_bytes, draft_slot + draft_rows, of_draft),
    )


def shown_bytes(number: int) -> str:
    """A number of bytes for people, in powers of 1000: `270 MB`."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            value = number / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{number} bytes"
