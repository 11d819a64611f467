"""On a real model in float32: one draft pass over the target's text gives the counts of decoding with that draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.policy import Decision
from tests.fixtures.models import VANILLA, decision, make_job
from worker.engine import Generation, PreparedJob, Sampling

if TYPE_CHECKING:
    from worker.decoding.drafters.draft_model import DraftModelDrafter
    from worker.decoding.engine import TransformersEngine

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLING = Sampling(max_tokens=24, temperature=0.0)
PROMPTS = (
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n",
    "red, green, blue, red, green, blue, red, green, blue,",
    "The sky is blue because",
    "Monday, Tuesday, Wednesday,",
)
NUM_LAYERS = 24  #: of the target's 30: a draft that is right now and then


@pytest.fixture
def draft(smollm2_source: str) -> DraftModelDrafter:
    from worker.decoding.drafters.draft_model import DraftModelDrafter
    from worker.decoding.drafters.draft_vocabulary import DraftTokens
    from worker.decoding.models import load_weights
    from worker.decoding.network.language_model import LanguageModel

    model = load_weights(smollm2_source, None, "float32", torch.device("cpu")).model
    model.model.layers = model.model.layers[:NUM_LAYERS]
    model.config.num_hidden_layers = NUM_LAYERS
    language_model = LanguageModel(model, 2048)
    columns = language_model.vocabulary_size
    tokens = DraftTokens(columns, columns, frozenset())
    return DraftModelDrafter(DrafterState("cut", "test", 8), language_model, tokens, num_slots=1, context_length=2048)


def decode(engine: TransformersEngine, prepared: PreparedJob, decided: Decision) -> Generation:
    engine.admit(prepared, decided)
    while not (finished := engine.step().finished):
        pass
    return finished[0]


def test_a_score_is_what_decoding_would_count(smollm2_engine: TransformersEngine, draft: DraftModelDrafter) -> None:
    from worker.decoding.scoring import score

    engine = smollm2_engine
    engine._drafters["cut"] = draft
    try:
        num_accepted = num_rejected = 0
        for number, prompt in enumerate(PROMPTS):
            prepared = engine.prepare(make_job(prompt, 10 * number), SAMPLING)
            truth = decode(engine, prepared, VANILLA)
            for name in ("lookup", "cut"):
                real = decode(engine, engine.prepare(make_job(prompt, 10 * number + 1), SAMPLING), decision(name, 3))
                assert real.token_ids == truth.token_ids
                scored = score(
                    engine._drafters[name], prepared.token_ids, truth.token_ids, 3, max_tokens=SAMPLING.max_tokens
                )
                assert scored == real.counts
                num_accepted += real.counts.num_accepted
                num_rejected += real.counts.num_trials - real.counts.num_accepted
        assert num_accepted > 0
        assert num_rejected > 0
    finally:
        del engine._drafters["cut"]
