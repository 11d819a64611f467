"""What a decision is told about memory and about drafters that cannot serve, against what then happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import transformers

from tests.fixtures.drafting import draft_model
from tests.fixtures.models import NUM_TOKENS, decision, make_job
from worker.decoding.device import available_bytes
from worker.decoding.network.kv_layout import KvShape
from worker.engine import PreparedJob, Sampling

if TYPE_CHECKING:
    from worker.decoding.drafters.draft_model import DraftModelDrafter
    from worker.decoding.engine import TransformersEngine

Build = Callable[..., "TransformersEngine"]
GREEDY: Final = Sampling(max_tokens=30, temperature=0.0)


@pytest.fixture
def draft(tiny_models: dict[str, Path]) -> DraftModelDrafter:
    return draft_model("small", tiny_models["qwen2"], num_slots=4)


@pytest.fixture
def engine(tiny_engine: Build, draft: DraftModelDrafter) -> TransformersEngine:
    return tiny_engine("llama", drafters={"small": draft})


def prepare(engine: TransformersEngine, num_tokens: int, number: int = 0) -> PreparedJob:
    """A job whose prompt has exactly so many tokens."""
    prepared = engine.prepare(make_job("z" * num_tokens, number), GREEDY)
    assert len(prepared.token_ids) == num_tokens, "the tiny tokenizer has no token for several of them"
    return prepared


def test_keys_and_values_take_what_was_told_beforehand(
    engine: TransformersEngine, tiny_models: dict[str, Path]
) -> None:
    before = engine.memory()
    configs = {name: transformers.AutoConfig.from_pretrained(tiny_models[name]) for name in ("llama", "qwen2")}
    assert before.target_per_token == KvShape.of(configs["llama"], engine._target.model.kv_shape.dtype).bytes_per_token
    assert before.drafts_per_token.keys() == {"small"}, "look-up keeps nothing"
    assert before.held == 0
    jobs = [prepare(engine, length, number) for number, length in enumerate((20, 150, 90))]
    for job in jobs:
        engine.admit(job, decision("small", 4))
    most = 0
    while engine.load().num_running:
        most = max(most, engine.memory().held)
        engine.step()
    longest = 150 + GREEDY.max_tokens
    assert 0 < most <= before.of_target(3, longest) + before.of_draft("small", 3, longest)
    assert most > before.of_target(3, longest), "the draft holds some of it"
    assert engine.memory().held == 0


def test_what_is_left_for_drafts_is_what_the_target_and_the_passes_leave(engine: TransformersEngine) -> None:
    memory = engine.memory()
    assert 0 < memory.free <= 2 * available_bytes(engine._target.device)
    assert memory.per_row == NUM_TOKENS * (4 + 8)
    of_target = 3 * 256 * memory.target_per_token
    assert memory.left_for_drafts(3, 200, 5) == memory.free + memory.held - of_target - 3 * 5 * memory.per_row
    assert memory.left_for_drafts(10**9, 200, 0) == memory.free + memory.held - memory.target_limit, "others wait"


def test_a_draft_that_cannot_read_a_prompt_is_named_and_proposes_nothing(
    engine: TransformersEngine, draft: DraftModelDrafter
) -> None:
    draft.context_length = 40
    for length, is_named in ((39, False), (40, True), (60, True)):
        job = prepare(engine, length)
        assert (engine.unserved([job]).keys() == {"small"}) == is_named
        assert engine.unserved([job, prepare(engine, 5, 1)]) == {}, "some of the batch it can serve"
        engine.admit(job, decision("small", 4))
        while not (finished := engine.step().finished):
            pass
        assert (finished[0].counts.num_trials == 0) == is_named
    assert "60 tokens" in engine.unserved([job])["small"]
    assert "40" in engine.unserved([job])["small"]
