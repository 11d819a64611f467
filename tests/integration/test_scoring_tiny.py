"""Which texts are scored, and what a score leaves alone; that it counts what decoding counts is in the matrix."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from alphaloop.engine import Sampling
from alphaloop.messages import Job, Purpose
from alphaloop.settings.models import LookupDrafterSettings
from engine.drafters.lookup import LookupDrafter
from engine.own import TransformersEngine
from engine.scoring import Shadows, score
from tests.fixtures.drafting import draft_model
from tests.fixtures.models import VANILLA, decision, decode_one, finish, make_job

SAMPLING = Sampling(max_tokens=40, temperature=0.0)


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., TransformersEngine], tiny_models: dict[str, Path]) -> TransformersEngine:
    """The target's own weights draft well, another family's badly."""
    families = {"good": "llama", "bad": "qwen2"}
    drafters = {name: draft_model(name, tiny_models[family], num_slots=2) for name, family in families.items()}
    return tiny_engine("llama", num_slots=2, drafters=drafters)


def control(prompt: str, drafters: Sequence[str], k: int) -> Job:
    """A control that asks for scores."""
    asked = {"purpose": Purpose.CONTROL, "scored_drafters": tuple(drafters), "probe_num_draft_tokens": k}
    return make_job(prompt, 99).model_copy(update=asked)


def test_a_drafter_of_trees_is_not_scored(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._drafters["good"], "num_branches", 2)
    assert score(engine._drafters["good"], [1, 2], [3], 2, max_tokens=4) is None


def test_only_a_greedy_control_is_scored(engine: TransformersEngine) -> None:
    job, sampled = control("one two ab", ["good"], 3), Sampling(max_tokens=40, temperature=1.0, seed=1)
    assert decode_one(engine, engine.prepare(job, sampled), VANILLA).shadows == ()
    for purpose in (Purpose.TRAFFIC, Purpose.PROBE):
        other = engine.prepare(job.model_copy(update={"purpose": purpose}), SAMPLING)
        assert "good" not in {shadow.drafter for shadow in decode_one(engine, other, VANILLA).shadows}


def test_a_score_leaves_alone_what_the_drafter_holds_of_others(engine: TransformersEngine) -> None:
    prompt = "ab one two cd one two ab"
    alone = decode_one(engine, engine.prepare(make_job(prompt), SAMPLING), decision("good", 4))
    engine.admit(engine.prepare(make_job(prompt), SAMPLING), decision("good", 4))
    engine.step()
    engine.admit(engine.prepare(control("one two", ["good"], 3), Sampling(max_tokens=2, temperature=0.0)), VANILLA)
    first, second = finish(engine).values()
    assert first.shadows
    assert (second.token_ids, second.counts) == (alone.token_ids, alone.counts)


def test_a_drafter_without_memory_is_not_scored_and_forgets_its_sequences(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    prompt = "ab one two cd one two ab"
    alone = decode_one(engine, engine.prepare(make_job(prompt), SAMPLING), VANILLA)
    engine.admit(engine.prepare(make_job(prompt), SAMPLING), decision("good", 1))
    engine.step()
    engine.step()
    monkeypatch.setattr(engine._drafters["good"], "choices", fail)
    asked = control("one two", ["good", "bad"], 3)
    engine.admit(engine.prepare(asked, Sampling(max_tokens=2, temperature=0.0)), VANILLA)
    first, second = finish(engine).values()
    assert [shadow.drafter for shadow in first.shadows] == ["bad"]
    assert second.token_ids == alone.token_ids
    assert second.num_vanilla_rounds > 1


#: (most tokens, most branches, least probability)
KINDS: Final = {"chain": (4, 1, 0.1), "eager": (9, 1, 0.0), "tree": (7, 3, 0.02)}


@pytest.mark.parametrize("sampling", [{"top_k": 4}, {"top_p": 0.5, "repetition_penalty": 0.8, "stop": ("o", "\n")}])
def test_a_drafter_is_credited_on_its_twins_sampled_text_with_its_twins_counts(
    tiny_engine: Callable[..., TransformersEngine], rng: random.Random, sampling: dict[str, Any]
) -> None:
    """A real run's counts follow from its text alone, whatever was drawn."""
    twins = {
        name: LookupDrafter(name, LookupDrafterSettings(max_draft_tokens=k, num_branches=b, min_probability=p))
        for kind, (k, b, p) in KINDS.items()
        for name in (kind, f"{kind} twin")
    }
    engine = tiny_engine("llama", num_slots=12, drafters=twins)
    engine._shadows = Shadows(engine._drafters, clock=lambda: 0.0)
    drawn = Sampling(max_tokens=40, temperature=0.9, **sampling)
    work = [
        (make_job(" ".join(rng.choices(("one", "two", "cd", "ab"), k=5)), rng.randrange(2**40)), kind)
        for kind in KINDS
        for _ in range(8)
    ]
    texts = finish(engine, ((job, drawn, decision(kind, KINDS[kind][0])) for job, kind in work))
    for job, kind in work:
        text = texts[job.job_id]
        assert [shadow.counts for shadow in text.shadows if shadow.drafter == f"{kind} twin"] == [text.counts]
