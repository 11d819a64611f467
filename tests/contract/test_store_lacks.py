"""Lacks and ended batches on a real Postgres, with the rights of a scheduler."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from alphaloop.errors import StoreError
from alphaloop.store.database import Database
from alphaloop.store.lacks import EndedBatch, EndedBatchStore, Lack, LackStore
from alphaloop.store.promises import PromisedEnd, PromiseStore
from tests.contract.test_store_segments import batch_of
from tests.fixtures.runs import claim

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_scheduler")]

NOW = datetime.now(UTC).replace(microsecond=0)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
LACK = Lack("large", "gold", NOW, NOW, 0.25, NOW, 40, 10, 1, 2, NOW + HOUR, "25% will be late.")


def test_of_a_target_and_segment_one_is_open(database: Database) -> None:
    store = LackStore(database)
    store.begin(LACK)
    store.begin(replace(LACK, segment=""))
    with pytest.raises(StoreError):
        store.begin(replace(LACK, num_late=20))
    empty, gold = store.open()
    assert (empty.segment, replace(gold, id=0)) == ("", LACK)
    store.change(replace(gold, closed_at=NOW + MINUTE, closed_because="met"))
    assert store.open() == [empty]
    store.begin(LACK)
    with pytest.raises(StoreError):
        store.change(replace(empty, closed_at=NOW + MINUTE))


def test_what_is_said_anew_has_a_new_number(database: Database) -> None:
    store = LackStore(database)
    store.begin(LACK)
    (first,) = store.open()
    store.change(replace(first, num_late=12))
    assert [lack.id for lack in store.open()] == [first.id]
    store.change(replace(first, num_late=30), is_said_anew=True)
    (anew,) = store.open()
    assert (anew.id > first.id, anew.num_late) == (True, 30)


def test_figures_that_are_old_have_their_moment() -> None:
    assert LACK.shown(NOW + 10 * MINUTE) == "25% will be late."
    assert LACK.shown(NOW + 11 * MINUTE) == f"25% will be late. (as of {NOW:%Y-%m-%d %H:%M} UTC)"


@pytest.mark.roles("owner")
def test_each_end_of_a_batch_is_missing_until_it_is_kept(database: Database) -> None:
    """Those of the API and of producers; one that ends again after its dead letters were sent again is new."""
    store, promises = EndedBatchStore(database), PromiseStore(database)
    batch_of(database, "gold", id="done", status="completed")
    batch_of(database, "gold", id="open", status="in_progress")
    database.change(text("UPDATE api_batches SET completed_at = :at WHERE id = 'done'"), {"at": NOW})
    claim(database, "a", batch_id="monday")
    database.change(text("UPDATE jobs SET finished_at = :at, status = 'succeeded', outcome = '{}'"), {"at": NOW})
    kept = "INSERT INTO batches (id, source, by_status, is_open, created_at, counted_at) VALUES"
    counts = '{"succeeded": 1}'
    database.change(text(f"{kept} ('monday', 'kafka', :counts, false, now(), now())"), {"counts": counts})
    database.change(text(f"{kept} ('tuesday', 'kafka', '{{}}', true, now(), now())"))
    ends = NOW + 10 * MINUTE, NOW + 8 * MINUTE, NOW + 13 * MINUTE
    promises.keep([PromisedEnd("monday", NOW - n * MINUTE, 1, 1, *ends, 600.0, 60.0) for n in (5, 3)])
    missing = {batch.batch_id: batch for batch in store.missing(NOW - DAY)}
    assert missing.keys() == {"done", "monday"}
    monday = missing["monday"]
    assert (monday.ended_at, monday.by_status, monday.state) == (NOW, {"succeeded": 1}, "")
    assert (monday.promised_at, monday.ends_at, monday.earliest_at, monday.latest_at) == (NOW - 5 * MINUTE, *ends)
    assert missing["done"].promise_in_words() == "its end was not promised"
    ended = [replace(batch, state="completed") for batch in missing.values()]
    store.keep(ended)
    store.keep(ended)
    assert store.missing(NOW - DAY) == []
    assert sorted(batch.batch_id for batch in store.since(NOW - DAY)) == ["done", "monday"]
    database.change(text("UPDATE api_batches SET expired_at = :at, status = 'expired'"), {"at": NOW + MINUTE})
    again = [batch for batch in store.missing(NOW - DAY) if batch.batch_id == "done"]
    assert [batch.ended_at for batch in again] == [NOW + MINUTE]
    with pytest.raises(StoreError):
        store.keep([EndedBatch("half", NOW, NOW, "completed", {}, ends_at=NOW)])
