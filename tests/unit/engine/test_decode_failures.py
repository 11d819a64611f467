"""A step that fails, and sequences that end by themselves, in the engine over transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from alphaloop.engine import Generation, Sampling
from alphaloop.errors import DecodeFailed
from engine.own import TransformersEngine
from engine.sequence import Sequence
from tests.fixtures.models import VANILLA, decode_one, lookup_decision, make_job

GREEDY = Sampling(max_tokens=24, temperature=0.0)
PROMPT = "one two three one two three one two"
Build = Callable[..., TransformersEngine]


def decode(engine: TransformersEngine, decision: Any = VANILLA, sampling: Sampling = GREEDY) -> Generation:
    return decode_one(engine, engine.prepare(make_job(PROMPT), sampling), decision)


@pytest.mark.parametrize("steps_before", [0, 2], ids=["in the prefill", "in a round"])
@pytest.mark.parametrize(
    "cause", [torch.OutOfMemoryError("out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_failed_pass_is_a_failed_decode_and_abandon_mends_it(
    tiny_engine: Build, monkeypatch: pytest.MonkeyPatch, cause: Exception, steps_before: int
) -> None:
    engine = tiny_engine()
    expected = decode(engine)
    engine.admit(engine.prepare(make_job(PROMPT, 1), GREEDY), lookup_decision(3))
    for _ in range(steps_before):
        engine.step()

    def failing(*args: object, **kwargs: object) -> None:
        raise cause

    with monkeypatch.context() as patched:
        patched.setattr(engine._target.model, "read", failing)
        with pytest.raises(DecodeFailed, match="1 sequences failed") as failed:
            engine.step()
    assert str(cause) not in str(failed.value), "the text of a foreign exception may quote a prompt"
    assert failed.value.__cause__ is cause
    engine.abandon()
    assert engine.load().num_free == 4
    assert decode(engine).token_ids == expected.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_never_become_text(
    tiny_engine: Build, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    engine = tiny_engine()
    expected = decode(engine)
    model = engine._target.model
    read = model.read
    monkeypatch.setattr(model, "read", lambda cache, reads: torch.full_like(read(cache, reads), torch.nan))
    with pytest.raises(DecodeFailed, match="not finite"):
        decode(engine, sampling=replace(GREEDY, temperature=temperature))
    monkeypatch.undo()
    engine.abandon()
    assert decode(engine).token_ids == expected.token_ids


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_an_end_token_ends_the_text_counts_and_is_no_part_of_it(tiny_engine: Build, num_draft_tokens: int) -> None:
    engine = tiny_engine()
    decision = lookup_decision(num_draft_tokens) if num_draft_tokens else VANILLA
    whole = decode(engine, decision)
    for place in range(len(whole.token_ids)):
        end = whole.token_ids[place]
        first = whole.token_ids.index(end)
        engine._target.end_tokens = frozenset({end})
        cut = decode(engine, decision)
        assert cut.finish_reason == "stop"
        assert cut.token_ids == whole.token_ids[: first + 1]
        assert cut.text == engine._target.decode(whole.token_ids[:first])
        assert cut.counts.num_tokens == first + 1


@pytest.mark.parametrize("where", ["take", "take_deltas"])
def test_a_text_that_cannot_be_read_fails_alone(
    tiny_engine: Build, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Its neighbours in the same step go on, and their texts are those that they have alone."""
    engine = tiny_engine()
    expected = decode(engine).token_ids
    read, asked = getattr(Sequence, where), [make_job(PROMPT, number) for number in range(3)]

    def failing(self: Sequence, *args: Any) -> Any:
        if self.spec.owner == asked[1].job_id and len(self.output) > 3:
            raise RuntimeError("the text of a prompt")
        return read(self, *args)

    monkeypatch.setattr(Sequence, where, failing)
    for job, decided in zip(asked, (VANILLA, lookup_decision(3), lookup_decision(3)), strict=True):
        engine.admit(engine.prepare(job, GREEDY), decided)
    failed, finished = [], {}
    while engine.load().num_running:
        step = engine.step()
        failed += step.failed
        finished |= {one.job_id: one.token_ids for one in step.finished}
    (only,) = failed
    assert (only.job_id, only.is_final, only.error.code) == (asked[1].job_id, True, "decode_failed")
    assert "prompt" not in only.error.message
    assert finished == {asked[0].job_id: expected, asked[2].job_id: expected}
    assert engine.load().num_free == 4
