"""A draft length may change between any two rounds: each round asks for what is due, and says so.

The draft is the target itself, so every draft is accepted, and what is asked for can be read off the counts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alphaloop.deciding.decision import Decision
from alphaloop.engine import Generation, Sampling
from engine.own import TransformersEngine
from tests.fixtures.drafting import draft_model
from tests.fixtures.models import VANILLA, decision, make_job, steps

SHORT, LONG = 7, 41
Build = Callable[..., TransformersEngine]


@pytest.fixture
def engine(tiny_engine: Build, tiny_models: dict[str, Path]) -> TransformersEngine:
    return tiny_engine("llama", drafters={"itself": draft_model("itself", tiny_models["llama"], num_slots=4)})


def decode(engine: TransformersEngine, chosen: Decision, alone: int | None = None) -> list[Generation]:
    """A short job and a long one together, in this order; the long one drafts `alone` tokens once it is alone."""
    for number, max_tokens in enumerate((SHORT, LONG)):
        # Neither text ends by itself.
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, logit_bias=((0, -1000.0),))
        engine.admit(engine.prepare(make_job("def the def the def the", number), sampling), chosen)
    found: list[Generation] = []
    for step in steps(engine):
        found += step.finished
        if len(found) == 1 and alone is not None:
            (last,) = engine._admitted.running
            engine.redraft(last.job_id, "itself", alone)
    return sorted(found, key=lambda generation: generation.counts.num_tokens)


def test_the_last_of_a_batch_drafts_as_far_as_is_best_alone(engine: TransformersEngine) -> None:
    short, long = decode(engine, decision("itself", 1), alone=5)
    plain = decode(engine, VANILLA)
    assert [one.token_ids for one in (short, long)] == [one.token_ids for one in plain]
    # Two tokens a round while both run: 1 by the prefill, 2, 2, 2. Alone six a round: 34 = 5 · 6 + 4, three drafts.
    assert short.chances == (3,)
    assert long.chances == (3 + 6, 6, 6, 5, 5)
    assert long.counts.accepts == long.chances
    (drafted,) = long.drafted
    assert (drafted.drafter, drafted.num_draft_tokens, long.num_vanilla_rounds) == ("itself", 5, 1)


def test_only_rounds_that_were_allowed_a_draft_are_the_drafters(engine: TransformersEngine) -> None:
    short, long = decode(engine, VANILLA, alone=3)
    assert (short.drafted, short.num_vanilla_rounds) == ((), SHORT)
    (drafted,) = long.drafted
    assert long.num_vanilla_rounds == SHORT
    # 34 tokens are left: eight rounds of four, then one with room for a single draft.
    assert (drafted.counts.rounds, drafted.counts.num_tokens) == (9, LONG - SHORT)
    assert drafted.chances == drafted.counts.accepts == (9, 8, 8) == long.chances
