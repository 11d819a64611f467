"""Promised ends of batches on a real Postgres: what they are made from, what was said, and what came."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import SecretStr

from alphaloop.batches.ends import LatelyDecoded
from alphaloop.errors import StoreError
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import BatchStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.promises import PromisedEnd, PromiseStore, newest_promises
from tests.contract.test_store_segments import batch_of
from tests.fixtures.postgres import as_member
from tests.fixtures.runs import claim, decode_run, outcome, vanilla_counts

pytestmark = [pytest.mark.postgres, pytest.mark.roles("alphaloop_scheduler")]

NOW = datetime.now(UTC).replace(microsecond=0)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def store(database: Database) -> PromiseStore:
    return PromiseStore(database)


def promise(batch_id: str = "monday", at: datetime = NOW, num_open: int = 80, num_total: int = 100) -> PromisedEnd:
    ends = at + 10 * MINUTE, at + 8 * MINUTE, at + 13 * MINUTE
    return PromisedEnd(batch_id, at, num_total, num_open, *ends, 600.0, 60.0)


def unknown(batch_id: str, at: datetime = NOW) -> PromisedEnd:
    return PromisedEnd(batch_id, at, 100, 80, why="no worker runs")


def test_the_newest_promise_of_a_batch_is_shown_wherever_the_batch_is(database: Database, store: PromiseStore) -> None:
    BatchStore(database).note({"id": "monday", "source": "command", "num_total": 100}, 0)
    store.keep([promise(at=NOW - MINUTE), promise(), unknown("tuesday")])
    assert newest_promises(database, ["monday", "tuesday", "none"]) == {
        "monday": promise(),
        "tuesday": unknown("tuesday"),
    }
    found = BatchStore(database).find("monday")
    assert found is not None
    assert found.end == promise()
    assert BatchStore(database).page(5)[0].end == promise()


def test_what_was_said_stays_and_gets_its_end_once(database: Database, store: PromiseStore) -> None:
    store.keep([promise(at=NOW - MINUTE), promise(), promise("tuesday")])
    store.keep([promise(num_open=1)])
    assert store.open() == {"monday", "tuesday"}
    assert store.of_batch("monday") == [promise(at=NOW - MINUTE), promise()]
    store.end(["monday"])
    first = store.of_batch("monday")[0].ended_at
    store.end(["monday"])
    assert first is not None
    assert store.of_batch("monday")[0].ended_at == first
    assert store.open() == {"tuesday"}


def test_of_an_ended_batch_the_first_promise_of_each_quarter_is_judged(store: PromiseStore) -> None:
    said = [promise(at=NOW + n * MINUTE, num_open=num_open) for n, num_open in enumerate((100, 90, 80, 60, 55, 10))]
    store.keep([*said, unknown("monday", NOW + MINUTE / 2), promise("open")])
    assert store.ended() == []
    store.end(["monday"])
    assert sorted(each.num_open for each in store.ended()) == [10, 60, 90, 100]


@pytest.mark.roles("owner")
def test_a_batch_whose_window_was_over_says_nothing_of_how_long_its_requests_take(
    database: Database, store: PromiseStore
) -> None:
    batch_of(database, "gold", id="expired", status="expired")
    batch_of(database, "gold", id="done", status="completed")
    store.keep([promise("expired"), promise("done")])
    store.end(["expired", "done"])
    assert [each.batch_id for each in store.ended()] == ["done"]


def test_a_promise_without_times_says_why(database: Database, store: PromiseStore) -> None:
    for wrong in (PromisedEnd("a", NOW, 1, 1), PromisedEnd("a", NOW, 1, 1, NOW, NOW, NOW, 1.0, 1.0, "no worker runs")):
        with pytest.raises(StoreError):
            store.keep([wrong])
    assert unknown("a").sentence() == "its end is not known: no worker runs"


def test_sentences_name_the_day_where_it_is_another(store: PromiseStore) -> None:
    at = datetime(2026, 11, 29, 23, 50, tzinfo=UTC)
    ends = at + timedelta(minutes=8), at + timedelta(minutes=2), at + timedelta(minutes=25)
    said = PromisedEnd("a", at, 2, 1, *ends, 480.0, 60.0)
    assert said.sentence() == "ends 23:58, 23:52 to 2026-11-30 00:15 UTC"


@pytest.mark.roles("owner")
def test_the_newest_decoded_jobs_come_with_their_batch_and_arrival(
    database: Database, database_url: SecretStr, postgres_server: str
) -> None:
    claim(database, "j-1", batch_id="monday", segment="gold")
    run = replace(decode_run(vanilla_counts(4), segment="gold", device_s=0.5, at=NOW), batch_id="monday")
    assert OutcomeStore(database).record([outcome("j-1", run=run)], owner="w")
    with Database(as_member(postgres_server, database_url, "alphaloop_scheduler")) as seen_by_role:
        (row,) = PromiseStore(seen_by_role).decoded_lately(["code", "none"])
        by_hour = PromiseStore(seen_by_role).jobs_by_hour(["code"], NOW + timedelta(hours=1))
    job = LatelyDecoded(*row)
    assert (job.task, job.segment, job.batch_id) == ("code", "gold", "monday")
    assert (job.decoded_s, job.device_s) == (NOW.timestamp(), 0.5)
    assert job.arrived_s == pytest.approx(NOW.timestamp() - run.queue_s - run.wall_s)
    assert by_hour == {("code", "gold"): {int(NOW.timestamp()) // 3600: 1}}


@pytest.mark.roles("owner")
def test_a_batch_is_where_its_claimed_jobs_are_else_where_its_sender_said(
    database: Database, database_url: SecretStr, postgres_server: str
) -> None:
    claim(database, "a-1", "a-2", batch_id="mixed", segment="gold")
    claim(database, "a-3", batch_id="mixed", task="chat")
    BatchStore(database).note({"id": "sent", "source": "command", "task": "chat", "num_total": 3}, 0)
    with Database(as_member(postgres_server, database_url, "alphaloop_scheduler")) as seen_by_role:
        found = PromiseStore(seen_by_role).places(["mixed", "sent", "none"])
    assert found["mixed"].num_by_line == {("code", "gold"): 2, ("chat", ""): 1}
    assert found["sent"].num_by_line == {("chat", ""): 1}
    assert found["none"].num_by_line == {}
