"""Drafters of the same weights are credited with the rounds of the one that decodes, over tiny models in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch
import transformers

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import Generation, Sampling, ShadowCounts
from alphaloop.messages import Purpose
from engine.drafters.draft_model import DraftModelDrafter
from engine.drafters.draft_vocabulary import DraftTokens
from engine.network.language_model import LanguageModel
from engine.own import TransformersEngine
from engine.proposal import Ask, SharedWeightDrafter
from engine.sampling import TokenChooser
from tests.fixtures.models import NUM_TOKENS, decision, finish, make_job

Build = Callable[..., TransformersEngine]
MOST: Final = 5
NUM_JOBS: Final = 12
#: A gate that no draft falls below, one that every first token falls below, and none.
GATES: Final = {"plain": 0.0, "open": 1e-300, "shut": 1 - 1e-12, "gated": 0.01}
SAMPLINGS: Final = {
    "greedy": Sampling(max_tokens=40, temperature=0.0),
    "penalised": Sampling(max_tokens=40, temperature=0.0, frequency_penalty=0.2),
    "drawn": Sampling(max_tokens=40, temperature=1.0, top_k=6),
    "seeded": Sampling(max_tokens=40, temperature=1.0, top_k=6, seed=7),
}


@pytest.fixture(scope="module")
def engine(tiny_engine: Build, tiny_models: dict[str, Path]) -> TransformersEngine:
    """A target, and its own first layer as a draft behind several gates."""
    folder = tiny_models["llama"]
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    whole.model.layers = whole.model.layers[:1]
    whole.config.num_hidden_layers = 1
    model = LanguageModel(whole, 2048)
    shared_weights = {
        name: SharedWeightDrafter(DrafterState(name, f"r-{name}", MOST, shared_weights="r"), gate)
        for name, gate in GATES.items()
    }
    drafters = {
        name: DraftModelDrafter(
            one.state,
            model,
            DraftTokens(NUM_TOKENS, NUM_TOKENS, frozenset({0})),
            num_slots=NUM_JOBS,
            context_length=2048,
            min_probability=one.min_probability,
            shared_weights=[other for other in shared_weights.values() if other is not one],
        )
        for name, one in shared_weights.items()
    }
    return tiny_engine("llama", num_slots=NUM_JOBS, drafters=drafters)


def decoded(
    engine: TransformersEngine,
    rng: random.Random,
    drafter: str,
    k: int,
    sampling: Sampling,
    purpose: Purpose = Purpose.TRAFFIC,
) -> list[Generation]:
    """Together, because a round of several sequences takes as long as one of a single sequence."""
    named = [make_job(f"{rng.choice(['ab', 'cd', 'one'])} {number}", number) for number in range(NUM_JOBS)]
    jobs = (job.model_copy(update={"purpose": purpose}) for job in named)
    return list(finish(engine, ((job, sampling, decision(drafter, k)) for job in jobs)).values())


def shadow(generation: Generation, drafter: str) -> ShadowCounts:
    (found,) = (one for one in generation.shadows if one.drafter == drafter)
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_drafter_that_would_have_proposed_the_same_is_credited_with_the_same(
    engine: TransformersEngine, rng: random.Random, sampling: str
) -> None:
    total = AcceptanceCounts()
    for run in decoded(engine, rng, "plain", MOST, SAMPLINGS[sampling]):
        same = shadow(run, "open")
        assert same.counts == run.counts
        assert same.chances[: len(run.chances)] == run.chances
        assert not any(same.chances[len(run.chances) :])
        total += run.counts
    assert 0 < total.num_accepted < total.num_trials, "both outcomes are seen"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_gated_run_credits_drafts_without_a_gate_as_far_as_it_went(
    engine: TransformersEngine, rng: random.Random, sampling: str
) -> None:
    total = AcceptanceCounts()
    for run in decoded(engine, rng, "gated", MOST, SAMPLINGS[sampling]):
        plain = shadow(run, "plain")
        size = len(run.counts.trials)
        assert (plain.counts.trials[:size], plain.counts.accepts[:size]) == (run.counts.trials, run.counts.accepts)
        assert not any(plain.counts.trials[size:])
        assert plain.chances[:size] == run.counts.trials, "what the gate left out is no chance"
        assert {one.drafter for one in run.shadows} & GATES.keys() == {"plain", "shut"}, "a wider gate: nobody knows"
        total += run.counts
    assert any(before > after for before, after in zip(total.accepts, total.trials[1:], strict=False)), "it closed"


def test_what_a_gate_costs_is_measured_without_it(engine: TransformersEngine) -> None:
    drafter = engine._drafters["shut"]
    text = [5, 6, 7]
    ask = Ask("timed", text, MOST, TokenChooser("timed", SAMPLINGS["greedy"], len(text)))
    drafter.open("timed", text, SAMPLINGS["greedy"], "")
    for is_timed, num_tokens in ((False, 1), (True, MOST)):
        text.append(8)
        (proposal,) = drafter.propose([replace(ask, is_timed=is_timed)])
        assert len(proposal.tokens) == num_tokens
    drafter.close("timed")


def test_probes_credit_nobody(engine: TransformersEngine, rng: random.Random) -> None:
    runs = decoded(engine, rng, "plain", MOST, SAMPLINGS["greedy"], purpose=Purpose.PROBE)
    assert {run.shadows for run in runs} == {()}
