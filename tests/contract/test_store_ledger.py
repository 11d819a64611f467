"""Every other sum of evidence is a fold of the ledger, to the last bit, in a real PostgreSQL."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count, groupby, zip_longest
from operator import attrgetter
from typing import Any

import pytest
from sqlalchemy import Row, text

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import KeyEvidence
from alphaloop.messages import Mode, Purpose
from alphaloop.store.database import Database, of_row
from alphaloop.store.decision_inputs import AcceptanceStateStore
from alphaloop.store.job_counts import HOUR_KEY, DecodeRun, JobCounts, ShadowRun, sums_by_hour
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.tables import KEY
from tests.fixtures.ledger import LedgerStore, counts_of, shadow_of
from tests.fixtures.runs import ENGINE, TARGET, claim, decode_run, outcome, shadow_run, simulated_counts, vanilla_counts

pytestmark = pytest.mark.postgres

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
HALF_LIFE = timedelta(days=3)
_NUMBERS = count()


def some_job(rng: random.Random, at: datetime) -> JobCounts:
    """Vanilla, speculative, a probe or a control, of few keys; most with counts of other drafters."""
    task, bucket = rng.choice(["code", "chat"]), rng.choice(["<=256", "<=1024"])
    purpose = rng.choices([Purpose.TRAFFIC, Purpose.PROBE, Purpose.CONTROL], [8, 1, 1])[0]
    if rng.random() < 0.4:
        run = decode_run(vanilla_counts(rng.randint(1, 50)), mode=Mode.VANILLA, at=at, task=task, prompt_bucket=bucket)
    else:
        counts = simulated_counts(rng, [0.9, 0.6, 0.5, 0.4][: rng.randint(1, 4)], rng.randint(0, 30))
        run = decode_run(counts, at=at, task=task, prompt_bucket=bucket)
    if rng.random() < 0.3:
        counts = replace(run.counts, num_forced=rng.randint(1, 20))
        key = replace(run.key, form_bucket=rng.choice(["json", "json,tools"]))
        run = replace(run, key=key, counts=counts, num_tokens=counts.num_tokens)
    run = replace(run, purpose=purpose, wall_s=rng.uniform(0.1, 9), device_s=rng.uniform(0.1, 9))
    drafters = ["lookup", "small", "gated"]
    shadows = [shadow(rng, run, drafter) for drafter in rng.sample(drafters, rng.randint(0, 3))]
    return JobCounts(f"job-{next(_NUMBERS)}", 1, run, tuple(shadows))


def shadow(rng: random.Random, run: DecodeRun, drafter: str) -> ShadowRun:
    """`gated` is counted in parts of rounds; `lookup` may be the drafter that decoded."""
    k = rng.randint(1, 6)
    counts = simulated_counts(rng, [0.8, 0.7, 0.5, 0.5, 0.4, 0.3][:k], rng.randint(0, 20))
    chances = tuple(trials + rng.randint(0, 3) for trials in counts.trials) if drafter == "gated" else ()
    return shadow_run(run, counts, drafter, chances=chances)


def record(database: Database, jobs: Sequence[JobCounts], owner: str = "w") -> None:
    """As a worker does it: claims, then outcomes that are recorded together."""
    claim(database, *(job.job_id for job in jobs), owner=owner)
    outcomes = [replace(outcome(job.job_id, run=job.run), shadows=job.shadows) for job in jobs]
    assert len(OutcomeStore(database, half_life=HALF_LIFE).record(outcomes, owner=owner)) == len(jobs)


def work(database: Database, seed: int, num_commits: int = 40, span: timedelta = timedelta(hours=5)) -> None:
    """One worker's commits, of one to a dozen jobs that ended at times which go back and forth."""
    began = datetime.now(UTC) - span
    rng = random.Random(seed)
    for _ in range(num_commits):
        times = [began + rng.uniform(0, 1) * span for _ in range(12)]
        record(database, [some_job(rng, at) for at in times[: rng.randint(1, 12)]], f"worker-{seed}")


def state(database: Database) -> list[tuple[Any, ...]]:
    columns = ", ".join(KEY)
    query = f"SELECT {columns}, as_of, num_jobs, last_ledger_id, evidence FROM acceptance_state ORDER BY {columns}"
    return [(*row[:-1], bytes(row[-1])) for row in database.rows(text(query))]


def evidence(database: Database) -> dict[EvidenceKey, KeyEvidence]:
    served = {"lookup": "draft-1", "small": "draft-1", "gated": "draft-1"}
    return {row.key: row.evidence for row in AcceptanceStateStore(database).read(TARGET, ENGINE, served).rows}


def clock(database: Database) -> datetime:
    moment: datetime = database.scalar(text("SELECT clock_timestamp()"))
    return moment


