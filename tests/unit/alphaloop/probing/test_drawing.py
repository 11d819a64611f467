"""Prompts of jobs drawn for a probe set."""

from __future__ import annotations

from alphaloop.messages import Body, Job, Purpose
from alphaloop.probes import draw_prompts


def job(number: int, length: int, purpose: Purpose = Purpose.TRAFFIC) -> Job:
    return Job(job_id=f"job-{number}", task="code", body=Body(prompt=f"{number:03d}" + "x" * length), purpose=purpose)


JOBS = [job(i, 10) for i in range(80)] + [job(100 + i, 5000) for i in range(20)]


def test_long_prompts_are_drawn_as_often_as_they_occur() -> None:
    found = draw_prompts(JOBS, 20, seed=1)
    assert len(found) == len({body["prompt"] for body in found}) == 20
    num_long = sum(len(body["prompt"]) > 1000 for body in found)
    assert 3 <= num_long <= 5, "20 of 100 prompts are long, in one of the four quarters"


def test_the_same_seed_draws_the_same() -> None:
    assert draw_prompts(JOBS, 20, seed=1) == draw_prompts(JOBS[::-1], 20, seed=1) != draw_prompts(JOBS, 20, seed=2)


def test_probes_and_repeated_prompts_are_left_out() -> None:
    jobs = [job(1, 10), job(1, 10), job(2, 10, Purpose.PROBE), job(3, 10, Purpose.CONTROL)]
    assert [body["prompt"][:3] for body in draw_prompts(jobs, 5, seed=0)] == ["001"]
