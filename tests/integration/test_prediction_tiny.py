"""A predicted text is drafted from, and changes no text: the tiny model's own text, parts of it, and anything else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from alphaloop.engine import Generation, Sampling
from alphaloop.messages import Job
from alphaloop.settings.models import LookupDrafterSettings
from engine.own import TransformersEngine
from engine.scoring import Shadows
from tests.fixtures.models import VANILLA, finish, lookup_decision, make_job

K = LookupDrafterSettings().max_draft_tokens
NUM_TEXTS = 6


@pytest.fixture(scope="module")
def engine(tiny_engine: Callable[..., TransformersEngine]) -> TransformersEngine:
    """Scores every text with look-up too."""
    made = tiny_engine("llama", num_slots=NUM_TEXTS)
    made._shadows = Shadows(made._drafters, clock=lambda: 0.0)
    return made


def predicted(number: int, text: Any) -> Job:
    prompt = f"one ab cd {number}"
    return make_job(prompt, number, **({} if text is None else {"prediction": {"type": "content", "content": text}}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_rises_and_the_text_is_the_same(
    engine: TransformersEngine, rng: random.Random, temperature: float
) -> None:
    sampling = [Sampling(max_tokens=48, temperature=temperature, seed=number) for number in range(NUM_TEXTS)]

    def decode(texts: list[Any], k: int) -> list[Generation]:
        jobs = [predicted(number, text) for number, text in enumerate(texts)]
        decided = lookup_decision(k) if k else VANILLA
        found = finish(engine, [(job, one, decided) for job, one in zip(jobs, sampling, strict=True)])
        return [found[job.job_id] for job in jobs]

    right = decode([None] * NUM_TEXTS, 0)
    texts = [one.text for one in right]
    edited = [f"{text[: len(text) // 2]}#{text[len(text) // 2 + 3 :]}" for text in texts]
    parts = [[{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}] for text in texts]
    others = ["".join(rng.choices("abcdefgh .", k=200)) for _ in texts]
    kinds = {"none": [None] * NUM_TEXTS, "all": texts, "edited": edited, "parts": parts, "others": others}
    kinds |= {"of another": [*texts[1:], texts[0]], "empty": [""] * NUM_TEXTS}
    num_rounds = {}
    for kind, given in kinds.items():
        found, shadowed = decode(given, K), decode(given, 0)
        for one, truth, shadow in zip(found, right, shadowed, strict=True):
            assert (one.token_ids, one.text) == (truth.token_ids, truth.text), kind
            assert shadow.token_ids == truth.token_ids
            (scored,) = shadow.shadows
            assert (scored.counts.trials, scored.counts.accepts) == (one.counts.trials, one.counts.accepts), kind
        num_rounds[kind] = sum(one.counts.rounds for one in found)
    # Of a random model's tokens few are what its text is split into, so that a part of each prediction is of use.
    assert num_rounds["all"] == num_rounds["parts"] < num_rounds["none"]
    assert num_rounds["edited"] < num_rounds["none"]


def test_tokens_that_the_model_does_not_have_and_endless_predictions_are_cut(engine: TransformersEngine) -> None:
    sampling = Sampling(max_tokens=8, temperature=0.0)
    long = engine.prepare(predicted(0, "ab cd " * 20_000), sampling)
    assert len(long.sampling.predicted) <= engine.identity.context_length + 16
    assert max(long.sampling.predicted) < engine._target.model.vocabulary_size
    assert engine.prepare(predicted(0, None), sampling).sampling.predicted == ()
