"""Probe sets, and prompts of jobs drawn for one."""

from __future__ import annotations

import pytest

from alphaloop.messages import Body, Job, Purpose
from alphaloop.probes import draw_prompts, new_probe_set
from tests.fixtures.drift import probe_set

BODIES = [{"prompt": "one", "temperature": 0.7}, {"prompt": "two", "stream": True, "seed": 4}]


def test_prompts_are_asked_greedily_and_whole() -> None:
    found = probe_set("code", BODIES)
    asked = sorted((dict(prompt.body) for prompt in found.prompts.values()), key=lambda body: str(body["prompt"]))
    assert asked == [
        {"prompt": "one", "temperature": 0.0, "max_tokens": 48},
        {"prompt": "two", "temperature": 0.0, "max_tokens": 48},
    ]


def test_versions_share_the_prompts_that_both_have() -> None:
    first, second = probe_set("code", BODIES), probe_set("code", [{"prompt": "two"}, {"prompt": "three"}])
    assert first.version != second.version
    (shared,) = {p.prompt_id: p for p in first.prompts.values()}.keys() & {p.prompt_id for p in second.prompts.values()}
    assert {p.prompt_id: p.body["prompt"] for p in first.prompts.values()}[shared] == "two"


def test_another_k_is_another_version_of_the_same_prompts() -> None:
    first, second = probe_set("code", BODIES, 3), probe_set("code", BODIES, 5)
    assert first.version != second.version
    assert first.prompts == second.prompts


def test_another_output_limit_makes_other_prompts() -> None:
    longer = new_probe_set("code", BODIES, num_draft_tokens=3, max_tokens=64)
    ids = {prompt.prompt_id for prompt in longer.prompts.values()}
    assert ids.isdisjoint(prompt.prompt_id for prompt in probe_set("code", BODIES).prompts.values())


def test_a_prompt_that_occurs_twice_is_measured_once() -> None:
    assert probe_set("code", [*BODIES, BODIES[0]]) == probe_set("code", BODIES)


def test_any_beginning_has_prompts_of_every_length() -> None:
    bodies = [{"prompt": "x" * length} for length in range(1, 41)]
    lengths = [len(str(prompt.body["prompt"])) for prompt in probe_set("code", bodies).prompts.values()]
    assert lengths[:4] == [1, 11, 21, 31]
    assert sorted(lengths) == list(range(1, 41))
    assert probe_set("code", bodies[::-1]) == probe_set("code", bodies), "the order of the file does not matter"


def test_a_set_has_a_prompt() -> None:
    with pytest.raises(ValueError, match="without a prompt"):
        probe_set("code", [])


def job(number: int, length: int, purpose: Purpose = Purpose.TRAFFIC) -> Job:
    return Job(job_id=f"job-{number}", task="code", body=Body(prompt=f"{number:03d}" + "x" * length), purpose=purpose)


JOBS = [job(i, 10) for i in range(80)] + [job(100 + i, 5000) for i in range(20)]


def test_long_prompts_are_drawn_as_often_as_they_occur() -> None:
    found = draw_prompts(JOBS, 20, seed=1)
    assert len(found) == len({one.body.prompt for one in found}) == 20
    num_long = sum(len(one.body.prompt or "") > 1000 for one in found)
    assert 3 <= num_long <= 5, "20 of 100 prompts are long, in one of the four quarters"


def test_the_same_seed_draws_the_same() -> None:
    assert draw_prompts(JOBS, 20, seed=1) == draw_prompts(JOBS[::-1], 20, seed=1) != draw_prompts(JOBS, 20, seed=2)


def test_probes_and_repeated_prompts_are_left_out() -> None:
    jobs = [job(1, 10), job(1, 10), job(2, 10, Purpose.PROBE), job(3, 10, Purpose.CONTROL)]
    assert [(one.body.prompt or "")[:3] for one in draw_prompts(jobs, 5, seed=0)] == ["001"]