def test_the_state_is_the_fold_of_the_ledger_to_the_last_bit(database: Database, seed: int) -> None:
    """Three workers share keys; several hundred jobs in commits of different sizes."""
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: work(database, seed + number, span=timedelta(days=20)), range(3)))
    recorded = state(database)
    assert sum(row[-3] for row in recorded) > 600
    assert LedgerStore(database).evidence(TARGET, ENGINE, clock(database), HALF_LIFE) == evidence(database)


def test_the_hours_are_the_fold_of_the_ledger_to_the_last_bit(database: Database, seed: int) -> None:
    """Seconds are floating-point numbers, so their sums tell whether jobs were added in the same order and groups."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: work(database, seed + number), range(2)))
    with database.begin() as connection:
        runs = connection.execute(text("SELECT * FROM decode_runs")).all()
        others = connection.execute(text("SELECT * FROM evidence_rows")).all()
        hours = connection.execute(text("SELECT * FROM acceptance_hourly")).mappings().all()
    jobs = {(run.recorded_in, run.ledger_id): ledger_job(run, others) for run in runs}
    folded: dict[tuple[Any, ...], dict[str, Any]] = {}
    for _, group in groupby(sorted(jobs), lambda position: position[0]):
        for key, row in sums_by_hour(jobs[position] for position in group).items():
            folded[key] = add_rows(folded[key], row) if key in folded else row
    assert {tuple(hour[name] for name in HOUR_KEY): dict(hour) for hour in hours} == folded


def add_rows(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """The sum of two rows of one hour and key."""
    total = dict(left)
    for name, value in right.items():
        if isinstance(value, list):
            total[name] = [a + b for a, b in zip_longest(left[name], value, fillvalue=0)]
        elif name not in HOUR_KEY:
            total[name] = left[name] + value
    return total


def ledger_job(run: Row[Any], others: Sequence[Row[Any]]) -> JobCounts:
    """A job as the ledger has it."""
    mine = sorted((row for row in others if row.job_id == run.job_id), key=attrgetter("ledger_id"))
    elsewhere = ("key", "counts", "chances", "is_counted", "proposers")  # only what is counted is in the ledger
    facts = {name: getattr(run, name) for name in DecodeRun.__slots__ if name not in elsewhere}
    decoded = DecodeRun(key=of_row(EvidenceKey, run), counts=counts_of(run), chances=tuple(run.chances), **facts)
    return JobCounts(
        run.job_id, run.attempt, decoded, tuple(replace(shadow_of(row), is_whole=row.is_whole) for row in mine)
    )


def test_every_row_says_whether_it_is_evidence_and_how_it_was_counted(database: Database, rng: random.Random) -> None:
    run = decode_run(simulated_counts(rng, [0.8], 10), at=NOW)
    control = decode_run(vanilla_counts(5), mode=Mode.VANILLA, purpose=Purpose.CONTROL, at=NOW)
    shadows = tuple(shadow(rng, run, drafter) for drafter in ("lookup", "small", "gated"))
    shadows += (replace(shadows[2], key=replace(run.key, drafter="half"), is_drafted=True),)
    record(database, [JobCounts("a", 1, run, shadows), JobCounts("b", 1, run), JobCounts("c", 1, control)])
    columns = "recorded_in, recorded_at > now() - interval '1 hour' AS is_now"
    runs = database.rows(text(f"SELECT job_id, is_evidence, {columns} FROM decode_runs ORDER BY ledger_id"))
    rows = database.rows(text(f"SELECT drafter, source, is_whole, {columns} FROM evidence_rows ORDER BY ledger_id"))
    transaction = runs[0].recorded_in
    assert [tuple(row) for row in runs] == [
        ("a", False, transaction, True),
        ("b", True, transaction, True),
        ("c", False, transaction, True),
    ]
    assert [tuple(row) for row in rows] == [
        ("lookup", "drafted", True, transaction, True),
        ("small", "shadow", True, transaction, True),
        ("gated", "shared_weights", False, transaction, True),
        ("half", "drafted", False, transaction, True),
    ]


def test_the_past_is_folded_up_to_a_moment(database: Database, seed: int) -> None:
    ledger = LedgerStore(database)
    then: list[tuple[datetime, dict[EvidenceKey, KeyEvidence]]] = []
    for number in range(3):
        work(database, seed + number, num_commits=3)
        then.append((clock(database), evidence(database)))
        work(database, seed + 10 + number, num_commits=2)
    for moment, expected in then:
        assert ledger.evidence(TARGET, ENGINE, moment, HALF_LIFE) == expected
    assert ledger.evidence("another", ENGINE, then[-1][0], HALF_LIFE) == {}
    assert ledger.evidence(TARGET, ENGINE, clock(database), HALF_LIFE) == evidence(database)
