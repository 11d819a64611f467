"""Runs of a real PostgreSQL as the simulator's file: each drafter's counts, of traffic only."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from alphaloop.store.database import Database
from benchmarks.policy.export import runs_of
from tests.contract.test_store_shadows import record
from tests.fixtures.history import decoded, drawn_counts, record_runs

pytestmark = pytest.mark.postgres


def test_runs_of_traffic_come_with_the_counts_of_their_drafters(database: Database, rng: random.Random) -> None:
    at = datetime.now(UTC)
    counts = drawn_counts(rng, 0.7, num_tokens=40, num_draft_tokens=3)
    runs = {
        "a": decoded(counts, at, task="sql"),
        "b": decoded(counts, at, task="sql", purpose="probe"),
        "c": decoded(counts, at, task="chat"),
    }
    record_runs(database, runs)
    (found,) = runs_of(database, at - timedelta(hours=1), task="sql")
    assert (found.num_tokens, found.num_prompt_tokens, set(found.drafters)) == (40, 20, {"lookup"})
    its = found.drafters["lookup"]
    assert (its.proposed, its.trials, its.accepts) == (counts.proposed, counts.trials, counts.accepts)
    assert its.chances[0] == counts.rounds - 1
    assert list(runs_of(database, at + timedelta(hours=1))) == []


def test_a_vanilla_run_comes_with_what_its_shadow_counted(database: Database, rng: random.Random) -> None:
    at = datetime.now(UTC)
    shadows = record(database, rng, 3, at)
    found = list(runs_of(database, at - timedelta(hours=1)))
    assert [run.drafters["lookup"].accepts for run in found] == [counts.accepts for counts in shadows]
