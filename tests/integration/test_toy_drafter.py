"""A way of drafting that only this file knows: settings, a class and a line of METHODS are all that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest

from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Sampling
from alphaloop.settings.models import DraftingSettings, ModelSettings, TargetSettings
from engine.drafters.methods import METHODS
from engine.own import load_engine
from engine.proposal import Ask, Drafter, Proposal
from tests.fixtures.models import drafted_alike, make_job


class EchoSettings(DraftingSettings):
    """The last token again and again."""

    method: Literal["echo"] = "echo"
    max_draft_tokens: int = 3

    def state(self, name: str, revision: str, *, is_stale: bool = False) -> DrafterState:
        return DrafterState(name, revision, self.max_draft_tokens, is_stale, is_scorable=True)


class EchoDrafter(Drafter):
    """Proposes what a text said last."""

    shadow_share = 1.0

    def __init__(self, name: str, settings: EchoSettings) -> None:
        self.state = settings.state(name, "echo1")

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [Proposal((ask.text[-1],) * ask.num_tokens) for ask in asks]

    def rereading(
        self, text: list[int], task: str, segment: str = "", predicted: Sequence[int] = ()
    ) -> Callable[[int], Proposal]:
        return lambda num_tokens: Proposal((text[-1],) * num_tokens)


def test_a_new_way_of_drafting_drafts_is_scored_and_measured(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "echo", lambda name, settings, _: EchoDrafter(name, settings))
    target = TargetSettings(name="tiny", source=str(tiny_models["llama"]), dtype="float64", device="cpu")
    models = ModelSettings(target=target).model_copy(update={"drafters": {"echo": EchoSettings()}})
    engine = load_engine(models, num_slots=4)
    assert [state.name for state in engine.drafters] == ["echo"]
    jobs, sampling = [make_job(f"{n} words", n) for n in range(6)], Sampling(max_tokens=24, temperature=0.0)
    alone, drafted = drafted_alike(engine, jobs, sampling, "echo", 3)
    assert all(text.drafted[0].drafter == "echo" for text in drafted.values())
    assert sum(sum(text.counts.proposed) for text in drafted.values()) > 0
    scored = [counts for text in alone.values() for counts in text.shadows]
    assert {counts.drafter for counts in scored} == {"echo"}
    assert sum(counts.counts.num_accepted for counts in scored) == sum(
        text.counts.num_accepted for text in drafted.values()
    )
    assert engine.measure_round_ms("echo", 1, 4, 16, 3) > 0
    assert engine.measure_prefill_ms("echo", 16, 3) >= 0
    engine.close()
