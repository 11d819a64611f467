"""What is remembered of evidence keys, in a real PostgreSQL: the same sums as in memory, whoever adds and whenever."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from sqlalchemy import text

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import SUMS, EvidenceSums, KeyEvidence, together
from alphaloop.errors import StoreError
from alphaloop.messages import Mode, Purpose
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import AcceptanceStateStore, pack, unpack
from alphaloop.store.job_counts import DecodeRun
from alphaloop.store.traffic import TrafficStore
from tests.fixtures import runs
from tests.fixtures.deciding import add_evidence
from tests.fixtures.runs import ENGINE, TARGET, decode_run, simulated_counts, vanilla_counts

pytestmark = pytest.mark.postgres

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
HALF_LIFE = timedelta(days=3)
SERVED = {"lookup": "draft-1"}


@pytest.fixture
def state(database: Database) -> AcceptanceStateStore:
    return AcceptanceStateStore(database)


record = partial(runs.record, half_life=HALF_LIFE)


def evidence_cache(state: AcceptanceStateStore) -> dict[EvidenceKey, KeyEvidence]:
    return {row.key: row.evidence for row in state.read(TARGET, ENGINE, SERVED).rows}


def assert_same(found: KeyEvidence, expected: KeyEvidence) -> None:
    for sums, others in ((found.all, expected.all), (found.recent, expected.recent)):
        assert sums.as_of == others.as_of
        for name in SUMS:
            one, other = getattr(sums, name), getattr(others, name)
            if isinstance(one, tuple):
                length = max(len(one), len(other))
                one, other = (values + (0.0,) * (length - len(values)) for values in (one, other))
            assert one == pytest.approx(other, rel=1e-9, abs=1e-9), name


def random_runs(rng: random.Random, num_batches: int) -> list[list[DecodeRun]]:
    """Batches of runs of a few keys, at times that go back and forth over a month."""
    batches = []
    for _ in range(num_batches):
        batch = []
        for _ in range(rng.randint(1, 5)):
            at = NOW + timedelta(days=rng.uniform(-30, 0), microseconds=rng.randrange(10**6))
            task, bucket = rng.choice(["code", "chat"]), rng.choice(["<=256", "<=1024"])
            if rng.random() < 0.3:
                counts, mode = vanilla_counts(rng.randint(1, 50)), Mode.VANILLA
            else:
                counts = simulated_counts(rng, [0.9, 0.6, 0.5, 0.4][: rng.randint(1, 4)], rng.randint(0, 30))
                mode = Mode.SPECULATIVE
            batch.append(decode_run(counts, task=task, prompt_bucket=bucket, mode=mode, at=at))
        batches.append(batch)
    return batches


def by_key(runs: Sequence[DecodeRun]) -> dict[EvidenceKey, list[EvidenceSums]]:
    found: dict[EvidenceKey, list[EvidenceSums]] = {}
    for run in runs:
        found.setdefault(run.key, []).append(run.evidence)
    return found


def test_rows_hold_what_the_same_jobs_give_in_memory(
    database: Database, state: AcceptanceStateStore, rng: random.Random
) -> None:
    """Of batches in any order of time, new keys and old ones, and k that grows and shrinks."""
    expected: dict[EvidenceKey, KeyEvidence] = {}
    num_jobs: dict[EvidenceKey, int] = {}
    longest = decode_run(simulated_counts(rng, [0.97] * 64, 40), at=NOW)
    for batch in [*random_runs(rng, 25), [longest]]:
        record(database, *batch)
        for key, jobs in by_key(batch).items():
            added = together(jobs, HALF_LIFE)
            expected[key] = expected.get(key, KeyEvidence.empty(added.as_of)).with_job(added, HALF_LIFE)
            num_jobs[key] = num_jobs.get(key, 0) + len(jobs)
    found = evidence_cache(state)
    assert found.keys() == expected.keys()
    for key, evidence in expected.items():
        assert_same(found[key], evidence)
    assert {row.key: row.num_jobs for row in state.read(TARGET, ENGINE, SERVED).rows} == num_jobs


def test_the_sum_of_everything_does_not_depend_on_the_order(
    database: Database, state: AcceptanceStateStore, rng: random.Random
) -> None:
    """A job older than the row is added with its own faded weight."""
    times = [NOW + timedelta(days=rng.uniform(-30, 0)) for _ in range(30)]
    runs = [decode_run(vanilla_counts(rng.randint(2, 50)), mode=Mode.VANILLA, at=at) for at in times]
    for run in runs:
        record(database, run)
    for key, evidence in evidence_cache(state).items():
        whole = together(by_key(runs)[key], HALF_LIFE)
        assert_same(KeyEvidence(evidence.all, whole), KeyEvidence(whole, whole))


def test_another_half_life_holds_from_then_on(database: Database, state: AcceptanceStateStore) -> None:
    """Three days at the old one, then a day at the new one."""
    run = decode_run(vanilla_counts(11), mode=Mode.VANILLA, at=NOW)
    record(database, run)
    record(database, replace(run, decoded_at=NOW + timedelta(days=3)))
    record(database, replace(run, decoded_at=NOW + timedelta(days=4)), half_life=timedelta(days=1))
    (evidence,) = evidence_cache(state).values()
    weights = (0.25, 0.5, 1.0)
    assert evidence.all.jobs == pytest.approx(sum(weights))
    assert evidence.all.jobs_w2 == pytest.approx(sum(w * w for w in weights))


def test_a_look_finds_what_is_served_and_nothing_else(database: Database, state: AcceptanceStateStore) -> None:
    counts = simulated_counts(random.Random(1), [0.5], 5)
    served = [
        decode_run(counts),
        decode_run(counts, task="chat", segment="gold"),
        decode_run(vanilla_counts(3), mode=Mode.VANILLA),
    ]
    others = [
        decode_run(counts, target="target-2"),
        decode_run(counts, engine="engine-2"),
        decode_run(counts, revision="draft-2"),
        decode_run(counts, drafter="small", revision="draft-1"),
    ]
    record(database, *served, *others)
    read = state.read(TARGET, ENGINE, SERVED)
    assert read.is_all
    assert {row.key for row in read.rows} == {run.key for run in served}


def test_the_next_look_finds_what_changed_and_misses_no_slow_transaction(
    database: Database, state: AcceptanceStateStore
) -> None:
    runs = [decode_run(vanilla_counts(3), mode=Mode.VANILLA, task=task) for task in "abc"]
    record(database, *runs)
    first = state.read(TARGET, ENGINE, SERVED)
    assert state.read(TARGET, ENGINE, SERVED, since=first.seen).rows == []
    with database.begin() as slow:
        add_evidence(slow, [(runs[0].key, runs[0].evidence)], HALF_LIFE)
        record(database, runs[1])
        second = state.read(TARGET, ENGINE, SERVED, since=first.seen)
        assert not second.is_all
        assert {row.task: row.num_jobs for row in second.rows} == {"b": 2}
    third = state.read(TARGET, ENGINE, SERVED, since=second.seen)
    assert {row.task: row.num_jobs for row in third.rows if row.task != "b"} == {"a": 2}
    assert state.read(TARGET, ENGINE, SERVED, since=third.seen).rows == []


def test_a_database_put_back_to_an_earlier_time_is_read_whole(database: Database, state: AcceptanceStateStore) -> None:
    record(database, decode_run(vanilla_counts(3), mode=Mode.VANILLA))
    read = state.read(TARGET, ENGINE, SERVED)
    again = state.read(TARGET, ENGINE, SERVED, since=read.seen + 10**6)
    assert again.is_all
    assert len(again.rows) == 1


def test_what_nobody_adds_to_any_more_is_dropped(database: Database, state: AcceptanceStateStore) -> None:
    for task, days in (("old", 100), ("young", 10)):
        record(database, decode_run(vanilla_counts(3), mode=Mode.VANILLA, task=task, at=NOW - timedelta(days=days)))
    assert state.drop_before(NOW - timedelta(days=90)) == 1
    assert [key.task for key in evidence_cache(state)] == ["young"]


def test_sql_sees_the_same_numbers(database: Database, state: AcceptanceStateStore, rng: random.Random) -> None:
    for batch in random_runs(rng, 6):
        record(database, *batch)
    names = ("trials", "accepts", "recent_trials", "recent_accepts")
    rows = database.rows(text("SELECT * FROM evidence_now"))
    found = evidence_cache(state)
    assert len(rows) == len(found)
    for row in rows:
        key = EvidenceKey(**{name: getattr(row, name) for name in EvidenceKey.__slots__})
        evidence = found[key]
        assert (row.jobs, row.recent_jobs, row.rounds) == (evidence.all.jobs, evidence.recent.jobs, evidence.all.rounds)
        assert row.mean_output_tokens == pytest.approx(evidence.all.output_tokens / evidence.all.ends)
        lists = [evidence.all.trials, evidence.all.accepts, evidence.recent.trials, evidence.recent.accepts]
        assert [list(getattr(row, name)) for name in names] == [list(values) for values in lists]


def test_bytes_that_no_memory_packs_to_are_refused() -> None:
    evidence = KeyEvidence.empty(NOW)
    assert unpack(b"", NOW) == unpack(pack(evidence), NOW) == evidence
    with pytest.raises(StoreError, match="found 152 bytes"):
        unpack(pack(evidence) + bytes(8), NOW)


def test_jobs_since_a_moment_are_those_of_the_hours_after_it(database: Database) -> None:
    counts, history = vanilla_counts(4), TrafficStore(database)
    minutes = {number: NOW + timedelta(minutes=number) for number in (0, 20, 70, 140)}
    record(database, *(decode_run(counts, at=at) for at in minutes.values()))
    for other in ({"task": "chat"}, {"sampling_bucket": "t<=1.0"}, {"purpose": Purpose.PROBE}):
        record(database, decode_run(counts, at=minutes[140], **other))  # type: ignore[arg-type]
    assert history.num_jobs_since("code", "greedy", NOW - timedelta(minutes=1)) == 4
    assert history.num_jobs_since("code", "greedy", minutes[20]) == 2
    assert history.num_jobs_since("code", "greedy", minutes[140]) == 0
