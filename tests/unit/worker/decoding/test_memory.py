"""Bytes that a model takes and that are left, what decisions are told of them, and slots that never take more."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from tests.fixtures.drafting import draft_model
from tests.fixtures.models import NUM_TOKENS, decision, finish, make_job
from worker.decoding.device import available_bytes, available_host_bytes
from worker.decoding.drafters.draft_model import DraftModelDrafter
from worker.decoding.engine import AdmittedSequences, TransformersEngine
from worker.decoding.network.kv_layout import BLOCK, KvShape
from worker.decoding.network.slots import SlotCache
from worker.engine import PreparedJob, Sampling

GB = 10**9
HOST = 2**36


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


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
    assert available_host_bytes(write(tmp_path, {**of_host, "proc/self/cgroup": f"{ours}\n", **files})) == left


def test_this_machine_has_some_left() -> None:
    assert 0 < available_bytes(torch.device("cpu")) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


Build = Callable[..., TransformersEngine]
GREEDY: Final = Sampling(max_tokens=30, temperature=0.0)


@pytest.fixture
def draft(tiny_models: dict[str, Path]) -> DraftModelDrafter:
    return draft_model("small", tiny_models["qwen2"], num_slots=4)


@pytest.fixture
def engine(tiny_engine: Build, draft: DraftModelDrafter) -> TransformersEngine:
    return tiny_engine("llama", drafters={"small": draft})


def prepare(engine: TransformersEngine, num_tokens: int, number: int = 0) -> PreparedJob:
    """A job whose prompt has exactly so many tokens."""
    prepared = engine.prepare(make_job("z" * num_tokens, number), GREEDY)
    assert len(prepared.token_ids) == num_tokens, "the tiny tokenizer has no token for several of them"
    return prepared


def test_keys_and_values_take_what_was_told_beforehand(
    engine: TransformersEngine, tiny_models: dict[str, Path]
) -> None:
    before = engine.memory()
    configs = {name: transformers.AutoConfig.from_pretrained(tiny_models[name]) for name in ("llama", "qwen2")}
    assert before.target_per_token == KvShape.of(configs["llama"], engine._target.model.kv_shape.dtype).bytes_per_token
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
    draft.context_length = 40
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
    running = Running(str(number), admitted.acquire(prepared), num_positions)
    admitted.running.append(running)
    return running


def new(max_bytes: int, *, is_paired: bool = True) -> tuple[SlotCache, Any]:
    cache = SlotCache(dataclasses.replace(SHAPE, is_paired=is_paired), NUM_SLOTS, torch.device("cpu"))
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
