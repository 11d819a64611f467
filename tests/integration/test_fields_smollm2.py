"""What a user has: SmolLM2 with its own tokenizer and template, greedy in float32, with and without look-up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

import pytest

from alphaloop.engine import Sampling
from alphaloop.errors import InvalidField
from alphaloop.messages import Job, Origin, parse_job
from engine.own import TransformersEngine
from engine.prompts import bad_word_tokens
from tests.fixtures.chat_templates import WEATHER
from tests.fixtures.models import VANILLA, finish, lookup_decision

ASKED: Final = "Repeat after me, five times: the river runs to the sea, and the sea is never full."
PLAIN: Final = Sampling(max_tokens=20, temperature=0.0)


def ask(number: int, **body: object) -> Job:
    value = {"task": "chat", "body": {"messages": [{"role": "user", "content": ASKED}], **body}}
    return parse_job(json.dumps(value).encode(), Origin("c", "jobs.chat", 0, number), task="chat")


def test_fields_hold_with_and_without_drafts(smollm2_engine: TransformersEngine) -> None:
    engine = smollm2_engine
    whole = finish(engine, [(ask(0), PLAIN, VANILLA)])[ask(0).job_id]
    words = ("river", "the sea")
    fields = replace(PLAIN, bad_words=words, min_tokens=18, num_logprobs=2)
    plain, drafted = (
        finish(engine, [(ask(n), fields, decided)])[ask(n).job_id]
        for n, decided in ((1, VANILLA), (2, lookup_decision(6)))
    )
    assert any(word in whole.text for word in words)
    assert plain.text == drafted.text
    assert not any(word in plain.text for word in words)
    assert len(plain.token_ids) >= 18
    (one,), (other,) = plain.choices, drafted.choices
    assert one.logprobs is not None
    assert other.logprobs is not None
    assert [told.token for told in one.logprobs] == [told.token for told in other.logprobs]
    assert [told.logprob for told in one.logprobs] == pytest.approx([told.logprob for told in other.logprobs], abs=1e-3)
    assert b"".join(bytes(told.bytes or ()) for told in one.logprobs).decode().startswith(plain.text)


def test_a_bad_word_is_barred_wherever_vllm_bars_it_and_in_its_usual_spelling_too(
    smollm2_engine: TransformersEngine,
) -> None:
    """vLLM 0.32, SamplingParams.update_from_tokenizer: behind a space only where that has as many tokens."""
    tokenizer = smollm2_engine._target.tokenizer

    def vllms(word: str) -> set[tuple[int, ...]]:
        first, other = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (word, f" {word}"))
        return {first, other} if other[0] != first[0] and len(other) == len(first) else {first}

    words = ("Paris", "river", "the sea", "provide", "calling", "released")
    ours = {word: set(bad_word_tokens(tokenizer, (word,))) for word in words}
    assert all(vllms(word) <= ours[word] for word in words)
    written_by_vllm = {tokenizer.decode(one) for word in words for one in ours[word] - vllms(word)}
    assert written_by_vllm == {" provide", " calling", " released"}


def test_its_template_knows_no_tools(smollm2_engine: TransformersEngine) -> None:
    with pytest.raises(InvalidField) as caught:
        smollm2_engine.prepare(ask(5, tools=[WEATHER]), PLAIN)
    assert caught.value.field == "body.tools"
