"""The jobs of the benchmark of the whole: spread over the tasks, all different, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.messages import Origin, parse_job
from benchmarks.jobs import MAX_TOKENS, MIN_TOKENS, WARM_UP_TASK, PromptJob, draw_jobs, read_folder, shares

PROMPTS = {task: [f"{task} prompt {number}" for number in range(num)] for task, num in (("a", 40), ("b", 5), ("c", 40))}


def write(folder: Path, task: str, *lines: object) -> None:
    (folder / f"{task}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def test_a_prompt_of_two_tasks_is_taken_once(tmp_path: Path) -> None:
    write(tmp_path, "chat", {"id": "1", "prompt": "hello"}, {"id": "2", "prompt": "hello"})
    write(tmp_path, "poems", {"id": "3", "prompt": "hello"}, {"id": "4", "prompt": "a poem"})
    assert read_folder(tmp_path) == {"chat": ["hello"], "poems": ["a poem"]}


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 30), min_size=1), st.integers(0, 100))
def test_shares_are_as_equal_as_the_prompts_allow(available: dict[str, int], num: int) -> None:
    if sum(available.values()) < num:
        with pytest.raises(ValueError, match=str(num)):
            shares(available, num)
        return
    found = shares(available, num)
    assert sum(found.values()) == num
    assert all(found[task] <= available[task] for task in available)
    not_exhausted = [found[task] for task in available if found[task] < available[task]]
    if not_exhausted:
        # A task gives more than another one only where that one has no more.
        assert max(found.values()) - min(not_exhausted) <= 1


def test_no_prompt_is_sent_twice_and_limits_are_mixed() -> None:
    jobs = draw_jobs(PROMPTS, num=60, num_history=10, num_warm_up=4, seed=3)
    every = [*jobs.measured, *jobs.history, *jobs.warm_up]
    assert len({job.prompt for job in every}) == len({job.job_id for job in every}) == 74
    assert len(jobs.measured) == 60
    limits = {job.max_tokens for job in jobs.measured}
    assert min(limits) >= MIN_TOKENS
    assert max(limits) <= MAX_TOKENS
    assert len(limits) > 20
    assert {job.task for job in jobs.warm_up} == {WARM_UP_TASK}
    assert jobs.tasks == ("a", "b", "c", WARM_UP_TASK)


def test_a_seed_gives_the_same_jobs_again() -> None:
    first, again, other = (draw_jobs(PROMPTS, num=60, num_history=5, num_warm_up=4, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_job_is_what_enqueue_would_send() -> None:
    job = PromptJob("job-1", "chat", "Say hello.", 20)
    read = parse_job(job.encoded(decoding="vanilla"), Origin("test", "jobs.chat", 0, 0), task="chat")
    assert read == job.as_job(decoding="vanilla")
    assert read.job_id == "job-1"
    assert read.body.max_tokens == 20
    assert read.body.temperature == 0
    assert read.decoding == "vanilla"
    assert [(message.role, message.content) for message in read.body.messages] == [("user", "Say hello.")]
