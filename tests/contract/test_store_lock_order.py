"""Deadlocks: everything that locks rows locks them in one order, whatever order the database sorts texts in."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from alphaloop.messages import Mode
from alphaloop.store.database import Database
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import OutcomeStore
from tests.fixtures.runs import claim_request, decode_run, outcome, vanilla_counts

pytestmark = pytest.mark.postgres

NUM_PAIRS = 150
#: A dictionary and Python disagree about the order of these.
TASKS = ("apple", "Banana", "cherry", "Date", "egg-plant", "Egg_plant", "fig", "Grape")
JOBS = tuple(f"{name}{number}" for name in TASKS for number in range(3))


def test_claims_renewals_releases_and_outcomes_never_deadlock(dictionary_database: Database, seed: int) -> None:
    """Each round two workers record and renew their own jobs, and ask for the other's, all at the same time."""
    sorted_by_it = text("SELECT string_agg(x, '' ORDER BY x) FROM unnest('{a,B,c}'::text[]) AS x")
    assert dictionary_database.scalar(sorted_by_it) == "aBc" != "".join(sorted("aBc"))
    jobs, outcomes, rng = JobStore(dictionary_database), OutcomeStore(dictionary_database), random.Random(seed)
    run = {task: decode_run(vanilla_counts(3), mode=Mode.VANILLA, task=task) for task in TASKS}

    def claim(names: list[str], owner: str) -> None:
        jobs.claim([claim_request(name) for name in names], owner=owner, lease_s=600, max_attempts=9)

    def record(names: list[str], owner: str) -> None:
        done = [outcome(name, run=run[TASKS[number % len(TASKS)]]) for number, name in enumerate(names)]
        assert len(outcomes.record(done, owner=owner)) == len(names)

    with ThreadPoolExecutor(4) as pool:
        for number in range(NUM_PAIRS):
            names = [f"{name}-{number}" for name in JOBS]
            mine, others = names[::2], names[1::2]
            claim(mine, "w1")
            claim(others, "w2")
            acts: list[Callable[[], object]] = [
                lambda names=names: claim(rng.sample(names, len(names)), "w3"),  # type: ignore[misc]
                lambda mine=mine: jobs.renew(dict.fromkeys(reversed(mine), 1), owner="w1", lease_s=600),  # type: ignore[misc]
                lambda mine=mine: record(rng.sample(mine, len(mine)), "w1"),  # type: ignore[misc]
                lambda others=others: record(others[::-1], "w2"),  # type: ignore[misc]
            ]
            for done in [pool.submit(act) for act in acts]:
                done.result(60)
