"""Memory: what is stated is what is held, jobs wait for room, and where memory runs out no job is lost.

Bytes that a model takes and that are left, what decisions are told of them, and slots that never take more.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from alphaloop.engine import Generation, PreparedJob, Sampling
from alphaloop.errors import DecodeFailed, JobTooLarge
from engine.device import available_bytes, available_host_bytes
from engine.drafters.draft_model import DraftModelDrafter
from engine.network.kv_layout import BLOCK, KvShape
from engine.network.slots import SlotCache, zeros
from engine.own import AdmittedSequences, TransformersEngine
from tests.fixtures.drafting import ScriptedDrafter, draft_model
from tests.fixtures.models import (
    FAMILIES,
    NUM_TOKENS,
    VANILLA,
    Reference,
    decision,
    finish,
    make_job,
    right_outputs,
    steps,
)

Build = Callable[..., TransformersEngine]
References = Callable[[str], Reference]
GREEDY: Final = Sampling(max_tokens=12, temperature=0.0)
BYTES: Final = 2 * 2 * 2 * 16 * 8  #: of a token in the tiny llama: layers, keys and values, heads, head_dim, float64
DRAFTERS: Final = ("lookup", "model", "chain", "tree")
CAUSES: Final[dict[str, Exception]] = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory."),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 1099511627776 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "new": MemoryError(),
}


def held_bytes(engine: TransformersEngine) -> int:
    return sum(layer.nbytes for layer in engine._cache.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stated_bytes_are_those_of_the_tensors(
    tiny_engine: Build, tiny_models: dict[str, Path], family: str
) -> None:
    engine = tiny_engine(family)
    cache = engine._cache
    for i, num in enumerate((1, 150, 400)):
        engine.admit(engine.prepare(make_job("x " * num, i), GREEDY), VANILLA)
    while engine.load().num_running:
        assert held_bytes(engine) == cache.num_bytes
        positions = [sequence.num_positions for sequence in engine._admitted.running]
        engine.step()
        assert held_bytes(engine) <= cache.num_bytes_with(3, positions)
    assert held_bytes(engine) == 0
    config = transformers.AutoConfig.from_pretrained(tiny_models[family])
    assert cache.shape.bytes_per_token == KvShape.of(config, torch.float64).bytes_per_token


def test_a_job_that_can_never_fit_is_refused_with_the_arithmetic(tiny_engine: Build) -> None:
    engine = tiny_engine(max_cache_bytes=8 * BLOCK * BYTES)
    num = len(engine.prepare(make_job("word " * 20), GREEDY).token_ids)
    fitting = replace(GREEDY, max_tokens=8 * BLOCK - num)
    engine.prepare(make_job("word " * 20), fitting)
    with pytest.raises(JobTooLarge) as refused:
        engine.prepare(make_job("word " * 20), replace(fitting, max_tokens=fitting.max_tokens + 1))
    sentence = str(refused.value)
    for figure in (8 * BLOCK * BYTES, 9 * BLOCK * BYTES, num, fitting.max_tokens + 1, BYTES):
        assert str(figure) in sentence
    assert "word" not in sentence
    assert refused.value.field == "body.max_tokens"


def test_jobs_wait_for_room_and_the_limit_holds(tiny_engine: Build, references: References, rng: random.Random) -> None:
    limit = 8 * BLOCK * BYTES
    engine = tiny_engine(num_slots=8, max_cache_bytes=limit)
    waiting = [
        engine.prepare(make_job("a b" * rng.choice((1, 10, 30, 120, 200)), i), replace(GREEDY, max_tokens=9))
        for i in range(30)
    ]
    waiting[0] = engine.prepare(make_job("a b" * 120, 0), GREEDY)
    expected = right_outputs(references("llama"), waiting)
    finished: dict[str, Generation] = {}
    has_waited = False
    while waiting or engine.load().num_running:
        while waiting and engine.has_room(waiting[0]):
            engine.admit(waiting.pop(0), decision("lookup", rng.randint(0, 5)))
        if waiting and engine.load().num_free:
            has_waited = True
            with pytest.raises(DecodeFailed, match="no free slot or memory"):
                engine.admit(waiting[0], VANILLA)
        finished |= {generation.job_id: generation for generation in engine.step().finished}
        assert held_bytes(engine) <= limit
    assert has_waited
    assert {job_id: list(generation.token_ids) for job_id, generation in finished.items()} == expected


@dataclass
class Bench:
    """An engine of eight slots with every kind of drafter, and what a model alone writes."""

    engine: TransformersEngine
    reference: Reference
    rng: random.Random
    patch: pytest.MonkeyPatch

    def admit_eight(self, offset: int = 0) -> dict[str, list[int]]:
        """Eight jobs, greedy and seeded, under vanilla and every drafter; their right outputs."""
        jobs = [
            self.engine.prepare(
                make_job("ab " * self.rng.randint(1, 70), offset + i),
                replace(GREEDY, temperature=i % 2, seed=i, max_tokens=self.rng.randint(6, 16)),
            )
            for i in range(8)
        ]
        expected = right_outputs(self.reference, jobs)
        for i, one in enumerate(jobs):
            for drafter in self.engine._drafters.values():
                if isinstance(drafter, ScriptedDrafter):
                    drafter.truths[one.job.job_id] = [*one.token_ids, *expected[one.job.job_id]]
            self.engine.admit(one, decision(DRAFTERS[i % 4], self.rng.randint(1, 5) if i != 1 else 0))
        return expected

    def preempt_half(self) -> None:
        with self.patch.context() as patched:
            patched.setattr(self.engine._target.model, "read", raising(CAUSES["cuda"]))
            self.engine.step()

    def check(self, finished: dict[str, Generation], expected: dict[str, list[int]]) -> None:
        assert {job_id: list(generation.token_ids) for job_id, generation in finished.items()} == expected
        assert all(generation.counts.num_tokens == len(generation.token_ids) for generation in finished.values())
        assert self.engine.load().num_free == 8
        assert len(self.engine._cache._free) == 8
        for drafter in self.engine._drafters.values():
            if isinstance(drafter, ScriptedDrafter):
                assert not drafter.running
        model: Any = self.engine._drafters["model"]
        assert not model._held
        assert len(model._cache._free) == 8


@pytest.fixture
def bench(
    tiny_engine: Build,
    tiny_models: dict[str, Path],
    references: References,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    drafters = {
        "model": draft_model("model", tiny_models["qwen2"], num_slots=8),
        "chain": ScriptedDrafter("chain", rng, is_tree=False),
        "tree": ScriptedDrafter("tree", rng, is_tree=True),
    }
    return Bench(tiny_engine(num_slots=8, drafters=drafters), references("llama"), rng, monkeypatch)


def raising(error: Exception) -> Callable[..., torch.Tensor]:
    def read(cache: Any, reads: Any) -> torch.Tensor:
        raise error

    return read


@pytest.mark.parametrize(("cause", "num_steps"), [("cuda", 0), ("cpu", 4), ("new", 4)])
def test_a_pass_that_memory_is_too_small_for_is_halved(bench: Bench, cause: str, num_steps: int) -> None:
    expected = bench.admit_eight()
    early = [generation for _ in range(num_steps) for generation in bench.engine.step().finished]
    num_running = bench.engine.load().num_running
    model, limit = bench.engine._target.model, bench.rng.randint(1, 3)
    read = model.read

    def small(cache: Any, reads: Any) -> torch.Tensor:
        if len(reads) > limit:
            raise CAUSES[cause]
        return read(cache, reads)

    with bench.patch.context() as patched:
        patched.setattr(model, "read", small)
        done = list(steps(bench.engine))
    finished = [*early, *(generation for step in done for generation in step.finished)]
    bench.check({generation.job_id: generation for generation in finished}, expected)
    assert done[0].batch == num_running
    assert 1 <= min(step.batch for step in done) <= limit
    expected = bench.admit_eight(offset=8)
    first = bench.engine.step()
    assert first.batch == 8, "a new batch is as large as ever"
    bench.check({generation.job_id: generation for generation in first.finished} | finish(bench.engine), expected)


def test_a_cache_that_cannot_grow_leaves_no_text_wrong(bench: Bench) -> None:
    """Memory runs out in the middle of a growth: in the second layer, after texts were read and drafts accepted."""
    expected = bench.admit_eight()
    calls = []

    def limited(shape: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if shape[0] > 5:
            calls.append(shape)
            if len(calls) % 2 == 0:
                raise CAUSES["cpu"]
        return zeros(shape, *args, **kwargs)

    bench.patch.setattr("engine.network.slots.zeros", limited)
    finished = finish(bench.engine)
    assert len(calls) >= 2
    bench.check(finished, expected)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sequences_go_on_vanilla_where_their_drafter_runs_out_of_memory(bench: Bench, drafter: str) -> None:
    expected = bench.admit_eight()
    drafting = [
        sequence.job_id
        for sequence in bench.engine._admitted.running
        if sequence.drafting.of_next_round == bench.engine._drafters[drafter].state
    ]
    failing = bench.engine._drafters[drafter]
    propose, num_asked = failing.propose, 0

    def small(asks: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 2:
            raise CAUSES["cuda"]
        return propose(asks)

    bench.patch.setattr(failing, "propose", small)
    finished: dict[str, Generation] = {}
    while not num_asked:
        finished |= {generation.job_id: generation for generation in bench.engine.step().finished}
    assert all(
        sequence.drafting.drafter is None for sequence in bench.engine._admitted.running if sequence.job_id in drafting
    )
    assert not bench.engine._admitted.preempted, "nobody left its slot"
    bench.check(finished | finish(bench.engine), expected)
    assert num_asked == 1, "nobody asked that drafter again"


def test_a_draft_model_that_memory_has_no_room_for_is_not_opened(bench: Bench) -> None:
    """Three of eight sequences are turned to a draft model in the middle; memory is left for one."""
    endless = replace(GREEDY, logit_bias=((0, -1000.0),))
    jobs = [bench.engine.prepare(make_job(f"{number} ab", number), endless) for number in range(8)]
    for job in jobs:
        bench.engine.admit(job, VANILLA)
    bench.engine.step()
    longest = max(sequence.num_positions for sequence in bench.engine._admitted.running)
    memory = bench.engine.memory()
    share = memory.of_draft("model", 1, longest)
    short = memory.left_for_drafts(8, longest, 4) - memory.free
    turned = [job.job.job_id for job in jobs[:3]]
    with bench.patch.context() as patched:
        patched.setattr("engine.own.available_bytes", lambda device: share + share // 2 - short)
        for job_id in turned:
            bench.engine.redraft(job_id, "model", 3)
        assert bench.engine.step().drafting == (turned[0],)
        assert bench.engine.step().drafting == (turned[0],), "the others stay vanilla"
    bench.engine.redraft(turned[1], "model", 3)
    assert bench.engine.step().drafting == tuple(turned[:2])
    bench.check(finish(bench.engine), right_outputs(bench.reference, jobs))


def test_jobs_wait_until_those_have_gone_on_that_memory_was_too_small_for(bench: Bench) -> None:
    """A job that takes each slot as it comes free would keep them waiting for ever."""
    expected = bench.admit_eight()
    bench.preempt_half()
    late = bench.engine.prepare(make_job("late", 99), GREEDY)
    finished: dict[str, Generation] = {}
    while bench.engine._admitted.preempted:
        assert not bench.engine.has_room(late)
        finished |= {generation.job_id: generation for generation in bench.engine.step().finished}
    assert bench.engine.has_room(late) == (bench.engine.load().num_free > 0)
    bench.check(finished | finish(bench.engine), expected)


def test_a_job_that_waits_for_memory_can_be_cancelled(bench: Bench) -> None:
    expected = bench.admit_eight()
    bench.preempt_half()
    assert len(bench.engine._admitted.preempted) == len(bench.engine._admitted.running) == 4
    assert bench.engine.load().num_running == 8, "it is not forgotten"
    for sequence in (bench.engine._admitted.preempted[1], bench.engine._admitted.running[0]):
        assert bench.engine.cancel(sequence.job_id)
        assert not bench.engine.cancel(sequence.job_id)
        del expected[sequence.job_id]
    bench.check(finish(bench.engine), expected)


def test_a_failure_that_no_smaller_batch_mends_fails_the_step(bench: Bench) -> None:
    model = bench.engine._target.model
    bench.admit_eight()
    bench.engine.step()

    with bench.patch.context() as patched:
        patched.setattr(model, "read", raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
        with pytest.raises(DecodeFailed, match="8 sequences failed"):
            bench.engine.step()
        bench.engine.abandon()
        patched.setattr(model, "read", raising(CAUSES["cuda"]))
        bench.admit_eight()
        for expected in (8, 4, 2):
            assert bench.engine.step().batch == expected
        with pytest.raises(DecodeFailed, match="1 sequences failed"):
            bench.engine.step()
    bench.engine.abandon()
    assert bench.engine.load().num_running == 0
    right = bench.admit_eight()
    bench.check(finish(bench.engine), right)


GB = 10**9
HOST = 2**36


TWO: Final = ("", "memory.max", "memory.current", "inactive_file")
ONE: Final = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def group(
    path: str, allowed: object, used: int, cached: int | None = None, names: tuple[str, ...] = TWO
) -> dict[str, str]:
    """The files of a control group, by default of version 2."""
    mount, limit, usage, cache = names
    folder = f"sys/fs/cgroup/{mount}{path}"
    files = {f"{folder}/{limit}": f"{allowed}\n", f"{folder}/{usage}": f"{used}\n"}
    return files if cached is None else {**files, f"{folder}/memory.stat": f"anon {GB}\n{cache} {cached}\n"}


@pytest.mark.parametrize(
    ("ours", "files", "left"),
    [
        ("0::/", {}, HOST),
        ("0::/", {"sys/fs/cgroup/memory.max": "max\n"}, HOST),
        *((f"0::{path}", group(path, 4 * GB, 3 * GB, GB), 2 * GB) for path in ("/", "/pod/container")),
        *(
            (f"9:cpu:/x\n4:memory:{path}", group(path, 4 * GB, 3 * GB, GB, ONE), 2 * GB)
            for path in ("/", "/pod/container")
        ),
        # A group around ours may be the tighter one.
        ("0::/pod/container", {**group("/pod/container", "max", GB), **group("/pod", 5 * GB, 2 * GB)}, 3 * GB),
        # Version 1 without a limit names a huge one.
        ("4:memory:/", group("/", 9223372036854771712, 5, names=ONE), HOST),
    ],
)
def test_memory_is_what_the_kernel_and_every_group_leave(
    tmp_path: Path, ours: str, files: dict[str, str], left: int
) -> None:
    of_host = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:  {HOST // 1024} kB\n"}
    for name, text in {**of_host, "proc/self/cgroup": f"{ours}\n", **files}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert available_host_bytes(tmp_path) == left


def test_this_machine_has_some_left() -> None:
    assert 0 < available_bytes(torch.device("cpu")) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def draft(tiny_models: dict[str, Path]) -> DraftModelDrafter:
    return draft_model("small", tiny_models["qwen2"], num_slots=4)


@pytest.fixture
def engine(tiny_engine: Build, draft: DraftModelDrafter) -> TransformersEngine:
    return tiny_engine("llama", drafters={"small": draft})


def prepare(engine: TransformersEngine, num_tokens: int, number: int = 0) -> PreparedJob:
    prepared = engine.prepare(make_job("z" * num_tokens, number), GREEDY)
    assert len(prepared.token_ids) == num_tokens, "the tiny tokenizer has no token for several of them"
    return prepared


def test_keys_and_values_take_what_was_told_beforehand(engine: TransformersEngine) -> None:
    before = engine.memory()
    assert before.target_per_token == engine._cache.shape.bytes_per_token
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
    draft.context_length = draft.longest_text = 40
    for length, is_named in ((39, False), (40, True), (60, True)):
        job = prepare(engine, length)
        assert (engine.unserved([job]).keys() == {"small"}) == is_named
        assert engine.unserved([job, prepare(engine, 5, 1)]) == {}, "some of the batch it can serve"
        engine.admit(job, decision("small", 4))
        (finished,) = finish(engine).values()
        assert (finished.counts.num_trials == 0) == is_named
    assert "60 tokens" in engine.unserved([job])["small"]
    assert "40" in engine.unserved([job])["small"]


SHAPE = KvShape(num_layers=1, num_heads=1, head_dim=32, dtype=torch.bfloat16, is_paired=True)
NUM_SLOTS = 6


@dataclass
class Running:
    """What is asked of a sequence here."""

    job_id: str
    slot: int
    num_positions: int


def admit(admitted: Any, number: int, num_positions: int) -> Running | None:
    token_ids = (1,) * (num_positions - 1)
    prepared = PreparedJob(make_job("text", number), token_ids, Sampling(max_tokens=1, temperature=0.0))
    if not admitted.fits(prepared):
        return None
    running = Running(str(number), -1, num_positions)
    admitted.waiting.append(running)
    admitted.start_waiting()
    assert not admitted.waiting
    return running


def new(max_bytes: int, *, is_paired: bool = True) -> tuple[SlotCache, Any]:
    cache = SlotCache(replace(SHAPE, is_paired=is_paired), NUM_SLOTS, torch.device("cpu"))
    return cache, AdmittedSequences(cache, NUM_SLOTS, max_bytes)


def test_memory_never_exceeds_its_limit_whatever_gaps_there_are(rng: random.Random) -> None:
    for _ in range(50):
        cache, admitted = new(8 * BLOCK * SHAPE.bytes_per_token)
        cache.max_bytes = 8 * BLOCK * SHAPE.bytes_per_token
        for number in range(60):
            if admitted.running and rng.random() < 0.5:
                admitted.drop(rng.choice(admitted.running))
                admitted.close_gaps()
            running = admit(admitted, number, rng.choice([3, BLOCK, 2 * BLOCK, 5 * BLOCK, 8 * BLOCK]))
            if running is not None:
                cache.reserve({running.slot: running.num_positions})
                cache.lengths[running.slot] = running.num_positions
            assert cache.num_bytes <= cache.max_bytes
            slots = [one.slot for one in admitted.running]
            assert len(set(slots)) == len(slots)


@pytest.mark.parametrize(("is_paired", "slots"), [(True, [1, 2]), (False, [0, 1])])
def test_gaps_are_closed_where_a_pass_would_compute_them(is_paired: bool, slots: list[int]) -> None:
    _, admitted = new(100 * BLOCK * SHAPE.bytes_per_token, is_paired=is_paired)
    first, *_ = [admit(admitted, number, 9) for number in range(3)]
    admitted.drop(first)
    admitted.close_gaps()
    assert sorted(one.slot for one in admitted.running) == slots
