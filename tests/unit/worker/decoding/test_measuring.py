"""Drafters are measured through their seam, and are left as they were found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from alphaloop.errors import DecodeFailed
from alphaloop.settings.models import LookupDrafterSettings, TargetSettings
from worker.decoding.drafters.lookup import LookupDrafter
from worker.decoding.measuring import measure_draft_ms, measure_draft_prefill_ms, measure_pass_ms
from worker.decoding.models import load_target
from worker.decoding.network.passes import Read
from worker.decoding.network.slots import SlotCache
from worker.decoding.proposal import Ask


def test_a_drafter_that_fails_is_named_and_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(asks: Sequence[Ask]) -> None:
        raise RuntimeError("out of memory")

    drafter = LookupDrafter("recording", LookupDrafterSettings())
    monkeypatch.setattr(drafter, "propose", fail)
    with pytest.raises(DecodeFailed, match=r"by recording failed: RuntimeError: out of memory"):
        measure_draft_ms(drafter, 2, 5, 16, 1)
    assert drafter._open == {}
    with pytest.raises(DecodeFailed, match=r"recording reads 16 tokens failed"):
        measure_draft_prefill_ms(drafter, 16, 1)
    assert drafter._open == {}


def test_a_pass_is_timed_over_keys_that_were_written(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that nothing was written to is read in no time: attention would look free."""
    target = load_target(TargetSettings(source=str(tiny_models["llama"]), dtype="float32", device="cpu"))
    read, are_written = target.model.read, []

    def watched(cache: SlotCache, reads: Sequence[Read]) -> Tensor:
        are_written.append(not any(layer[:4, :, :102].isnan().any() for layer in cache.layers))
        return read(cache, reads)

    monkeypatch.setattr(
        "worker.decoding.network.slots.zeros", lambda shape, dtype, _, **__: torch.full(shape, torch.nan, dtype=dtype)
    )
    monkeypatch.setattr(target.model, "read", watched)
    measure_pass_ms(target.model, 4, 2, 100, 1)
    assert are_written == [True, True]
