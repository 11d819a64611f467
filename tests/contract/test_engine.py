"""What every engine promises above the seam: the fake, a tiny real model, servers over real connections.

A test that changes how a running text is drafted, or counts the rounds of a step, is for engines that own a device.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.costs import CostKind
from alphaloop.deciding.decision import Decision
from alphaloop.engine import Engine, Generation, Sampling, Step
from alphaloop.errors import DecodeFailed, InvalidField, PromptTooLong
from alphaloop.settings import WorkerSettings
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import ServedEngine, engine_over
from tests.fixtures.models import VANILLA, finish, lookup_decision, make_job, steps
from worker.costs.calibration import calibrate, plan

GREEDY = Sampling(max_tokens=24, temperature=0.0)
SAMPLED = Sampling(max_tokens=24, temperature=1.0)
PROMPTS = (
    "def dedent(text): return text and text",
    "one two three one two three one two",
    "x",
    "a JSON document is a document that holds a document",
    "wrap the text of the text in the text",
)

Build = Callable[..., Engine]


@pytest.fixture(params=["fake", "transformers"])
def build(request: pytest.FixtureRequest) -> Build:
    """Builds the engine under test: `build(num_slots=4, context_length=512)`."""
    if request.param == "transformers":
        made: Build = request.getfixturevalue("tiny_engine")
        return made
    return fake


def fake(num_slots: int = 4, context_length: int | None = None) -> Engine:
    """An engine without a model."""
    return FakeEngine(num_slots=num_slots, context_length=context_length or 512)


@pytest.fixture(params=["fake", "transformers", "servers"])
def build_any(request: pytest.FixtureRequest) -> Iterator[Build]:
    """The same of every engine; those of endpoints have a vanilla one and one that drafts with k = 4.

    Endpoints go on by themselves: a test that counts on a running text gives their rounds more time, as `round_s`.
    """
    own = {"fake": fake}.get(request.param)
    if request.param == "transformers":
        own = request.getfixturevalue("tiny_engine")
    with ExitStack() as exits:

        def build(num_slots: int = 4, round_s: float = 0.002) -> Engine:
            if own is not None:
                return own(num_slots=num_slots)
            one, other = (FakeEngine(num_slots=num_slots, context_length=512) for _ in range(2))
            servers = {"plain": ServedEngine(one), "speculative": ServedEngine(other, "lookup", 4)}
            engine = exits.enter_context(engine_over(servers))
            engine._num_slots = num_slots
            for server in servers.values():
                server.round_s = round_s
            return engine

        yield build


def drafting(engine: Engine, k: int) -> Decision:
    """A decision for look-up, with the k that the engine has where it has one only."""
    return lookup_decision(max(k, engine.drafters[0].least_draft_tokens))


def step_once(engine: Engine) -> Step:
    """A step that waits for nothing."""
    engine.wake()
    return engine.step()


def mixed(engine: Engine, rng: random.Random, num: int, **body: Any) -> list[tuple[Any, Sampling, Decision]]:
    """Jobs that differ in prompt, length, sampling and decision."""
    return [
        (
            make_job(PROMPTS[i % len(PROMPTS)], i, **body),
            replace(rng.choice((GREEDY, SAMPLED)), max_tokens=rng.randint(1, 30)),
            rng.choice((VANILLA, drafting(engine, 1), drafting(engine, 5 if engine.can_redraft else 4))),
        )
        for i in range(num)
    ]


def test_a_job_is_decoded_to_its_end(build_any: Build) -> None:
    engine = build_any()
    (generation,) = finish(engine, [(make_job("hello there", 1), GREEDY, VANILLA)]).values()
    assert generation.finish_reason in ("stop", "length")
    assert 1 <= len(generation.token_ids) <= GREEDY.max_tokens
    assert generation.num_prompt_tokens > 0
    token_ids = engine.prepare(make_job("hello there", 1), GREEDY).token_ids
    assert generation.num_prompt_tokens == len(token_ids) or not token_ids
    assert 0 < generation.time_to_first_token_s <= generation.wall_s
    assert 0 < generation.device_s <= generation.wall_s
    (one,) = finish(engine, [(make_job("hi", 1), replace(GREEDY, max_tokens=1), drafting(engine, 4))]).values()
    assert len(one.token_ids) == one.counts.rounds == 1, "one token is the prefill alone"
    assert one.counts.num_trials == 0
    with pytest.raises(InvalidField, match=r"body\.model"):
        engine.prepare(make_job("hi", model="some-other-model"), GREEDY)
    with pytest.raises(DecodeFailed):
        engine.admit(engine.prepare(make_job("hi"), GREEDY), replace(lookup_decision(3), drafter="unheard-of"))
    assert engine.load().num_running == 0


def test_ragged_jobs_join_between_steps_and_their_counts_add_up(build_any: Build, rng: random.Random) -> None:
    engine = build_any(num_slots=3)
    work = mixed(engine, rng, 12)
    finished = finish(engine, work)
    assert set(finished) == {job.job_id for job, _, _ in work}
    for job, sampling, decision in work:
        generation = finished[job.job_id]
        assert generation.counts.num_tokens == len(generation.token_ids)
        assert 1 <= len(generation.token_ids) <= sampling.max_tokens
        assert len(generation.counts.proposed) <= decision.num_draft_tokens
        assert 1 <= generation.batch_size <= 3
        if generation.finish_reason == "length":
            assert len(generation.token_ids) == sampling.max_tokens
            assert generation.counts.num_cropped == 0


def test_speculation_takes_fewer_rounds_than_tokens(build: Build) -> None:
    # A bias that no score outweighs: the text repeats itself, whatever the model's weights.
    sampling = replace(GREEDY, max_tokens=60, logit_bias=((70, 100.0),))
    (generation,) = finish(build(), [(make_job(PROMPTS[1], 1), sampling, lookup_decision(4))]).values()
    assert generation.counts.num_accepted > 0
    assert generation.counts.rounds < len(generation.token_ids)


def test_a_text_does_not_depend_on_its_company(build: Build, rng: random.Random) -> None:
    work = [(job, sampling, decision) for job, sampling, decision in mixed(build(), rng, 8)]
    together = finish(build(num_slots=8), work)
    engine = build(num_slots=1)
    for item in work:
        (alone,) = finish(engine, [item]).values()
        assert together[alone.job_id].token_ids == alone.token_ids
        assert together[alone.job_id].text == alone.text
        assert together[alone.job_id].counts == alone.counts


def test_greedy_speculation_equals_vanilla(build_any: Build) -> None:
    engine = build_any()
    for i, prompt in enumerate(PROMPTS):
        vanilla, drafted = (
            finish(engine, [(make_job(prompt, i), replace(GREEDY, max_tokens=48), decision)]).popitem()[1]
            for decision in (VANILLA, drafting(engine, 6 if engine.can_redraft else 4))
        )
        assert (vanilla.token_ids, vanilla.text) == (drafted.token_ids, drafted.text)


def test_deltas_make_up_the_text(build_any: Build, rng: random.Random) -> None:
    engine = build_any()
    seen: dict[str, str] = defaultdict(str)
    indexes: dict[str, list[int]] = defaultdict(list)
    finished: dict[str, Generation] = {}
    for step in steps(engine, mixed(engine, rng, 4, stream=True)):
        for delta in step.deltas:
            assert delta.text
            seen[delta.job_id] += delta.text
            indexes[delta.job_id].append(delta.index)
        finished |= {generation.job_id: generation for generation in step.finished}
    assert {job_id: generation.text for job_id, generation in finished.items() if generation.text} == dict(seen)
    assert all(found == list(range(len(found))) for found in indexes.values())


def test_the_same_seed_gives_the_same_text_and_another_seed_another(build: Build) -> None:
    engine = build()

    def text(number: int, seed: int | None) -> str:
        sampling = replace(SAMPLED, seed=seed)
        return finish(engine, [(make_job("tell me", number), sampling, VANILLA)]).popitem()[1].text

    assert text(1, 7) == text(2, 7)
    assert text(1, 7) != text(1, 8)
    assert text(1, None) == text(1, None), "a job that is decoded again must get the same text"
    assert text(1, None) != text(2, None)


@pytest.mark.parametrize("decision", [VANILLA, lookup_decision(4)], ids=["vanilla", "speculative"])
def test_a_text_ends_before_the_first_stop_string(build_any: Build, decision: Decision) -> None:
    engine = build_any()
    for number, prompt in enumerate(PROMPTS):
        job = make_job(prompt, number)
        whole = finish(engine, [(job, GREEDY, decision)])[job.job_id]
        stop = whole.text[len(whole.text) // 2 :][:3]
        cut = finish(engine, [(job, replace(GREEDY, stop=(stop, "never in there")), decision)])[job.job_id]
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert cut.counts.num_tokens == len(cut.token_ids)


def test_load_follows_admission_cancellation_and_abandonment(build_any: Build) -> None:
    engine = build_any(num_slots=3, round_s=0.05)
    jobs = [make_job(prompt, i) for i, prompt in enumerate(PROMPTS[:3])]
    short = replace(GREEDY, max_tokens=4)
    expected = finish(engine, [(jobs[0], short, VANILLA)])[jobs[0].job_id].text
    for i, job in enumerate(jobs):
        assert engine.load().num_free == 3 - i
        engine.admit(engine.prepare(job, GREEDY), VANILLA)
        if i == 0:
            step_once(engine)
    with pytest.raises(DecodeFailed):
        engine.admit(engine.prepare(make_job("one too many", 9), GREEDY), VANILLA)
    assert engine.cancel(jobs[0].job_id)
    assert not engine.cancel(jobs[0].job_id)
    assert not engine.cancel("unheard-of")
    assert engine.cancel(jobs[2].job_id), "a job can be cancelled before its first step"
    assert engine.load().num_running == 1
    engine.abandon()
    assert engine.load().num_running == 0
    assert step_once(engine).batch == 0
    assert finish(engine, [(jobs[0], short, drafting(engine, 3))])[jobs[0].job_id].text == expected, "work goes on"


def test_a_cancelled_job_leaves_the_others_as_they_are(build_any: Build) -> None:
    engine = build_any(num_slots=3, round_s=0.02)
    jobs = [make_job(prompt, i) for i, prompt in enumerate(PROMPTS[:3])]
    expected = [finish(engine, [(job, GREEDY, VANILLA)])[job.job_id].text for job in jobs]
    for job in jobs:
        engine.admit(engine.prepare(job, GREEDY), VANILLA)
    assert not step_once(engine).finished
    assert not step_once(engine).finished
    assert engine.cancel(jobs[1].job_id)
    newcomer = make_job(PROMPTS[3], 8)
    finished = finish(engine, [(newcomer, GREEDY, VANILLA)])
    assert jobs[1].job_id not in finished
    assert [finished[jobs[i].job_id].text for i in (0, 2)] == [expected[0], expected[2]]
    assert finished[newcomer.job_id].text == finish(engine, [(newcomer, GREEDY, VANILLA)])[newcomer.job_id].text


def test_the_context_limits_the_output_and_refuses_the_prompt(build: Build) -> None:
    engine = build(context_length=64)
    words = "a b c d e f g h"
    num = len(engine.prepare(make_job(words), GREEDY).token_ids)
    prepared = engine.prepare(make_job(words), replace(GREEDY, max_tokens=1000))
    assert prepared.sampling.max_tokens == 64 - num
    generation = finish(engine, [(make_job(words), prepared.sampling, lookup_decision(8))]).popitem()[1]
    assert num + len(generation.token_ids) <= 64
    with pytest.raises(PromptTooLong, match="64") as refused:
        engine.prepare(make_job(" ".join(["word"] * 90)), GREEDY)
    assert refused.value.field == "body.prompt"
    assert "word" not in str(refused.value)


def redraft_at_random(engine: Engine, job_ids: Iterable[str], rng: random.Random) -> None:
    """Some of the jobs draft in another way from their next round on."""
    for job_id in job_ids:
        if rng.random() < 0.4:
            engine.redraft(job_id, rng.choice((None, "lookup", "lookup")), rng.choice((0, 1, 3, 7)))


def test_a_text_stays_the_same_however_its_drafting_changes_between_rounds(build: Build, rng: random.Random) -> None:
    engine = build(num_slots=3)
    seeded = replace(SAMPLED, seed=rng.randrange(2**31))
    work = [
        (make_job(PROMPTS[i % len(PROMPTS)], i), replace((GREEDY, seeded)[i % 2], max_tokens=40), lookup_decision(3))
        for i in range(8)
    ]
    plain = {job.job_id: finish(engine, [(job, sampling, VANILLA)])[job.job_id] for job, sampling, _ in work}
    finished: dict[str, Generation] = {}
    num_tokens: dict[str, int] = defaultdict(int)
    num_drafting: dict[str, int] = defaultdict(int)
    for step in steps(engine, work, lambda: redraft_at_random(engine, plain, rng)):
        for job_id, num in step.tokens_by_job.items():
            num_tokens[job_id] += num
        for job_id in step.drafting:
            num_drafting[job_id] += 1
        finished |= {generation.job_id: generation for generation in step.finished}
    for job_id, generation in finished.items():
        assert (generation.token_ids, generation.text) == (plain[job_id].token_ids, plain[job_id].text)
        assert generation.counts.num_tokens == len(generation.token_ids) == num_tokens[job_id]
        assert sum(one.counts.rounds for one in generation.drafted) == num_drafting[job_id]
        vanilla = AcceptanceCounts(generation.num_vanilla_rounds, generation.num_vanilla_rounds)
        assert sum((one.counts for one in generation.drafted), vanilla) == generation.counts
        for one in generation.drafted:
            assert one.counts.rounds > 0
            assert len(one.chances) <= one.num_draft_tokens
            assert one.chances[0] <= one.counts.rounds
            for chances, trials in zip(one.chances, one.counts.trials, strict=False):
                assert chances >= trials
    assert any(generation.counts.num_trials for generation in finished.values())
    assert any(generation.num_vanilla_rounds > 1 for generation in finished.values())


def test_a_paused_drafter_drafts_nothing_until_it_goes_on(build: Build) -> None:
    engine = build()
    job = make_job(PROMPTS[1], 1)
    # A bias that no score outweighs: the text never ends by itself, and repeats itself.
    engine.admit(engine.prepare(job, replace(GREEDY, max_tokens=22, logit_bias=((70, 100.0),))), lookup_decision(4))
    engine.step()
    drafted: list[bool] = []
    for k in (4, 0, 0, 4):
        engine.redraft(job.job_id, "lookup", k)
        step = engine.step()
        drafted.append(job.job_id in step.drafting)
        assert step.width == 1 or k
    assert drafted == [True, False, False, True]
    (generation,) = finish(engine).values()
    (one,) = generation.drafted
    assert generation.num_vanilla_rounds == 3, "the prefill and the pause"
    assert one.counts.rounds == generation.counts.rounds - 3


def test_a_job_is_cancelled_while_its_drafter_is_paused(build: Build) -> None:
    engine = build(num_slots=2)
    jobs = [make_job(prompt, i) for i, prompt in enumerate(PROMPTS[:2])]
    expected = finish(engine, [(jobs[1], GREEDY, VANILLA)])[jobs[1].job_id].text
    for job in jobs:
        engine.admit(engine.prepare(job, GREEDY), lookup_decision(3))
    engine.step()
    engine.step()
    engine.redraft(jobs[0].job_id, "lookup", 0)
    engine.step()
    assert engine.cancel(jobs[0].job_id)
    engine.redraft(jobs[0].job_id, "lookup", 3)
    finished = finish(engine)
    assert [(job_id, one.text) for job_id, one in finished.items()] == [(jobs[1].job_id, expected)]


def test_an_unknown_drafter_is_refused_in_the_middle_and_an_unknown_job_is_not(build: Build) -> None:
    engine = build()
    job = make_job(PROMPTS[0], 1)
    engine.admit(engine.prepare(job, GREEDY), lookup_decision(3))
    engine.step()
    for job_id in (job.job_id, "unheard-of"):
        with pytest.raises(DecodeFailed):
            engine.redraft(job_id, "unheard-of", 3)
    engine.redraft("unheard-of", "lookup", 3)
    assert engine.step().drafting == (job.job_id,), "it drafts as before"


def test_calibration_measures_every_shape_and_leaves_no_trace(build: Build) -> None:
    engine = build(num_slots=2)
    job = make_job(PROMPTS[1], 1)
    expected = finish(engine, [(job, GREEDY, VANILLA)])[job.job_id].text
    engine.admit(engine.prepare(job, GREEDY), VANILLA)
    engine.step()
    wanted = plan(engine, WorkerSettings(batch_size=2))
    points = calibrate(engine, wanted, budget_s=60.0)
    widest = engine.drafters[0].max_draft_tokens + 1
    shapes = {(p.kind, p.drafter, p.batch, p.width, p.context) for p in points}
    contexts = {shape.context for shape in wanted.needed if shape.kind is CostKind.ROUND}
    assert len(contexts) == 1
    for context in contexts:
        assert {(CostKind.ROUND, None, b, w, context) for b in (1, 2) for w in (1, widest)} < shapes
        assert {(CostKind.ROUND, "lookup", b, w, context) for b in (1, 2) for w in (2, widest)} < shapes
    assert {(CostKind.PREFILL, drafter, 1, 64, 0) for drafter in (None, "lookup")} < shapes
    assert all(point.median_ms > 0 for point in points)
    assert engine.load().num_running == 1
    assert finish(engine)[job.job_id].text == expected
