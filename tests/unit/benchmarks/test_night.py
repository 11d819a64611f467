"""The night: what is drawn, and claims that are judged alike for a worker and for the simulator."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from alphaloop.capacity.curve import DecodedJobs
from benchmarks.week.night.claims import busy_time, deadlines, ends, undated_s
from benchmarks.week.night.deployment import message_of
from benchmarks.week.night.ledger import Ended, Said, by_stage
from benchmarks.week.night.schedule import (
    BATCHES,
    CHAT,
    CODE,
    CODE_BATCH,
    RAG_BATCH,
    STREAMS,
    TASKS,
    UNDATED,
    Planned,
    draw_night,
    draw_warm_up,
    made_prompts,
    numbered,
)
from benchmarks.week.night.simulated import CONTESTANTS, simulated, week_of
from benchmarks.week.play import Outage
from benchmarks.week.world import NUM_SLOTS


def test_a_night_has_its_rate_its_batches_and_no_two_prompts_that_begin_alike() -> None:
    jobs = draw_night(rate=4.0, length_s=1000.0, seed=2)
    assert jobs == draw_night(rate=4.0, length_s=1000.0, seed=2)
    assert len(jobs) == pytest.approx(4000, rel=0.05)
    assert [job.at_s for job in jobs] == sorted(job.at_s for job in jobs)
    shares = Counter(job.stream for job in jobs)
    for stream in STREAMS:
        assert shares[stream] / len(jobs) == pytest.approx(stream.share, rel=0.2)
    for stream, evening in BATCHES.items():
        of = [job for job in jobs if job.stream == stream]
        assert {job.at_s for job in of} == {1000 * evening.comes}
        assert {round(job.at_s + job.within_s, 6) for job in of} == {1000 * evening.due}
        assert len({job.batch_id for job in of}) == 1
    prompts = numbered(jobs, made_prompts(1), 1)
    assert len({prompt.split(". ")[0] for prompt in prompts.values()}) == len(jobs)
    assert set(made_prompts(1)) == set(TASKS)


def test_a_message_says_its_deadline_from_when_it_is_sent() -> None:
    dated = message_of(Planned("a", CODE, 5.0, 60.0, 20), "x", 1_000_000.0)
    assert dated["deadline"] == "1970-01-12T13:47:40+00:00"
    batch = message_of(Planned("b", RAG_BATCH, 5.0, math.inf, 20, "rag-batch"), "x", 0.0)
    assert "deadline" not in batch
    assert (batch["segment"], batch["batch_id"], batch["priority"]) == ("batch", "rag-batch", 100)


def _night(num: int = 200, *, each_s: float = 0.5) -> list[Ended]:
    """Jobs every `each_s`, each decoded alone in that time, from their arrival."""
    ended = []
    for number, job in enumerate(draw_warm_up(num, 3)):
        at_s = number * each_s
        decoded = DecodedJobs(job.stream.task, "laptop", False, at_s, 1, 1, 20, each_s, 1.0)
        stream = job.stream
        deadline_s = at_s + 40 if stream in (CHAT, CODE) else math.inf
        ended.append(Ended(stream, None, at_s, deadline_s, at_s + each_s, decoded))
    return ended


def test_busy_seconds_are_planned_from_the_first_half_alone() -> None:
    night = _night()
    even = busy_time(night, 50.0)
    assert even.used_s == pytest.approx(50.0)
    assert even.ratio == pytest.approx(1.0, abs=0.02)
    with_a_pause = [job for job in night if not 60 <= job.at_s < 80]
    assert busy_time(with_a_pause, 50.0).used_s == pytest.approx(30.0)


def test_only_texts_by_their_deadline_count_as_met() -> None:
    first, *rest = [job for job in _night() if job.stream == CHAT]
    late = Ended(CHAT, None, 0.0, 10.0, 10.5, None)
    expired = Ended(CHAT, None, 0.0, 10.0, math.inf, None)
    undated = Ended(UNDATED, None, 3.0, math.inf, 10.0, None)
    found = deadlines([first, rest[0], late, expired, undated])
    assert found == {"all": 0.5, "chat": 0.5}
    assert undated_s([first, undated]) == (7.0, 7.0)


def test_each_stage_has_a_batchs_first_promise_from_then_on() -> None:
    said = [Said("a", share, 100 * share, 90.0, 110.0, 105.0) for share in (0.0, 0.1, 0.3, 0.8)]
    said.append(Said("b", 0.6, 50.0, 90.0, 94.0, 100.0))
    stages = by_stage(said)
    assert {stage: [promise.share for promise in of] for stage, of in stages.items()} == {
        0.0: [0.0, 0.6],
        0.25: [0.3, 0.6],
        0.5: [0.6, 0.8],
        0.75: [0.8],
    }
    found = ends(said)
    assert (found["num_held"], found["num"]) == (4, 5)
    assert found["num_held_by_stage"] == {"0.0": 1, "0.25": 1, "0.5": 1, "0.75": 1}
    assert found["half_width_at_a_quarter"] == pytest.approx((10 / 75 + 2 / 50) / 2)


def test_the_simulator_decodes_every_job_once_over_the_death_of_the_only_worker() -> None:
    night = _night()
    batch = [Ended(CODE_BATCH, "code-batch", 20.0, 90.0, 60.0, night[0].decoded) for _ in range(30)]
    week = week_of([*night, *batch], seed=1)
    by_contestant, said = simulated(week, Outage(40.0, 45.0, 10.0), seed=1)
    assert set(by_contestant) == set(CONTESTANTS)
    for ended in by_contestant.values():
        assert len(ended) == len(night) + len(batch)
        assert not any(40.0 < job.ended_s <= 45.0 for job in ended), "no worker runs"
        assert all(job.ended_s < math.inf for job in ended if job.deadline_s == math.inf)
        assert 0 < deadlines(ended)["all"] <= 1
    assert {promise.batch_id for promise in said} == {"code-batch"}
    assert max(job.decoded.load for job in by_contestant["slack"] if job.decoded) <= NUM_SLOTS
