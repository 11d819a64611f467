"""Cached prefixes: what prompts have in common stays when nobody runs; texts stay what they are, memory bounded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch

from alphaloop.engine import PreparedJob, Sampling
from alphaloop.errors import DecodeFailed
from alphaloop.messages import Origin, Purpose, parse_job
from alphaloop.messages.job import Job
from engine.network.kv_layout import BLOCK, PAIR_BLOCK, KvShape, to_paired, to_plain
from engine.network.slots import WORTH_A_PASS, SlotCache
from engine.own import TransformersEngine
from engine.prefix_cache import HALF_LIFE_S, MOST_NOTED, PrefixCache
from tests.fixtures.drafting import ScriptedDrafter
from tests.fixtures.models import FAMILIES, VANILLA, Reference, decision, finish, right_outputs, steps

Build = Callable[..., TransformersEngine]
GREEDY: Final = Sampling(max_tokens=6, temperature=0.0)
ROOM: Final = 1 << 24
LONG: Final = WORTH_A_PASS["cpu"] + 30
BYTES: Final = 2 * 2 * 2 * 16 * 8  #: of a token in the tiny llama: layers, keys and values, heads, head_dim, float64


def job_of(prompt: str, number: int, *, task: str = "code", segment: str | None = None) -> Job:
    fields = {"task": task, "segment": segment, "body": {"prompt": prompt}}
    value = json.dumps({name: one for name, one in fields.items() if one is not None}).encode()
    return parse_job(value, Origin("test", f"jobs.{task}", 0, number), task=task)


@dataclass
class OneByOne:
    """Jobs that come one behind another, so that nobody runs in between."""

    engine: TransformersEngine
    num_jobs: int = 0

    def read(self, prompt: str, **fields: Any) -> tuple[int, int]:
        """Tokens of a job's prompt that were read, and copied from the prefix cache."""
        self.num_jobs += 1
        self.engine.admit(self.engine.prepare(job_of(prompt, self.num_jobs, **fields), GREEDY), VANILLA)
        done = list(steps(self.engine))
        return sum(one.num_prefill_tokens for one in done), sum(one.num_prefix_cache_tokens for one in done)


def words(rng: random.Random, num: int) -> str:
    return "".join(rng.choice("zqxjkvw") for _ in range(num))


@pytest.fixture
def stream(tiny_engine: Build) -> OneByOne:
    return OneByOne(tiny_engine("llama", max_prefix_cache_bytes=ROOM))


def test_the_third_job_that_begins_alike_reads_its_own_part_only(stream: OneByOne, rng: random.Random) -> None:
    beginning = words(rng, LONG)
    for number in range(2):
        num_read, num_spared = stream.read(f"{beginning}{number}{words(rng, 20)}")
        assert num_read > LONG, "one job alone makes no common beginning"
        assert num_spared == 0
    assert stream.engine.memory().held > 0, "kept while nobody runs"
    num_read, num_spared = stream.read(f"{beginning}2{words(rng, 20)}")
    assert num_spared >= LONG - 5
    assert num_read < 40


def test_what_one_job_alone_had_is_not_kept(stream: OneByOne, rng: random.Random) -> None:
    for _ in range(4):
        assert stream.read(words(rng, 2 * LONG))[1] == 0
    assert stream.engine.memory().held == 0


@pytest.mark.parametrize(
    ("theirs", "ours", "is_shared"),
    [
        ({"segment": "gold"}, {"segment": "gold"}, True),
        ({"segment": "gold"}, {"segment": "tin"}, False),
        ({"segment": "gold"}, {}, False),
        ({}, {"segment": "gold"}, False),
        ({"task": "sql"}, {"task": "code"}, False),
    ],
)
def test_nobody_gains_from_texts_of_another_task_or_segment(
    stream: OneByOne, rng: random.Random, theirs: dict[str, str], ours: dict[str, str], is_shared: bool
) -> None:
    beginning = words(rng, LONG)
    for number in range(3):
        stream.read(f"{beginning}{number}", **theirs)
    assert (stream.read(f"{beginning}9", **ours)[1] > 0) == is_shared
    assert (stream.read(f"{beginning}8", **ours)[1] > 0) == is_shared


