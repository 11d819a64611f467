"""The daily partitions: made ahead without stopping anybody, dropped by day."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.errors import StoreError
from alphaloop.messages import Mode
from alphaloop.settings.processes import SessionLimits
from alphaloop.store.database import Database
from alphaloop.store.housekeeping import drop_days_before, ensure_ahead, utc_day
from alphaloop.store.outcomes import OutcomeStore
from tests.fixtures.runs import claim, decode_run, outcome, partition_days, record, vanilla_counts

pytestmark = pytest.mark.postgres

LATER = datetime(2031, 5, 1, 23, 30, tzinfo=UTC)


def record_at(database: Database, job_id: str, at: datetime) -> None:
    record(database, decode_run(vanilla_counts(2), mode=Mode.VANILLA, at=at), job_ids=[job_id])


def test_days_ahead_are_made_once(database: Database) -> None:
    days = [LATER.date() + timedelta(days=n) for n in range(4)]
    assert ensure_ahead(database, LATER, 3) == days
    assert ensure_ahead(database, LATER, 3) == []
    assert ensure_ahead(database, LATER + timedelta(days=1), 3) == [days[-1] + timedelta(days=1)]
    assert set(days) <= set(partition_days(database))


def test_days_are_those_of_utc(database: Database) -> None:
    tokyo = LATER.astimezone(timezone(timedelta(hours=9)))
    assert utc_day(tokyo) == LATER.date() != tokyo.date()
    ensure_ahead(database, tokyo, 0)
    record_at(database, "a", tokyo)
    table = database.scalar(text("SELECT tableoid::regclass::text FROM decode_runs"))
    assert table == "decode_runs_20310501"


def test_a_partition_that_went_while_a_worker_knew_it_is_made_again(database: Database) -> None:
    store = OutcomeStore(database)
    claim(database, *"abc")
    run = decode_run(vanilla_counts(2), mode=Mode.VANILLA, at=LATER)
    assert LATER.date() not in partition_days(database)
    for name in "ab":  # the second transaction finds the partition that the first one made
        assert store.record([outcome(name, run=run)], owner="w")
    drop_days_before(database, LATER.date() + timedelta(days=1))
    with pytest.raises(StoreError):
        store.record([outcome("c", run=run)], owner="w")
    assert store.record([outcome("c", run=run)], owner="w")
    assert LATER.date() in partition_days(database)


def test_a_later_partition_is_like_the_first_ones(database: Database) -> None:
    ensure_ahead(database, LATER, 0)
    today = datetime.now(UTC).date()
    columns = text("""
        SELECT attname, format_type(atttypid, atttypmod), attnotnull, attidentity FROM pg_attribute
        WHERE attrelid = CAST(:name AS regclass) AND attnum > 0 ORDER BY attnum
    """)
    checks = text("SELECT conname FROM pg_constraint WHERE conrelid = CAST(:name AS regclass) AND contype = 'c'")
    # A partition's index that belongs to the table's has a parent.
    indexes = text("""
        SELECT p.inhparent::regclass::text FROM pg_index i JOIN pg_inherits p ON p.inhrelid = i.indexrelid
        WHERE i.indrelid = CAST(:name AS regclass)
    """)
    with database.begin() as connection:
        for query in (columns, checks, indexes):
            first, later = (
                sorted(map(tuple, connection.execute(query, {"name": name})))
                for name in (f"decode_runs_{today:%Y%m%d}", "decode_runs_20310501")
            )
            assert first == later != []


def test_writers_do_not_wait_for_new_partitions_nor_they_for_writers(database: Database) -> None:
    record_at(database, "a", datetime.now(UTC))
    with database.begin() as connection:
        connection.execute(text("UPDATE decode_runs SET wall_s = wall_s + 1"))
        assert ensure_ahead(database, LATER, 0) == [LATER.date()]


def test_two_keepers_at_once_make_each_day_once(database: Database) -> None:
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: ensure_ahead(database, LATER, 5), range(3)))
    assert sorted(day for days in made for day in days) == [LATER.date() + timedelta(days=n) for n in range(6)]


def test_old_days_are_dropped_with_their_rows(database: Database) -> None:
    today = datetime.now(UTC)
    record_at(database, "old", today - timedelta(days=40))
    record_at(database, "new", today)
    before = utc_day(today) - timedelta(days=30)
    assert drop_days_before(database, before) == [utc_day(today - timedelta(days=40))]
    assert drop_days_before(database, before) == []
    assert database.scalars(text("SELECT job_id FROM decode_runs")) == ["new"]
    assert database.scalar(text("SELECT count(*) FROM jobs")) == 2


def test_dropping_gives_up_where_the_table_is_in_use(database: Database, database_url: SecretStr) -> None:
    day = (LATER + timedelta(days=1)).date()
    with Database(database_url, limits=SessionLimits(lock_s=0.05)) as impatient:
        with database.begin() as connection:
            connection.execute(text("SELECT count(*) FROM decode_runs"))
            with pytest.raises(StoreError, match="lock timeout"):
                drop_days_before(impatient, day)
        assert drop_days_before(impatient, day) != []
