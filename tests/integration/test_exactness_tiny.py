"""Exactness on tiny models in float64: neither company nor drafts change a text. What is right, plain passes say."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.policy import Decision
from alphaloop.engine import Generation, Sampling
from engine.network.language_model import PREFILL_CHUNK, LanguageModel
from engine.own import SHARED_CHUNK, TransformersEngine
from tests.fixtures.drafting import MOST, ScriptedDrafter, drafter_over, language_model
from tests.fixtures.models import FAMILIES, Reference, Wanted, decision, finish, make_job

Build = Callable[..., TransformersEngine]
References = Callable[[str], Reference]
GREEDY: Final = Sampling(max_tokens=40, temperature=0.0)
DRAFTERS: Final = ("lookup", "another model", "the target itself", "chain", "tree")


@dataclass(slots=True)
class Bench:
    """An engine with every drafter, and what each job must become."""

    engine: TransformersEngine
    reference: Reference
    scripts: dict[str, ScriptedDrafter]

    def expect(self, work: Iterable[tuple[Any, Sampling]]) -> dict[str, list[int]]:
        """The right outputs by job_id, made known to the scripted drafters."""
        prepared = [self.engine.prepare(job, sampling) for job, sampling in work]
        outputs = self.reference.outputs([Wanted(one.token_ids, one.sampling) for one in prepared])
        for one, output in zip(prepared, outputs, strict=True):
            for script in self.scripts.values():
                script.truths[one.job.job_id] = [*one.token_ids, *output]
        return {one.job.job_id: output for one, output in zip(prepared, outputs, strict=True)}


MakeBench = Callable[[str, int], Bench]


@pytest.fixture(scope="module")
def weights(tiny_models: dict[str, Path]) -> Callable[[str], LanguageModel]:
    """The tiny models that draft, by family, each loaded once."""
    return functools.cache(lambda family: language_model(tiny_models[family]))


@pytest.fixture
def make_bench(
    tiny_engine: Build, weights: Callable[[str], LanguageModel], references: References, rng: random.Random
) -> MakeBench:
    def make(family: str, num_slots: int) -> Bench:
        models = {"another model": "qwen2" if family == "llama" else "llama", "the target itself": family}
        drafters = {name: drafter_over(name, weights(model), num_slots) for name, model in models.items()}
        scripts = {name: ScriptedDrafter(name, rng, is_tree=name == "tree") for name in ("chain", "tree")}
        engine = tiny_engine(family, num_slots=num_slots, drafters=drafters | scripts)
        return Bench(engine, references(family), scripts)

    return make


def decode(
    engine: TransformersEngine, work: Iterable[tuple[Any, Sampling, Decision]], rng: random.Random
) -> dict[str, Generation]:
    """Decode everything; jobs join whenever a slot is free, or a few steps later."""
    waiting, finished = list(work), {}
    while waiting or engine.load().num_running:
        while waiting and engine.load().num_free and (not engine.load().num_running or rng.random() < 0.8):
            job, sampling, decided = waiting[0]
            prepared = engine.prepare(job, sampling)
            if not engine.has_room(prepared):
                break
            engine.admit(prepared, decided)
            del waiting[0]
        finished |= {generation.job_id: generation for generation in engine.step().finished}
    return finished


def some_text(rng: random.Random, num_characters: int) -> str:
    return "".join(rng.choice("ab cd\n") for _ in range(num_characters))


def a_long_job(engine: TransformersEngine, number: int, num_tokens: int, rng: random.Random) -> Any:
    """A job whose prompt has a few more tokens than `num_tokens`."""
    text = some_text(rng, num_tokens)
    while len(engine.prepare(job := make_job(text, number), GREEDY).token_ids) <= num_tokens:
        text += some_text(rng, 20)
    return job


def check(bench: Bench, work: list[tuple[Any, Sampling, Decision]], rng: random.Random) -> dict[str, Generation]:
    """Every text is the right one; counts add up; what was accepted is what was known to be right."""
    expected = bench.expect((job, sampling) for job, sampling, _ in work)
    finished = decode(bench.engine, work, rng)
    for job, _, decided in work:
        generation = finished[job.job_id]
        assert list(generation.token_ids) == expected[job.job_id], decided
        counts = generation.counts
        assert counts.num_tokens == len(generation.token_ids)
        assert len(counts.proposed) <= decided.num_draft_tokens
        if decided.drafter in bench.scripts:
            assert counts.num_accepted == bench.scripts[decided.drafter].num_right[job.job_id]
        if decided.drafter == "the target itself":
            assert counts.num_accepted == counts.num_trials
            assert counts.num_trials > 0 or len(generation.token_ids) < 3
    assert all(not script.running for script in bench.scripts.values()), "every sequence is closed"
    return finished


def decisions(rng: random.Random, num: int) -> list[Decision]:
    """Vanilla and every drafter in turn, at any k."""
    return [decision(("", *DRAFTERS)[i % 6], rng.randint(1, MOST) if i % 6 else 0) for i in range(num)]


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_ragged_sequences_write_what_the_model_alone_writes(
    make_bench: MakeBench, family: str, rng: random.Random
) -> None:
    bench = make_bench(family, 8)
    # Every other text begins with the same instructions, which are read once.
    beginnings = ("a", "a" + some_text(rng, 60))
    work = [
        (
            make_job(beginnings[i % 2] + some_text(rng, rng.randint(0, 60)), i, stream=i % 3 == 0),
            replace(GREEDY, max_tokens=rng.randint(1, 40)),
            decided,
        )
        for i, decided in enumerate(decisions(rng, 18))
    ]
    # Read in two pieces alone, and in two and three pieces beside others.
    for place, num_tokens in ((0, PREFILL_CHUNK), (5, 2 * SHARED_CHUNK), (15, SHARED_CHUNK)):
        long = a_long_job(bench.engine, place, num_tokens, rng)
        work[place] = (long, replace(GREEDY, max_tokens=rng.randint(3, 5)), work[place][2])
    # Random weights promise nothing about what they write, but look-up has something to propose here.
    work[1] = (make_job("long " * 20, 1), replace(GREEDY, max_tokens=20), decision("lookup", 4))
    finished = check(bench, work, rng)
    assert max(generation.batch_size for generation in finished.values()) == 8


@pytest.mark.parametrize(("family", "num_slots"), [("llama", 1), *((family, 8) for family in FAMILIES)])
def test_drafting_that_changes_between_any_two_rounds_changes_no_text(
    make_bench: MakeBench, family: str, num_slots: int, rng: random.Random
) -> None:
    """Greedy and seeded jobs pass from vanilla to any drafter and back, with any k, paused or not."""
    bench = make_bench(family, num_slots)
    kinds = [GREEDY, replace(GREEDY, temperature=1.0), replace(GREEDY, repetition_penalty=1.3)]
    work = [
        (
            make_job("ab " * rng.randint(0, 12) + some_text(rng, rng.randint(1, 30)), i),
            replace(
                kinds[i % 3],
                seed=rng.randrange(2**31),
                max_tokens=rng.randint(10, 30),
                logit_bias=((0, -1000.0),) if i % 2 else (),  # half of the texts never end by themselves
            ),
            decided,
        )
        for i, decided in enumerate(decisions(rng, 2 * num_slots + 4))
    ]
    expected = bench.expect((job, sampling) for job, sampling, _ in work)

    def redraft() -> None:
        for job_id in expected:
            if rng.random() < 0.3:
                bench.engine.redraft(job_id, rng.choice((None, *DRAFTERS)), rng.choice((0, 1, 2, MOST)))

    finished = finish(bench.engine, work, redraft)
    assert {job_id: list(generation.token_ids) for job_id, generation in finished.items()} == expected
    for generation in finished.values():
        vanilla = AcceptanceCounts(generation.num_vanilla_rounds, generation.num_vanilla_rounds)
        assert generation.counts == sum((one.counts for one in generation.drafted), vanilla)
        assert generation.counts.num_tokens == len(generation.token_ids)
        by_name = {one.drafter: one.counts for one in generation.drafted}
        for name, script in bench.scripts.items():
            assert by_name.get(name, AcceptanceCounts()).num_accepted == script.num_right[generation.job_id]
        if (itself := by_name.get("the target itself")) is not None:
            assert itself.num_accepted == itself.num_trials
    assert max(len(generation.drafted) for generation in finished.values()) > 1
    assert all(not script.running for script in bench.scripts.values()), "every sequence is closed"