def test_probes_and_controls_read_their_prompts(stream: OneByOne, rng: random.Random) -> None:
    beginning = words(rng, LONG)
    for number in range(3):
        stream.read(f"{beginning}{number}")
    prepared = stream.engine.prepare(job_of(f"{beginning}9", 99), GREEDY)
    stream.engine.admit(replace(prepared, job=prepared.job.model_copy(update={"purpose": Purpose.CONTROL})), VANILLA)
    assert stream.engine.step().num_prefill_tokens > LONG


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_the_same_with_and_without(
    tiny_engine: Build, references: Callable[[str], Reference], rng: random.Random, family: str
) -> None:
    """Chains, trees, sliding windows, fused or not, gaps in the slots, and several texts a job."""
    drafters = {name: ScriptedDrafter(name, rng, is_tree=name == "tree") for name in ("chain", "tree")}
    engine = tiny_engine(family, num_slots=4, max_prefix_cache_bytes=ROOM, drafters=drafters)
    beginnings = [words(rng, LONG + 10 * number) for number in range(2)]
    prompts = [f"{rng.choice(beginnings)}{words(rng, rng.randint(1, 30))}" for _ in range(24)]
    prompts[5] = prompts[17] = prompts[11]  # the whole prompt but for its last token
    samplings = [
        Sampling(max_tokens=rng.randint(2, 9), temperature=number % 2, seed=number) for number in range(len(prompts))
    ]
    jobs = [
        engine.prepare(job_of(*pair), sampling)
        for pair, sampling in zip(zip(prompts, range(24), strict=True), samplings, strict=True)
    ]
    expected = right_outputs(references(family), jobs)
    num_spared, found = 0, {}
    waiting = list(jobs)
    while waiting or engine.load().num_running:
        for one in [waiting.pop(0) for _ in range(min(rng.randint(0, 2), engine.load().num_free, len(waiting)))]:
            for drafter in drafters.values():
                drafter.truths[one.job.job_id] = [*one.token_ids, *expected[one.job.job_id]]
            engine.admit(one, decision(rng.choice(["lookup", "chain", "tree"]), rng.randint(0, 4)))
        step = engine.step()
        num_spared += step.num_prefix_cache_tokens
        found |= {one.job_id: list(one.token_ids) for one in step.finished}
    assert found == expected
    assert num_spared > LONG


def test_as_many_positions_are_copied_as_two_jobs_had_in_common(stream: OneByOne, rng: random.Random) -> None:
    beginning = words(rng, LONG)
    for number in range(3):
        stream.read(f"{beginning}{number}")
    stream.engine.admit(stream.engine.prepare(job_of(f"{beginning}7{words(rng, 20)}", 99), GREEDY), VANILLA)
    step = stream.engine.step()
    (sequence,) = stream.engine._admitted.running
    num_copied = sequence.num_prompt - step.num_prefill_tokens
    assert LONG - 5 <= num_copied < sequence.num_prompt - 10


def test_running_sequences_come_first_and_the_limit_holds(
    tiny_engine: Build, references: Callable[[str], Reference], rng: random.Random
) -> None:
    limit = 8 * BLOCK * BYTES
    engine = tiny_engine(num_slots=4, max_cache_bytes=limit, max_prefix_cache_bytes=limit)
    beginnings = [words(rng, LONG) for _ in range(4)]
    waiting: list[PreparedJob] = [
        engine.prepare(job_of(f"{rng.choice(beginnings)}{words(rng, rng.choice((5, 200, 300)))}", i), GREEDY)
        for i in range(40)
    ]
    expected = right_outputs(references("llama"), waiting)
    found: dict[str, list[int]] = {}
    num_spared = most = 0
    while waiting or engine.load().num_running:
        while waiting and engine.has_room(waiting[0]):
            engine.admit(waiting.pop(0), VANILLA)
        step = engine.step()
        num_spared, most = num_spared + step.num_prefix_cache_tokens, max(most, step.prefix_cache_bytes)
        assert engine._cache.num_bytes + engine._prefix_cache.num_bytes <= limit
        found |= {one.job_id: list(one.token_ids) for one in step.finished}
    assert found == expected
    assert num_spared > 0
    whole = engine.prepare(job_of("z" * (8 * BLOCK - 10), 99), GREEDY)
    assert engine.memory().held > 0
    assert engine.has_room(whole), "nobody waits for what no text needs"
    engine.admit(whole, VANILLA)
    assert engine.step().prefix_cache_bytes == 0


