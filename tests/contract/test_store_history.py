"""Lengths and numbers of a task's jobs out of a real PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.messages import Purpose
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import DecodeRun
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.traffic import TrafficStore
from tests.fixtures.runs import claim_request, decode_run, outcome

pytestmark = pytest.mark.postgres

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
COUNTS = AcceptanceCounts(rounds=11, num_empty_rounds=1, proposed=(10, 10), trials=(10, 8), accepts=(8, 4))
_NUMBERS = count()


@pytest.fixture
def history(database: Database) -> TrafficStore:
    return TrafficStore(database)


def record(database: Database, *runs: DecodeRun) -> None:
    ids = [f"{next(_NUMBERS)}" for _ in runs]
    JobStore(database).claim([claim_request(i) for i in ids], owner="w", lease_s=60, max_attempts=3)
    recorded = [outcome(i, run=run) for i, run in zip(ids, runs, strict=True)]
    assert len(OutcomeStore(database).record(recorded, owner="w")) == len(runs)


def test_jobs_since_a_moment_are_those_of_the_hours_after_it(history: TrafficStore, database: Database) -> None:
    minutes = {
        0: NOW,
        20: NOW + timedelta(minutes=20),
        70: NOW + timedelta(minutes=70),
        140: NOW + timedelta(minutes=140),
    }
    record(database, *(decode_run(COUNTS, at=at) for at in minutes.values()))
    record(
        database,
        decode_run(COUNTS, at=minutes[140], task="chat"),
        decode_run(COUNTS, at=minutes[140], sampling_bucket="t<=1.0"),
        decode_run(COUNTS, at=minutes[140], purpose=Purpose.PROBE),
    )
    assert history.num_jobs_since("code", "greedy", NOW - timedelta(minutes=1)) == 4
    assert history.num_jobs_since("code", "greedy", minutes[20]) == 2
    assert history.num_jobs_since("code", "greedy", minutes[140]) == 0
