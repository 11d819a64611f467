"""Plain fields, logprobs and several texts on tiny models in float64: the same in every mode, as plain passes say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.engine import Generation, Sampling, TokenDelta
from alphaloop.errors import InvalidField
from alphaloop.messages import Constraint
from engine.own import TransformersEngine
from tests.fixtures.drafting import draft_model
from tests.fixtures.models import NUM_TOKENS, VANILLA, decision, finish, make_job, steps

Build = Callable[..., TransformersEngine]
PROMPTS: Final = ("one two one two one", "JSON (JavaScript Object Notation)", "the theory of the other thing " * 3)


def test_what_may_leave_nothing_to_write_is_refused(tiny_engine: Build) -> None:
    engine = tiny_engine("llama")
    token = engine._target.tokenizer("x")["input_ids"][-1]
    end = min(engine._target.end_tokens)
    for settings, field in (
        ({"allowed_token_ids": (token,), "bad_words": ("x",)}, "body.allowed_token_ids"),
        ({"allowed_token_ids": (end,), "min_tokens": 2}, "body.allowed_token_ids"),
        ({"allowed_token_ids": (NUM_TOKENS,)}, "body.allowed_token_ids"),
    ):
        with pytest.raises(InvalidField) as caught:
            engine.prepare(make_job("a"), Sampling(max_tokens=4, temperature=0.0, **settings))  # type: ignore[arg-type]
        assert caught.value.field == field


def test_a_draft_that_knows_no_allowed_token_proposes_nothing_and_fails_nothing(
    tiny_engine: Build, tiny_models: dict[str, Path]
) -> None:
    drafter = draft_model("another model", tiny_models["qwen2"], num_slots=4)
    engine = tiny_engine("llama", drafters={"another model": drafter})
    # It knows tokens below 5 only.
    drafter.tokens = replace(drafter.tokens, num_shared=5)
    for how in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 1}):
        sampling = Sampling(max_tokens=8, allowed_token_ids=(5, 6), **how)  # type: ignore[arg-type]
        (made,) = finish(engine, [(make_job("a"), sampling, decision("another model", 4))]).values()
        assert set(made.token_ids) <= {5, 6}
        assert made.counts.num_accepted == 0 == sum(made.counts.proposed)
    assert not engine._open_drafters.ended


SEEDED: Final = Sampling(max_tokens=20, temperature=0.9, seed=40)


@pytest.mark.parametrize("num_slots", [1, 3, 8])
@pytest.mark.parametrize("drafter", [None, "lookup", "another model"])
def test_a_jobs_texts_are_those_of_jobs_with_their_seeds(
    tiny_engine: Build, tiny_models: dict[str, Path], num_slots: int, drafter: str | None
) -> None:
    drafters = {"another model": draft_model("another model", tiny_models["qwen2"], num_slots=num_slots)}
    engine = tiny_engine("llama", num_slots=num_slots, drafters=drafters)
    decided = VANILLA if drafter is None else decision(drafter, 4)
    prompt = PROMPTS[2] * 3
    alone = [
        finish(engine, [(make_job(prompt, n), replace(SEEDED, seed=40 + n), decided)]).popitem()[1] for n in range(4)
    ]
    other = make_job(PROMPTS[0], 99)
    job = make_job(prompt, 9, stream=True)
    engine.admit(engine.prepare(job, replace(SEEDED, n=4, num_logprobs=None)), decided)
    assert engine.load().num_running == 4
    assert not engine.load().num_free or num_slots == 8
    deltas: list[TokenDelta] = []
    ended: list[Generation] = []
    num_read = 0
    most = 0
    for step in steps(engine, [(other, SEEDED, VANILLA)]):
        deltas += [one for one in step.deltas if one.job_id == job.job_id]
        ended += [one for one in step.finished if one.job_id == job.job_id]
        assert set(step.tokens_by_job) <= {job.job_id, other.job_id}
        assert set(step.drafting) <= {job.job_id}
        most = max(most, step.sequences_by_job.get(job.job_id, 0))
        num_read += step.num_prefill_tokens
    (made,) = ended
    assert most == min(4, num_slots)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in made.choices] == [one.text for one in alone]
    assert made.text == alone[0].text
    assert made.token_ids == tuple(token for one in alone for token in one.token_ids)
    assert made.num_prompt_tokens == alone[0].num_prompt_tokens
    assert made.counts.num_tokens == len(made.token_ids)
    expected = sum((one.counts for one in alone), AcceptanceCounts())
    assert (made.counts.rounds, made.counts.accepts) == (expected.rounds, expected.accepts)
    assert sum((one.counts for one in made.drafted), AcceptanceCounts()).accepts == expected.accepts
    assert [one.index for one in deltas] == list(range(len(deltas)))
    for number, choice in enumerate(made.choices):
        assert "".join(one.text for one in deltas if one.choice == number) == choice.text
    if num_slots == 8:
        other_prompt = len(engine.prepare(other, SEEDED).token_ids)
        assert num_read < 2 * made.num_prompt_tokens + other_prompt, "the prompt was read for each text"


def test_a_jobs_texts_are_cancelled_and_redrafted_together(tiny_engine: Build) -> None:
    engine = tiny_engine("llama", num_slots=2)
    job, after = make_job(PROMPTS[0], 1), make_job(PROMPTS[1], 2)
    several = engine.prepare(job, replace(SEEDED, n=5))
    engine.admit(several, VANILLA)
    assert not engine.has_room(engine.prepare(after, SEEDED)), "its other texts go first"
    engine.step()
    engine.redraft(job.job_id, "lookup", 3)
    assert [sequence.drafting.name for sequence in engine._admitted.everyone] == ["lookup"] * 5
    while len(engine._admitted.everyone) > 3:
        engine.step()
    assert engine.cancel(job.job_id)
    assert not engine.cancel(job.job_id)
    assert engine.load().num_running == 0
    engine.admit(several, decision("lookup", 3))
    (again,) = finish(engine).values()
    assert len(again.choices) == 5, "nothing of the cancelled one is left"
    engine.admit(several, VANILLA)
    engine.step()
    engine.abandon()
    assert engine.load().num_running == 0


def test_texts_without_a_seed_differ_and_are_the_same_again(tiny_engine: Build) -> None:
    engine = tiny_engine("llama", num_slots=4)
    sampling = Sampling(max_tokens=16, temperature=1.0, n=4)
    first, again = (finish(engine, [(make_job(PROMPTS[0], 3), sampling, VANILLA)]).popitem()[1] for _ in range(2))
    assert len({choice.text for choice in first.choices}) == 4
    assert [one.text for one in first.choices] == [one.text for one in again.choices]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prediction_is_drafted_from_in_parts_and_where_it_is_partly_right(
    tiny_engine: Build, temperature: float
) -> None:
    engine, numbers = tiny_engine("llama", num_slots=6), range(6)

    def decode(predicted: list[object], k: int) -> list[Generation]:
        sampling = Sampling(max_tokens=48, temperature=temperature, seed=3)
        predictions = [{"prediction": {"type": "content", "content": text}} if text else {} for text in predicted]
        jobs = [make_job(f"one ab cd {n}", n, **fields) for n, fields in zip(numbers, predictions, strict=True)]
        texts = finish(engine, [(job, sampling, decision("lookup", k)) for job in jobs])
        return [texts[job.job_id] for job in jobs]

    right = decode([None] * 6, 0)
    texts = [text.text for text in right]
    kinds: dict[str, list[object]] = {
        "none": [None] * 6,
        "all": [*texts],
        "edited": [f"{text[: len(text) // 2]}#{text[len(text) // 2 + 3 :]}" for text in texts],
        "parts": [[{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}] for text in texts],
    }
    num_rounds = {}
    for kind, predicted in kinds.items():
        drafted = decode(predicted, 12)
        assert [text.token_ids for text in drafted] == [text.token_ids for text in right], kind
        num_rounds[kind] = sum(text.counts.rounds for text in drafted)
    # Of a random model's tokens few are what its text is split into, so that a part of each prediction is of use.
    assert num_rounds["all"] == num_rounds["parts"] < num_rounds["none"]
    assert num_rounds["edited"] < num_rounds["none"]


def test_predicted_tokens_that_the_model_does_not_have_and_endless_predictions_are_cut(tiny_engine: Build) -> None:
    engine, sampling = tiny_engine("llama"), Sampling(max_tokens=8, temperature=0.0)
    job = make_job("one", prediction={"type": "content", "content": "ab cd " * 20_000})
    predicted = engine.prepare(job, sampling).sampling.predicted
    assert len(predicted) <= engine.identity.context_length + 16
    assert max(predicted) < engine._target.model.vocabulary_size
    assert engine.prepare(make_job("one"), sampling).sampling.predicted == ()


def test_fields_that_leave_no_token_end_their_job_alone(tiny_engine: Build) -> None:
    engine = tiny_engine()
    tokens = tuple(engine._target.tokenizer("the", add_special_tokens=False)["input_ids"])
    thing = Constraint("regex", "the thing", "body.structured_outputs.regex")
    good = Sampling(max_tokens=60, temperature=0.0, constraint=thing)
    bad = [
        replace(good, allowed_token_ids=tokens),
        replace(good, temperature=0.8, bad_words=("t", "th", "the")),
        replace(good, constraint=Constraint("choice", '["yes"]', "body.x"), min_tokens=30),
        replace(good, temperature=0.8, seed=7, allowed_token_ids=tokens, n=2),
    ]
    work = [(make_job("of it", n), sampling, decision("lookup", 3)) for n, sampling in enumerate([*bad, good])]
    done = list(steps(engine, work))
    failed = {failure.job_id: failure.error.code for step in done for failure in step.failed}
    assert failed == {job.job_id: "grammar_conflict" for job, _, _ in work[:-1]}
    assert [text.text for step in done for text in step.finished] == ["the thing"]
    assert engine.load().num_running == 0


WORDS: Final = Constraint("regex", "[a-z ]{3,30}", "body.structured_outputs.regex")
#: Settings whose sequences of one round are verified in several groups, some in one group with others' constraints.
UNLIKE: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "constraint": WORDS},
    {"temperature": 1.1},
    {"temperature": 1.1, "top_k": 7},
    {"temperature": 1.1, "top_k": 7, "constraint": WORDS},
    {"temperature": 1.1, "top_p": 0.9},
    {"temperature": 1.1, "top_p": 0.9, "constraint": WORDS},
    {"temperature": 1.1, "top_p": 0.9, "presence_penalty": 1.5, "num_logprobs": 2},
    {"temperature": 1.1, "min_p": 0.3},
    {"temperature": 1.1, "min_p": 0.3, "constraint": WORDS},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.1, "top_p": 0.9, "seed": 4},
    {"temperature": 1.1, "top_p": 0.9, "seed": 4, "constraint": WORDS},
    {"temperature": 1.1, "seed": 4},
)


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_texts_of_unlike_cuts_and_constraints_in_one_round_are_those_of_each_alone(
    tiny_engine: Build, drafter: str | None
) -> None:
    decided = VANILLA if drafter is None else decision(drafter, 4)
    # Twice each, so that every group has several; prompts that begin unlike, so that none is copied from another.
    work = [
        (make_job(f"{number} {PROMPTS[number % 3]}", number), Sampling(max_tokens=24, **settings), decided)
        for number, settings in enumerate(2 * UNLIKE)
    ]
    engine = tiny_engine("llama", num_slots=len(work))
    together = finish(engine, work)
    alone = tiny_engine("llama", num_slots=1)
    for job, sampling, _ in work:
        made, expected = together[job.job_id], finish(alone, [(job, sampling, decided)])[job.job_id]
        assert made.token_ids == expected.token_ids, sampling
        assert (made.counts, made.chances) == (expected.counts, expected.chances), sampling
        if sampling.num_logprobs:
            ours, theirs = ([token.logprob for token in one.choices[0].logprobs or ()] for one in (made, expected))
            assert ours == pytest.approx(theirs, abs=1e-9)
    num_accepted = sum(one.counts.num_accepted for one in together.values())
    assert num_accepted > 20 if drafter else num_accepted == 0
