"""A drafter's counts from one pass over the target's text are those of decoding that text with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.messages import Job, Purpose
from tests.fixtures.drafting import draft_model
from tests.fixtures.models import VANILLA, decision, decode_one, finish, make_job
from worker.decoding.engine import TransformersEngine
from worker.decoding.scoring import score
from worker.engine import Sampling

WORDS = ("one", "two", "cd", "ab")
SAMPLING = Sampling(max_tokens=40, temperature=0.0)


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., TransformersEngine], tiny_models: dict[str, Path]) -> TransformersEngine:
    """The target's own weights draft well, another family's badly; each with a gate too."""
    drafters = {}
    for name, family, gate in (("good", "llama", 0.0), ("bad", "qwen2", 0.0), ("gated", "llama", 0.02)):
        drafters[name] = draft_model(name, tiny_models[family], num_slots=2)
        drafters[name].min_probability = gate
        drafters[name]._is_weighing = gate > 0
    return tiny_engine("llama", num_slots=2, drafters=drafters)


def control(prompt: str, drafters: Sequence[str], k: int) -> Job:
    """A control that asks for scores."""
    asked = {"purpose": Purpose.CONTROL, "scored_drafters": tuple(drafters), "probe_num_draft_tokens": k}
    return make_job(prompt, 99).model_copy(update=asked)


def of_trials(counts: AcceptanceCounts) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Rounds, cropped tokens, trials and accepts; positions that were never tested are left out."""
    width = max((i + 1 for i, number in enumerate(counts.trials) if number), default=0)
    return counts.rounds, counts.num_cropped, counts.trials[:width], counts.accepts[:width]


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("name", ["lookup", "good", "bad", "gated"])
def test_a_score_is_what_decoding_would_count(
    engine: TransformersEngine, name: str, k: int, rng: random.Random
) -> None:
    """Also where the job's own limit forbade a draft: such a place is no chance of it."""
    total = AcceptanceCounts()
    for number in range(12):
        prompt, sampling = (
            " ".join(rng.choices(WORDS, k=rng.randint(2, 8))),
            replace(SAMPLING, max_tokens=4 + 3 * number),
        )
        prepared = engine.prepare(make_job(prompt, 10 * number), sampling)
        truth = decode_one(engine, prepared, VANILLA)
        real = decode_one(engine, engine.prepare(make_job(prompt, 10 * number + 1), sampling), decision(name, k))
        assert real.token_ids == truth.token_ids
        found = score(engine._drafters[name], prepared.token_ids, truth.token_ids, k, max_tokens=sampling.max_tokens)
        assert found is not None
        scored = found.counts
        assert of_trials(scored) == of_trials(real.counts)
        assert found.chances == real.chances
        assert len(found.chances) <= sampling.max_tokens - 2, "the prefill's token, and one that the target adds"
        assert scored.num_tokens == len(truth.token_ids)
        assert all(ours >= theirs for ours, theirs in zip(scored.proposed, real.counts.proposed, strict=False))
        total += scored
    assert total.num_trials > 0


def test_a_draft_that_ends_nowhere_early_proposes_as_often_too(engine: TransformersEngine) -> None:
    prepared = engine.prepare(make_job("one two one two ab"), SAMPLING)
    truth = decode_one(engine, prepared, VANILLA)
    real = decode_one(engine, engine.prepare(make_job("one two one two ab", 1), SAMPLING), decision("good", 3))
    scored = score(engine._drafters["good"], prepared.token_ids, truth.token_ids, 3, max_tokens=40)
    assert scored is not None
    assert scored.counts == real.counts
    assert real.counts.num_accepted > 0


def test_a_drafter_of_trees_is_not_scored(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._drafters["good"], "num_branches", 2)
    assert score(engine._drafters["good"], [1, 2], [3], 2, max_tokens=4) is None


def test_a_control_is_scored_with_every_drafter_that_it_names(engine: TransformersEngine) -> None:
    prompt, names = "one two one two ab", ("lookup", "good", "bad", "gated")
    real = {
        name: decode_one(engine, engine.prepare(make_job(prompt, number), SAMPLING), decision(name, 3))
        for number, name in enumerate(names)
    }
    scored = decode_one(engine, engine.prepare(control(prompt, (*names, "unheard-of"), 3), SAMPLING), VANILLA)
    assert [one.drafter for one in scored.shadows] == list(names)
    for one in scored.shadows:
        assert (one.num_draft_tokens, one.draft_revision) == (3, engine._drafters[one.drafter].state.revision)
        assert of_trials(one.counts) == of_trials(real[one.drafter].counts)
    plain = decode_one(engine, engine.prepare(control(prompt, (), 3), SAMPLING), VANILLA)
    assert (plain.shadows, plain.token_ids) == ((), scored.token_ids)
    (one,) = decode_one(engine, engine.prepare(control(prompt, ["good"], 64), SAMPLING), VANILLA).shadows
    assert one.num_draft_tokens == engine._drafters["good"].state.max_draft_tokens, "the longest that it has"


def test_only_a_greedy_control_is_scored(engine: TransformersEngine) -> None:
    job, sampled = control("one two ab", ["good"], 3), Sampling(max_tokens=40, temperature=1.0, seed=1)
    assert decode_one(engine, engine.prepare(job, sampled), VANILLA).shadows == ()
    for purpose in (Purpose.TRAFFIC, Purpose.PROBE):
        other = engine.prepare(job.model_copy(update={"purpose": purpose}), SAMPLING)
        assert "good" not in {one.drafter for one in decode_one(engine, other, VANILLA).shadows}


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
    assert [one.drafter for one in first.shadows] == ["bad"]
    assert second.token_ids == alone.token_ids
    assert second.num_vanilla_rounds > 1
