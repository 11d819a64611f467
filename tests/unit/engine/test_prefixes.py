"""Reading prompts: how much a round reads beside what is decoded; and shared prefixes, read once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest

from alphaloop.engine import Sampling
from engine.network.language_model import PREFILL_CHUNK
from engine.network.slots import SHORTEST, WORTH_A_PASS, num_shared
from engine.own import SHARED_CHUNK, TransformersEngine
from tests.fixtures.models import VANILLA, make_job, steps

GREEDY: Final = Sampling(max_tokens=4, temperature=0.0)
ENDLESS: Final = replace(GREEDY, max_tokens=40)


@pytest.fixture
def engine(tiny_engine: Callable[..., TransformersEngine]) -> TransformersEngine:
    return tiny_engine("llama", num_slots=8)


def admit(engine: TransformersEngine, prompts: list[str]) -> list[int]:
    """Tokens of each prompt."""
    prepared = [engine.prepare(make_job(prompt, i), GREEDY) for i, prompt in enumerate(prompts)]
    for one in prepared:
        engine.admit(one, VANILLA)
    return [len(one.token_ids) for one in prepared]


def words(rng: random.Random, num: int) -> str:
    return "".join(rng.choice("abcdefgh") for _ in range(num))


def test_a_common_beginning_is_read_once(engine: TransformersEngine, rng: random.Random) -> None:
    beginning = words(rng, WORTH_A_PASS["cpu"])
    lengths = admit(engine, [f"{beginning}{letter} {words(rng, 20)}" for letter in "ABCDEF"])
    texts = [engine._admitted.running[number].text for number in range(6)]
    shared = min(num_shared(texts[0], text, len(text)) for text in texts[1:])
    assert shared > SHORTEST
    first, *others = steps(engine)
    assert first.num_prefill_tokens == lengths[0]
    assert first.num_prefill_tokens + sum(step.num_prefill_tokens for step in others) <= sum(lengths) - 5 * shared


def test_a_common_beginning_may_be_as_wide_as_the_memory(engine: TransformersEngine, rng: random.Random) -> None:
    """After the first piece the slots have memory for that piece, and all of it is copied."""
    beginning = words(rng, 2 * PREFILL_CHUNK)
    lengths = admit(engine, [f"{beginning}{letter}" for letter in "ABC"])
    assert min(lengths) > PREFILL_CHUNK
    assert sum(step.num_prefill_tokens for step in steps(engine)) < max(lengths) + 3 * SHORTEST


def test_a_job_that_joins_reads_what_no_running_one_has_read(engine: TransformersEngine, rng: random.Random) -> None:
    prompt = words(rng, 60)
    (num_tokens,) = admit(engine, [prompt])
    assert engine.step().num_prefill_tokens == num_tokens
    engine.admit(engine.prepare(make_job(prompt, 1), replace(GREEDY, max_tokens=2)), VANILLA)
    assert engine.step().num_prefill_tokens == 0, "its last token is a pending one"
    # Token ids, because a text may end within a character that takes several tokens.
    shorter, longer = (generation.token_ids for step in steps(engine) for generation in step.finished)
    assert longer[: len(shorter)] == shorter


def test_nobody_waits_for_a_few_tokens(engine: TransformersEngine, rng: random.Random) -> None:
    beginning = words(rng, SHORTEST + 4)
    lengths = admit(engine, [f"{beginning}{letter}{words(rng, 30)}" for letter in "AB"])
    assert engine.step().num_prefill_tokens == sum(lengths)


@pytest.mark.parametrize(("is_streamed", "chunk"), [(True, SHARED_CHUNK), (False, PREFILL_CHUNK)])
def test_a_prompt_that_joins_is_read_in_small_pieces_where_somebody_reads_along(
    engine: TransformersEngine, rng: random.Random, is_streamed: bool, chunk: int
) -> None:
    engine.admit(engine.prepare(make_job("short", 0, stream=is_streamed), ENDLESS), VANILLA)
    engine.step()
    prompt = words(rng, 3 * PREFILL_CHUNK)
    joined = engine.prepare(make_job(prompt, 1), ENDLESS)
    assert len(joined.token_ids) > PREFILL_CHUNK
    engine.admit(joined, VANILLA)
    step = engine.step()
    assert (step.batch, step.num_prefill_tokens, step.num_positions) == (2, chunk, 1)


def test_where_most_wait_for_their_prompts_these_come_first(engine: TransformersEngine, rng: random.Random) -> None:
    engine.admit(engine.prepare(make_job("short", 0, stream=True), ENDLESS), VANILLA)
    engine.step()
    for number in (1, 2):
        prompt = words(rng, 2 * PREFILL_CHUNK)
        engine.admit(engine.prepare(make_job(prompt, number), ENDLESS), VANILLA)
    assert engine.step().num_prefill_tokens == PREFILL_CHUNK
