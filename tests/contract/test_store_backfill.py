"""What an older installation knows is not lost: acceptance_state made from acceptance_hourly, in a real PostgreSQL."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import SUMS, EvidenceSums
from alphaloop.deciding.key_evidence import KeyEvidence
from alphaloop.messages import Mode, Purpose
from alphaloop.store.acceptance_state import AcceptanceStateStore
from alphaloop.store.backfill import fill_from_hours
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import DecodeRun, insert_runs
from tests.fixtures.runs import ENGINE, TARGET, decode_run, simulated_counts, vanilla_counts

pytestmark = pytest.mark.postgres

NOW = datetime(2026, 3, 1, 12, 59, tzinfo=UTC)
HALF_LIFE = timedelta(days=3)
SERVED = {"lookup": "draft-1"}
#: Products that an hour never stored.
GUESSED = {"accepts_chances_w2"}


def write(database: Database, runs: list[DecodeRun]) -> None:
    """As a process before acceptance_state did: runs and hours."""
    with database.begin() as connection:
        insert_runs(connection, [(f"job-{number}", 1, run) for number, run in enumerate(runs)])


def evidence_cache(database: Database) -> dict[EvidenceKey, KeyEvidence]:
    return {row.key: row.evidence for row in AcceptanceStateStore(database).look(TARGET, ENGINE, SERVED).rows}


def in_turn(runs: list[DecodeRun]) -> KeyEvidence:
    evidence = KeyEvidence.empty(runs[0].decoded_at)
    for run in runs:
        evidence = evidence.with_job(run.evidence, HALF_LIFE)
    return evidence


def assert_near(found: EvidenceSums, expected: EvidenceSums, *, rel: float) -> None:
    for name in sorted(set(SUMS) - GUESSED):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=rel), name
    for name in GUESSED:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=max(rel, 0.25)), name


def test_jobs_of_a_day_are_remembered_as_if_they_had_been_added_one_by_one(
    database: Database, rng: random.Random
) -> None:
    """But for the minute of their hour: half an hour of a half-life of three days is half a percent."""
    runs = []
    for hour in range(24):
        for minute in sorted(rng.sample(range(60), 5)):
            counts = simulated_counts(rng, [0.8, 0.6, 0.5], rng.randint(5, 40))
            runs.append(decode_run(counts, at=NOW - timedelta(hours=23 - hour, minutes=59 - minute)))
    write(database, runs)
    assert fill_from_hours(database, HALF_LIFE, NOW) == 1
    ((key, evidence),) = evidence_cache(database).items()
    assert key == runs[0].key
    expected = in_turn(runs)
    until = max(evidence.all.as_of, expected.all.as_of)
    evidence, expected = evidence.faded(until, HALF_LIFE), expected.faded(until, HALF_LIFE)
    assert_near(evidence.all, expected.all, rel=0.02)
    assert evidence.recent.jobs == pytest.approx(expected.recent.jobs, rel=0.1)
    assert evidence.recent.accepts[0] / evidence.recent.trials[0] == pytest.approx(0.8, abs=0.2)


def test_keys_stay_apart_and_controls_stay_out(database: Database, rng: random.Random) -> None:
    counts = simulated_counts(rng, [0.5, 0.5], 10)
    runs = [
        decode_run(counts, at=NOW),
        decode_run(counts, at=NOW, purpose=Purpose.PROBE),
        decode_run(counts, at=NOW, task="chat", prompt_bucket="<=1024"),
        decode_run(vanilla_counts(7), mode=Mode.VANILLA, at=NOW),
        decode_run(vanilla_counts(7), mode=Mode.VANILLA, purpose=Purpose.CONTROL, task="chat", at=NOW),
        decode_run(counts, task="old", at=NOW - timedelta(days=40)),
    ]
    write(database, runs)
    fill_from_hours(database, HALF_LIFE, NOW)
    found = {key: evidence.all.jobs for key, evidence in evidence_cache(database).items()}
    assert found == pytest.approx({runs[0].key: 2.0, runs[2].key: 1.0, runs[3].key: 1.0})


def test_one_job_is_remembered_exactly(database: Database, rng: random.Random) -> None:
    for number, counts in enumerate([simulated_counts(rng, [0.7, 0.7, 0.7], 20), vanilla_counts(1)]):
        with database.begin() as connection:
            connection.execute(text("TRUNCATE acceptance_state, acceptance_hourly"))
            run = decode_run(counts, at=NOW + timedelta(seconds=number))
            insert_runs(connection, [("a", 1, run)])
        fill_from_hours(database, HALF_LIFE, NOW)
        (evidence,) = evidence_cache(database).values()
        job = run.evidence.faded(evidence.all.as_of, timedelta(days=10**6))
        assert evidence.recent == evidence.all
        assert_near(evidence.all, job, rel=1e-6)


def test_busy_hours_long_ago_do_not_count_as_recent(database: Database, rng: random.Random) -> None:
    runs = [decode_run(simulated_counts(rng, [0.1], 10), at=NOW - timedelta(days=2)) for _ in range(400)]
    runs += [decode_run(simulated_counts(rng, [0.9], 10), at=NOW) for _ in range(100)]
    write(database, runs)
    fill_from_hours(database, HALF_LIFE, NOW)
    (evidence,) = evidence_cache(database).values()
    assert evidence.recent.jobs < 40
    assert evidence.recent.accepts[0] / evidence.recent.trials[0] > 0.8


def test_it_is_done_once_and_only_where_it_is_needed(database: Database, rng: random.Random) -> None:
    assert fill_from_hours(database, HALF_LIFE, NOW) == 0
    write(database, [decode_run(simulated_counts(rng, [0.5], 5), task=task, at=NOW) for task in "abc"])
    barrier = threading.Barrier(3)

    def fill() -> int:
        barrier.wait(30)
        return fill_from_hours(database, HALF_LIFE, NOW)

    with ThreadPoolExecutor(3) as pool:
        made = sorted(future.result(60) for future in [pool.submit(fill) for _ in range(3)])
    assert made == [0, 0, 3]
    write(database, [decode_run(simulated_counts(rng, [0.5], 5), task="d", at=NOW)])
    assert fill_from_hours(database, HALF_LIFE, NOW) == 0
