"""Segments that are kept apart: those used last, as many as a task may have."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.fixtures.publishing import ready_job
from worker.deciding.decider import facts_of
from worker.deciding.evidence_cache import MOST_SEGMENTS, SegmentsApart, kept_apart

NOW = datetime(2026, 3, 1, tzinfo=UTC)
IDLE = timedelta(days=3)


class World:
    """The time, and the segments of which there is evidence."""

    def __init__(self) -> None:
        self.now, self.known = NOW, dict[str, datetime]()
        known, now = (lambda task: self.known if task == "code" else {}), (lambda: self.now)
        self.keeps = SegmentsApart(known, idle=IDLE, now=now).keeps


@pytest.fixture
def world() -> World:
    return World()


def test_a_task_keeps_so_many_segments_apart_and_pools_the_others(world: World) -> None:
    kept = [world.keeps("code", f"made-up-{number}") for number in range(5000)]
    assert sum(kept) == MOST_SEGMENTS
    assert kept[:MOST_SEGMENTS] == [True] * MOST_SEGMENTS, "the first are in use and stay"
    assert world.keeps("code", "made-up-0")
    assert world.keeps("code", ""), "jobs without a segment are the pool"
    assert world.keeps("sql", "gold"), "another task has segments of its own"


def test_a_segment_in_use_outlives_any_number_of_new_ones(world: World) -> None:
    for day in range(20):
        world.now = NOW + timedelta(days=day)
        assert world.keeps("code", "gold")
        for number in range(500):
            world.keeps("code", f"day-{day}-{number}")


def test_the_one_used_last_longest_ago_makes_room(world: World) -> None:
    for number in range(MOST_SEGMENTS):
        world.now = NOW + timedelta(hours=number)
        assert world.keeps("code", f"old-{number}")
    world.now = NOW + IDLE - timedelta(seconds=1)
    assert not world.keeps("code", "new")
    world.now = NOW + IDLE
    assert world.keeps("code", "new")
    assert not world.keeps("code", "old-0")
    assert world.keeps("code", "old-1")


def test_segments_that_other_workers_know_count(world: World) -> None:
    world.known.update({f"theirs-{number}": NOW for number in range(MOST_SEGMENTS - 1)})
    assert world.keeps("code", "mine")
    assert world.keeps("code", "theirs-0")
    assert not world.keeps("code", "one more")


def test_of_many_uses_the_segments_used_last_are_kept() -> None:
    uses = [(f"s{number}", NOW + timedelta(seconds=number)) for number in range(300)]
    uses += [("", NOW - IDLE), ("s0", NOW + IDLE)]
    recent = {f"s{number}" for number in range(301 - MOST_SEGMENTS, 300)}
    assert kept_apart(uses) == {"", "s0", *recent}
    assert kept_apart(uses[:3]) == {"", "s0", "s1", "s2"}


def test_a_pooled_job_is_decided_from_its_tasks_evidence_and_adds_to_it() -> None:
    apart = ready_job("a", segment="gold")
    assert (apart.prepared.segment, facts_of(apart.prepared).segment) == ("gold", "gold")
    pooled = ready_job("b", segment="gold", keeps_apart=lambda task, segment: False)
    assert (pooled.prepared.segment, facts_of(pooled.prepared).segment) == ("", "")
    assert pooled.job.segment == "gold", "the result still says it"
