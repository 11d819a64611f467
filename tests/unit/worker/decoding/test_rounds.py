"""How much of a prompt a round reads beside what is being decoded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import pytest

from tests.fixtures.models import VANILLA, make_job
from worker.decoding.engine import SHARED_CHUNK
from worker.decoding.network.language_model import PREFILL_CHUNK
from worker.engine import Sampling

if TYPE_CHECKING:
    from worker.decoding.engine import TransformersEngine

GREEDY: Final = Sampling(max_tokens=40, temperature=0.0)


@pytest.mark.parametrize(("is_streamed", "chunk"), [(True, SHARED_CHUNK), (False, PREFILL_CHUNK)])
def test_a_prompt_that_joins_is_read_in_small_pieces_where_somebody_reads_along(
    tiny_engine: Callable[..., TransformersEngine], rng: random.Random, is_streamed: bool, chunk: int
) -> None:
    engine = tiny_engine("llama", num_slots=2)
    engine.admit(engine.prepare(make_job("short", 0, stream=is_streamed), GREEDY), VANILLA)
    engine.step()
    prompt = "".join(rng.choice("abcdefgh") for _ in range(3 * PREFILL_CHUNK))
    joined = engine.prepare(make_job(prompt, 1), GREEDY)
    assert len(joined.token_ids) > PREFILL_CHUNK
    engine.admit(joined, VANILLA)
    step = engine.step()
    assert (step.batch, step.num_prefill_tokens, step.num_positions) == (2, chunk, 1)


def test_where_most_wait_for_their_prompts_these_come_first(
    tiny_engine: Callable[..., TransformersEngine], rng: random.Random
) -> None:
    engine = tiny_engine("llama", num_slots=3)
    engine.admit(engine.prepare(make_job("short", 0, stream=True), GREEDY), VANILLA)
    engine.step()
    for number in (1, 2):
        prompt = "".join(rng.choice("abcdefgh") for _ in range(2 * PREFILL_CHUNK))
        engine.admit(engine.prepare(make_job(prompt, number), GREEDY), VANILLA)
    assert engine.step().num_prefill_tokens == PREFILL_CHUNK
