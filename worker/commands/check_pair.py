"""`alphaloop check-pair`: read the facts of both models, without their weights, and check them."""

from __future__ import annotations
from alphaloop.commands import CheckPairOrder
from alphaloop.commands import PairCheck
from alphaloop.commands import ReportEvent
from alphaloop.commands import Tell
from alphaloop.settings import Settings
from worker.decoding.device import TARGET_SETTING
from worker.decoding.device import available_bytes
from worker.decoding.device import find_device
from worker.decoding.pairing import DeviceRoom
from worker.decoding.pairing import check_pair
from worker.decoding.pairing import facts_of


def check(order: CheckPairOrder, settings: Settings, tell: Tell) -> int:
    """Report every finding; 1 where the draft is refused. Raises AlphaloopError."""
    served = settings.models.target
    dtype = order.dtype or served.dtype
    # A wrong device is told before any file is read.
    room = _room(order.device or served.device, "--device" if order.device else TARGET_SETTING)
    draft_room = _room(order.draft_device, "--draft-device") if order.draft_device else room
    target = facts_of(order.target, dtype=dtype, context_length=order.context_length)
    draft = facts_of(order.draft, dtype=order.draft_dtype or dtype, context_length=target.context_length)
    findings = check_pair(
        target,
        draft,
        num_slots=order.batch_size or settings.worker.batch_size,
        max_draft_tokens=order.max_draft_tokens,
        room=room,
        draft_room=draft_room,
    )
    found = PairCheck(order.target, order.draft, findings)
    tell(ReportEvent(data=found))
    return 1 if found.is_refused else 0


def _room(name: str, setting: str) -> DeviceRoom:
    device = find_device(name, setting=setting)
    return DeviceRoom(str(device), available_bytes(device))
