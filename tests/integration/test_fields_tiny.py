"""Plain fields, logprobs and several texts on tiny models in float64: the same in every mode, as plain passes say."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.engine import Generation, Sampling, TokenDelta
from alphaloop.errors import InvalidField
from engine.own import TransformersEngine
from engine.prompts import bad_word_tokens
from engine.sampling import Barred
from tests.fixtures.drafting import ScriptedDrafter, draft_model
from tests.fixtures.models import NUM_TOKENS, VANILLA, Reference, Wanted, decision, finish, make_job, steps

Build = Callable[..., TransformersEngine]
DRAFTERS: Final = ("lookup", "another model", "the target itself", "chain", "tree")
PROMPTS: Final = ("one two one two one", "JSON (JavaScript Object Notation)", "the theory of the other thing " * 3)


class Bench:
    """An engine with every drafter, and what each job must become."""

    def __init__(self, build: Build, folders: dict[str, Path], reference: Reference, rng: random.Random) -> None:
        self.scripts = {name: ScriptedDrafter(name, rng, is_tree=name == "tree") for name in ("chain", "tree")}
        models = {"another model": "qwen2", "the target itself": "llama"}
        drafters = {name: draft_model(name, folders[family], num_slots=6) for name, family in models.items()}
        self.engine = build("llama", num_slots=6, drafters=drafters | self.scripts)
        self.reference = reference

    def right(self, jobs: list[tuple[Any, Sampling]]) -> dict[str, list[int]]:
        """The one right output of each job by its id, made known to the scripted drafters."""
        target = self.engine._target
        wanted, prepared = [], [self.engine.prepare(job, sampling) for job, sampling in jobs]
        for one in prepared:
            ends = target.end_tokens | set(one.sampling.stop_token_ids) if one.sampling.min_tokens else frozenset()
            barred = Barred(bad_word_tokens(target.tokenizer, one.sampling.bad_words), frozenset(ends))
            wanted.append(Wanted(one.token_ids, one.sampling, barred))
        outputs = self.reference.outputs(wanted)
        for one, output in zip(prepared, outputs, strict=True):
            for script in self.scripts.values():
                script.truths[one.job.job_id] = [*one.token_ids, *output]
        return {one.job.job_id: output for one, output in zip(prepared, outputs, strict=True)}


@pytest.fixture
def bench(
    tiny_engine: Build, tiny_models: dict[str, Path], references: Callable[[str], Reference], rng: random.Random
) -> Bench:
    return Bench(tiny_engine, tiny_models, references("llama"), rng)


def common_words(bench: Bench, sampling: Sampling) -> tuple[str, ...]:
    """What the model likes to write, one token or two."""
    found = []
    for output in bench.right([(make_job(prompt, 900 + n), sampling) for n, prompt in enumerate(PROMPTS)]).values():
        for place in range(2, len(output), 5):
            text = bench.engine._target.decode(output[place : place + 1 + place % 3])
            if text.strip() and "\N{REPLACEMENT CHARACTER}" not in text:
                found.append(text)
    assert any(len(one) > 1 for one in bad_word_tokens(bench.engine._target.tokenizer, tuple(found)))
    return tuple(found)


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("field", ["bad_words", "allowed_token_ids", "min_tokens", "ignore_eos", "all together"])
def test_a_field_gives_the_same_text_with_and_without_drafts(
    bench: Bench, field: str, how: dict[str, Any], rng: random.Random
) -> None:
    plain = Sampling(max_tokens=24, **how)
    liked = bench.right([(make_job(PROMPTS[0], 800), plain)])
    (first,) = liked.values()
    settings: dict[str, Any] = {
        "bad_words": common_words(bench, plain),
        "allowed_token_ids": tuple(rng.sample(range(NUM_TOKENS), 60)),
        "min_tokens": 9,
        "ignore_eos": True,
    }
    chosen = settings if field == "all together" else {field: settings[field]}
    # A token that the model likes ends texts, so that ends have to be barred.
    sampling = replace(plain, **chosen, stop_token_ids=(first[1], first[5]))
    jobs = [(make_job(prompt, 10 * n + m), sampling) for n, prompt in enumerate(PROMPTS) for m in range(6)]
    right = bench.right(jobs)
    work = [(job, one, decided) for (job, one), decided in zip(jobs, _decisions(), strict=False)]
    found = finish(bench.engine, work)
    assert {job_id: list(one.token_ids) for job_id, one in found.items()} == right
    if field in ("min_tokens", "all together"):
        assert all(len(one.token_ids) >= 9 for one in found.values())
    if field != "ignore_eos":
        unchanged = bench.right([(job, replace(plain, stop_token_ids=sampling.stop_token_ids)) for job, _ in jobs])
        assert right != unchanged, "the field changes nothing here"


def _decisions() -> Iterator[Any]:
    for _ in range(9):
        yield VANILLA
        yield from (decision(name, 5) for name in DRAFTERS)


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


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 7}, {"temperature": 0.8}])
def test_logprobs_are_the_targets_own_in_every_mode(bench: Bench, how: dict[str, Any]) -> None:
    """Before bias, bars, penalties and temperature, of every token that the round emits."""
    sampling = Sampling(
        max_tokens=20, num_logprobs=3, frequency_penalty=0.4, logit_bias=((9, 3.0),), bad_words=("t",), **how
    )
    jobs = [(make_job(PROMPTS[n % 3], n), sampling) for n in range(6)]
    if how.get("seed") or not how["temperature"]:
        bench.right(jobs)
        decided = list(_decisions())
    else:
        decided = [VANILLA, decision("lookup", 5), decision("another model", 5), decision("the target itself", 4)] * 2
    found = finish(bench.engine, [(*job, one) for job, one in zip(jobs, decided, strict=False)])
    tokenizer = bench.engine._target.tokenizer
    for job, _ in jobs:
        made = found[job.job_id]
        (choice,) = made.choices
        assert choice.text == made.text
        assert choice.finish_reason == made.finish_reason
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(made.token_ids)
        prompt = bench.engine.prepare(job, sampling).token_ids
        rows = bench.reference.logits([*prompt, *made.token_ids])[len(prompt) - 1 : -1].log_softmax(-1)
        for token, row, told in zip(made.token_ids, rows, choice.logprobs, strict=True):
            assert told.logprob == pytest.approx(float(row[token]), abs=1e-9)
            values, _ = row.topk(3)
            assert [one.logprob for one in told.top_logprobs] == pytest.approx(values.tolist(), abs=1e-9)
            assert bytes(told.bytes or ()).decode(errors="replace") == told.token
            if "\N{REPLACEMENT CHARACTER}" not in told.token:
                assert told.token in (tokenizer.decode([token]), tokenizer.convert_ids_to_tokens(token))


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