def test_where_memory_runs_out_beginnings_go_and_no_sequence_leaves_its_slot(
    stream: OneByOne, references: Callable[[str], Reference], rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, beginning = stream.engine, words(rng, LONG)
    for number in range(2):
        stream.read(f"{beginning}{number}")
    jobs = [engine.prepare(job_of(f"{beginning}{letter}", 50 + i), GREEDY) for i, letter in enumerate("abc")]
    for job in jobs:
        engine.admit(job, VANILLA)

    def short(cache: Any, reads: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patched:
        patched.setattr(engine._target.model, "read", short)
        step = engine.step()
    assert (step.batch, step.prefix_cache_bytes) == (3, 0)
    assert not engine._admitted.preempted
    texts = {job_id: list(one.token_ids) for job_id, one in finish(engine).items()}
    assert texts == right_outputs(references("llama"), jobs)


def test_a_preempted_sequence_gets_its_beginning_again(
    stream: OneByOne, references: Callable[[str], Reference], rng: random.Random
) -> None:
    engine, beginning = stream.engine, words(rng, LONG)
    for number in range(2):
        stream.read(f"{beginning}{number}")
    jobs = [engine.prepare(job_of(f"{beginning}{letter}", 50 + i), GREEDY) for i, letter in enumerate("abcd")]
    for job in jobs:
        engine.admit(job, VANILLA)
    first = engine.step()
    assert first.num_prefix_cache_hits == 4
    engine._admitted.preempt(engine._admitted.running[2:], most_running=2)
    done = list(steps(engine))
    assert sum(step.num_prefix_cache_hits for step in done) == 2
    texts = {one.job_id: list(one.token_ids) for step in (first, *done) for one in step.finished}
    assert texts == right_outputs(references("llama"), jobs)


def test_nothing_is_left_behind_a_failed_step(stream: OneByOne, rng: random.Random, monkeypatch: Any) -> None:
    beginning = words(rng, LONG)
    for number in range(2):
        stream.read(f"{beginning}{number}")

    def broken(cache: Any, reads: Any) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(stream.engine._target.model, "read", broken)
        with pytest.raises(DecodeFailed):
            stream.read(f"{beginning}2")
    stream.engine.abandon()
    assert stream.engine.memory().held == 0
    assert stream.read(f"{beginning}3")[1] == stream.read(f"{beginning}4")[1] == 0, "no prompt is remembered either"


def test_a_cancelled_job_is_not_compared_with(stream: OneByOne, rng: random.Random) -> None:
    beginning = words(rng, LONG)
    prepared = stream.engine.prepare(job_of(f"{beginning}x", 99), GREEDY)
    stream.engine.admit(prepared, VANILLA)
    stream.engine.step()
    assert stream.engine.cancel(prepared.job.job_id)
    for number in range(2):
        assert stream.read(f"{beginning}{number}")[1] == 0
    assert stream.read(f"{beginning}2")[1] > 0


def test_none_are_kept_where_the_settings_say_so(tiny_engine: Build, rng: random.Random) -> None:
    stream, beginning = OneByOne(tiny_engine("llama", max_prefix_cache_bytes=0)), words(rng, LONG)
    assert {stream.read(f"{beginning}{number}")[1] for number in range(4)} == {0}
    assert stream.engine.memory().held == 0


def test_what_spared_least_of_late_makes_room(tiny_engine: Build, rng: random.Random) -> None:
    """Room for two beginnings: a third one takes the place of one that has not been met for long, and of no other."""
    stream = OneByOne(tiny_engine("llama", max_prefix_cache_bytes=2 * BLOCK * BYTES))
    now = 0.0
    stream.engine._prefix_cache.clock = lambda: now
    one, two, three = (words(rng, LONG) for _ in range(3))
    for beginning in (one, two):
        for number in range(3):
            stream.read(f"{beginning}{number}")
    for number in range(2):
        stream.read(f"{three}{number}")
    assert stream.read(f"{three}2")[1] == 0, "both others are worth more"
    now = 5 * HALF_LIFE_S
    assert stream.read(f"{one}3")[1] > 0
    stream.read(f"{three}3")
    assert stream.read(f"{three}4")[1] > 0
    assert stream.read(f"{one}4")[1] > 0
    assert stream.read(f"{two}3")[1] == 0


@torch.inference_mode()
@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("num", [1, PAIR_BLOCK - 1, PAIR_BLOCK, PAIR_BLOCK + 5, 2 * PAIR_BLOCK + 1])
def test_what_is_taken_out_is_what_is_put_in(is_paired: bool, num: int) -> None:
    """In both layouts, as far as was asked; what other slots hold stays."""
    shape = KvShape(num_layers=2, num_heads=1, head_dim=4, dtype=torch.float64, is_paired=is_paired)
    cache = SlotCache(shape, 4, torch.device("cpu"))
    slots = [cache.acquire() for _ in range(4)]
    cache.reserve(dict.fromkeys(slots, 3 * PAIR_BLOCK))

    def plain(layer: torch.Tensor) -> torch.Tensor:
        return to_plain(layer) if is_paired else layer

    for layer in cache.layers:
        wide = torch.rand(plain(layer).shape, dtype=torch.float64)
        layer.copy_(to_paired(wide) if is_paired else wide)
    cache.lengths[:] = [3 * PAIR_BLOCK, 3 * PAIR_BLOCK, 0, 0]
    before = [plain(layer).clone() for layer in cache.layers]
    states = cache.take_out(0, 3 * PAIR_BLOCK - 7)
    assert states.nbytes <= cache.bytes_out(3 * PAIR_BLOCK - 7)
    cache.put_in(states, [2, 3], num)
    assert cache.lengths == [3 * PAIR_BLOCK, 3 * PAIR_BLOCK, num, num]
    for old, layer in zip(before, cache.layers, strict=True):
        now = plain(layer)
        assert torch.equal(now[:2], old[:2])
        for slot in (2, 3):
            assert torch.equal(now[slot, :, :num], old[0, :, :num])


def test_prompts_that_are_remembered_are_bounded(stream: OneByOne, rng: random.Random) -> None:
    prefixes: PrefixCache = stream.engine._prefix_cache
    for _ in range(MOST_NOTED + 5):
        stream.read(words(rng, 3))
    assert len(prefixes._noted) == MOST_NOTED
    assert prefixes._num_noted_tokens == sum(len(prompt) for _, prompt in prefixes._noted.values())
