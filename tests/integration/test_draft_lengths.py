"""A decision may ask for other draft lengths while a batch drains: each round asks for what is due, and says so.

The draft is the target itself, so every draft is accepted, and what is asked for can be read off the counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.policy import Decision
from tests.fixtures.drafting import draft_model
from tests.fixtures.models import VANILLA, decision, make_job
from worker.decoding.engine import TransformersEngine
from worker.engine import Generation, Sampling

SHORT, LONG = 7, 41
Build = Callable[..., TransformersEngine]


@pytest.fixture
def engine(tiny_engine: Build, tiny_models: dict[str, Path]) -> TransformersEngine:
    return tiny_engine("llama", drafters={"itself": draft_model("itself", tiny_models["llama"], num_slots=4)})


def decode(engine: TransformersEngine, chosen: Decision) -> list[Generation]:
    """A short job and a long one together, in this order."""
    for number, max_tokens in enumerate((SHORT, LONG)):
        job = make_job("def the def the def the", number)
        engine.admit(engine.prepare(job, Sampling(max_tokens=max_tokens, temperature=0.0)), chosen)
    found: list[Generation] = []
    while engine.load().num_running:
        found += engine.step().finished
    return sorted(found, key=lambda generation: generation.counts.num_tokens)


def test_the_last_of_a_batch_drafts_as_far_as_is_best_alone(engine: TransformersEngine) -> None:
    short, long = decode(engine, replace(decision("itself", 1), num_draft_tokens_by_batch=(5, 1)))
    plain = decode(engine, VANILLA)
    assert [one.token_ids for one in (short, long)] == [one.token_ids for one in plain]
    if long.counts.num_tokens < LONG:
        pytest.fail("the tiny model ended its text: the lengths below are those of a whole one")
    # Two tokens a round while both run: 1 by the prefill, 2, 2, 2. Alone six a round: 34 = 5 · 6 + 4, three drafts.
    assert short.chances == (3,)
    assert long.chances == (3 + 6, 6, 6, 5, 5)
    assert long.counts.accepts == long.chances


def test_with_one_length_chances_follow_from_the_counts(engine: TransformersEngine, rng: random.Random) -> None:
    """But for the last round, which the token limit shortens: there the engine knows better."""
    k = rng.randint(1, 6)
    for generation in decode(engine, decision("itself", k)):
        counts = generation.counts
        derived = (counts.rounds - 1, *counts.accepts)[:k]
        assert all(0 <= d - c <= 1 for c, d in zip(generation.chances, derived, strict=False))
        now = datetime(2026, 1, 1, tzinfo=UTC)
        sums = EvidenceSums.of_job(counts, k, now, counts.num_tokens, chances=generation.chances)
        assert sums.trials == sums.chances
