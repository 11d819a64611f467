"""Drafters are measured through their seam, and are left as they were found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from alphaloop.deciding.goodput import DrafterState
from alphaloop.errors import DecodeFailed
from alphaloop.settings.models import TargetSettings
from worker.decoding.measuring import measure_draft_ms, measure_draft_prefill_ms, measure_target_ms
from worker.decoding.models import load_target
from worker.decoding.network.passes import Read
from worker.decoding.network.slots import SlotCache
from worker.decoding.proposal import Ask, Proposal
from worker.engine import Sampling


class RecordingDrafter:
    """Proposes a chain of fives and remembers every call."""

    def __init__(self, *, fails: bool = False) -> None:
        self.state = DrafterState("recording", "r1", 8)
        self.open_jobs: dict[str, Sequence[int]] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.rounds: list[list[tuple[int, int]]] = []
        self._fails = fails

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str) -> None:
        assert job_id not in self.open_jobs
        assert task == ""
        self.open_jobs[job_id] = text
        self.prompts.append(tuple(text))

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        if self._fails:
            raise RuntimeError("out of memory")
        assert [ask.job_id for ask in asks] == list(self.open_jobs)
        assert all(ask.text is self.open_jobs[ask.job_id] for ask in asks)
        self.rounds.append([(len(ask.text), ask.num_tokens) for ask in asks])
        return [Proposal((5,) * ask.num_tokens) for ask in asks]

    def close(self, job_id: str) -> None:
        self.open_jobs.pop(job_id, None)

    def clear(self) -> None:
        self.open_jobs.clear()


def test_a_drafter_that_fails_is_named_and_left_empty() -> None:
    drafter = RecordingDrafter(fails=True)
    with pytest.raises(DecodeFailed, match=r"by recording failed: RuntimeError: out of memory"):
        measure_draft_ms(drafter, 2, 5, 16, 1)
    assert drafter.open_jobs == {}
    with pytest.raises(DecodeFailed, match=r"recording reads 16 tokens failed"):
        measure_draft_prefill_ms(drafter, 16, 1)
    assert drafter.open_jobs == {}


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
    measure_target_ms(target, 4, 2, 100, 1)
    assert are_written == [True, True]
