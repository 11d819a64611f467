"""Device time and money of jobs: every sum is the sum of its jobs, in a real PostgreSQL."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, time, timedelta

import pytest
from sqlalchemy import text

from alphaloop.acceptance import Interval
from alphaloop.messages import Mode, Purpose
from alphaloop.prices import per_hour_at
from alphaloop.settings import PriceSettings, RateSettings
from alphaloop.store.api import ApiBatch, ApiBatchStore, ApiFile, ApiFileStore, Deed
from alphaloop.store.database import Database
from alphaloop.store.job_counts import DecodeRun
from alphaloop.store.spending import Spending, SpendingStore, SpentBy, total
from tests.fixtures.runs import decode_run, record, simulated_counts, vanilla_counts

pytestmark = pytest.mark.postgres

#: Berlin's clock goes back at 01:00 UTC.
CHANGE = datetime(2026, 10, 25, 1, tzinfo=UTC)
SPAN = timedelta(hours=30)
PRICES = PriceSettings(
    per_hour=2.5,
    currency="EUR",
    time_zone="Europe/Berlin",
    rates=(
        RateSettings(per_hour=9.0, target="big", begins=time(2, 15), ends=time(2, 45)),
        RateSettings(per_hour=8.0, target="big"),
        RateSettings(per_hour=1.25, begins=time(22), ends=time(6)),
    ),
)


def some_run(rng: random.Random) -> DecodeRun:
    """A job near the change of the clock, of some seconds or of hours."""
    ends, wall_s = CHANGE - SPAN / 2 + rng.random() * SPAN, rng.choice([0.0, 2.0, 600.0, 20_000.0]) * rng.random()
    task, segment = rng.choice(["code", "chat"]), rng.choice(["", "gold", "free"])
    if rng.random() < 0.4:
        run = decode_run(vanilla_counts(rng.randint(1, 50)), mode=Mode.VANILLA, at=ends, task=task, segment=segment)
    else:
        run = decode_run(simulated_counts(rng, [0.8, 0.6], 10), at=ends, task=task, segment=segment)
    batch_id = rng.choice([None, "batch_of_a_key", "batch_of_another", "monday"])
    times = {"wall_s": wall_s, "device_s": wall_s * rng.random() or 0.5}
    return replace(run, **times, batch_id=batch_id, target=rng.choice(["", "small", "big"]), purpose=Purpose.TRAFFIC)


def cost_of(run: DecodeRun) -> float:
    """By the wall clock, a quarter of an hour at a time."""
    began, quarter = run.decoded_at - timedelta(seconds=run.wall_s), timedelta(minutes=15)
    if began == run.decoded_at:
        return run.device_s * (per_hour_at(PRICES, run.target, run.decoded_at) or 0.0) / 3600
    at, paid = began, 0.0
    while at < run.decoded_at:
        midnight = at.replace(hour=0, minute=0, second=0, microsecond=0)
        ends = min(run.decoded_at, midnight + ((at - midnight) // quarter + 1) * quarter)
        paid += (ends - at).total_seconds() * (per_hour_at(PRICES, run.target, at) or 0.0) / 3600
        at = ends
    return paid / (run.decoded_at - began).total_seconds() * run.device_s


@pytest.fixture
def runs(database: Database) -> dict[str, DecodeRun]:
    """Jobs of two keys, of a batch without one, and of none, by job_id."""
    for key, batch_id in (("ada", "batch_of_a_key"), ("bob", "batch_of_another")):
        deed = Deed("key", key, "batch_created", batch_id)
        file = ApiFile(f"file-{key}", key, "in.jsonl", "batch", 1, None, CHANGE, datetime.now(UTC) + timedelta(days=9))
        ApiFileStore(database).add(file, most_bytes=10, deed=deed)
        names = {"completion_window": "24h", "metadata": None, "created_at": CHANGE, "expires_at": CHANGE + SPAN}
        batch = ApiBatch(
            batch_id,
            key,
            "gold",
            None,
            (),
            "/v1/chat/completions",
            input_file_id=file.id,
            **names,  # type: ignore[arg-type]
        )
        ApiBatchStore(database).add(batch, most_open=9, deed=deed)
    rng = random.Random(47)
    decoded = {f"job-{number}": some_run(rng) for number in range(200)}
    record(database, *decoded.values(), job_ids=list(decoded))
    return decoded


def test_each_job_pays_the_prices_of_the_time_in_which_it_was_decoded(
    database: Database, runs: dict[str, DecodeRun]
) -> None:
    found = SpendingStore(database, PRICES).of_jobs(runs)
    assert found.keys() == runs.keys()
    for job_id, run in runs.items():
        assert found[job_id].device_s == run.device_s
        assert found[job_id].cost == pytest.approx(cost_of(run), rel=1e-6), job_id
    crossing = [run for run in runs.values() if run.wall_s > 10_000]
    assert len(crossing) > 10, "many of them run across a change of price"


@pytest.mark.parametrize("what", list(SpentBy))
def test_the_sums_of_every_kind_are_those_of_the_same_jobs(
    database: Database, runs: dict[str, DecodeRun], what: SpentBy
) -> None:
    key_of = {"batch_of_a_key": "ada", "batch_of_another": "bob"}
    name_of: dict[SpentBy, Callable[[str, DecodeRun], str]] = {
        SpentBy.TASK: lambda _, run: run.key.task,
        SpentBy.SEGMENT: lambda _, run: run.key.segment,
        SpentBy.TARGET: lambda _, run: run.target,
        SpentBy.BATCH: lambda _, run: run.batch_id or "",
        SpentBy.KEY: lambda _, run: key_of.get(run.batch_id or "", ""),
        SpentBy.PURPOSE: lambda _, run: run.purpose,
        SpentBy.JOB: lambda job_id, _: job_id,
    }
    expected: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for job_id, run in runs.items():
        expected[name_of[what](job_id, run)].append((run.device_s, cost_of(run), run.num_tokens))
    store = SpendingStore(database, PRICES)
    found = store.by(what, CHANGE - SPAN, CHANGE + SPAN)
    assert {row.name for row in found} == set(expected)
    for row in found:
        seconds, costs, tokens = zip(*expected[row.name], strict=True)
        assert (row.num_jobs, row.num_tokens) == (len(seconds), sum(tokens))
        assert row.device_s == pytest.approx(math.fsum(seconds))
        assert row.cost == pytest.approx(math.fsum(costs), rel=1e-6)
    if what is SpentBy.BATCH:
        of_batches = store.of_batches([row.name for row in found])
        assert of_batches == {row.name: approximately(row) for row in found if row.name}


def approximately(row: Spending) -> Spending:
    return replace(row, device_s=pytest.approx(row.device_s), cost=pytest.approx(row.cost))


def test_two_neighbouring_times_share_no_job_and_leave_none_out(database: Database, runs: dict[str, DecodeRun]) -> None:
    store = SpendingStore(database, PRICES)
    middle = sorted(run.decoded_at for run in runs.values())[100]
    parts = [
        *store.by(SpentBy.TASK, CHANGE - SPAN, middle - timedelta.resolution),
        *store.by(SpentBy.TASK, middle, CHANGE + SPAN),
    ]
    whole = total(store.by(SpentBy.TASK, CHANGE - SPAN, CHANGE + SPAN))
    assert total(parts) == approximately(whole)
    assert whole.num_jobs == 200


def test_without_a_price_there_are_device_seconds_and_no_money(database: Database, runs: dict[str, DecodeRun]) -> None:
    priced = SpendingStore(database, PRICES).by(SpentBy.TASK, CHANGE - SPAN, CHANGE + SPAN)
    found = SpendingStore(database, PriceSettings()).by(SpentBy.TASK, CHANGE - SPAN, CHANGE + SPAN)
    assert found == [replace(approximately(row), cost=None) for row in priced]
    assert total(found).cost is None
    assert found[0].in_words("EUR").endswith("device seconds")
    assert found[0].cost_of(Interval(1.0, 0.5, 2.0)) is None


def test_a_free_hour_costs_nothing_and_saved_time_the_mean_price(database: Database) -> None:
    run = replace(decode_run(vanilla_counts(9), mode=Mode.VANILLA, at=CHANGE), wall_s=2.0, device_s=1.0)
    record(database, run, replace(run, purpose=Purpose.PROBE), job_ids=["job", "probe"])
    free = SpendingStore(database, PriceSettings(per_hour=0.0)).of_jobs(["job", "unknown"])
    assert (list(free), free["job"].cost) == (["job"], 0.0)
    (row,) = SpendingStore(database, PriceSettings(per_hour=3600.0)).by(SpentBy.TASK, CHANGE, CHANGE)
    assert (row.num_jobs, row.cost) == (1, 1.0), "a probe is no traffic"
    assert row.cost_of(Interval(3.0, -1.0, 4.0)) == Interval(3.0, -1.0, 4.0)
    assert SpendingStore(database, PRICES).of_jobs([]) == {}


def test_the_view_has_the_jobs_and_seconds_of_every_screen(database: Database, runs: dict[str, DecodeRun]) -> None:
    query = text("SELECT coalesce(key_name, ''), sum(device_s), count(*) FROM job_spending GROUP BY 1")
    by_key = SpendingStore(database, PRICES).by(SpentBy.KEY, CHANGE - SPAN, CHANGE + SPAN)
    found = {name: (seconds, number) for name, seconds, number in database.rows(query)}
    assert found == {row.name: (pytest.approx(row.device_s), row.num_jobs) for row in by_key}
