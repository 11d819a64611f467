"""What becomes of a recorded result that Kafka refuses, against a real PostgreSQL."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from alphaloop.store.database import Database
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import Outbox, OutboxMessage, OutcomeStore, RefusedResultStore
from tests.fixtures.runs import claim_request, num_pending, outcome, recorded_results

pytestmark = pytest.mark.postgres

FAILED = b'{"status":"failed","job_id":"b"}'


@pytest.fixture
def refused(database: Database) -> RefusedResultStore:
    return RefusedResultStore(database)


@pytest.fixture
def recorded(database: Database) -> list[OutboxMessage]:
    """The results of three jobs in one row."""
    requests = [claim_request(job_id) for job_id in "abc"]
    JobStore(database).claim(requests, owner="w1", lease_s=60.0, max_attempts=9)
    return OutcomeStore(database).record(
        [replace(outcome(job_id), headers={"big": job_id}) for job_id in "abc"], owner="w1"
    )


def taken_over(database: Database) -> dict[str, OutboxMessage]:
    rows = Outbox(database).take_over(older_than_s=0.0, limit=100)
    return {message.job_id: message for messages in rows.values() for message in messages}


def job(database: Database, job_id: str) -> tuple[str, str, str | None]:
    query = "SELECT status, outcome::text, refused_outcome::text FROM jobs WHERE job_id = :job_id"
    return tuple(database.one(text(query), {"job_id": job_id}))  # type: ignore[return-value]


def test_a_replaced_result_is_the_recorded_outcome_and_the_refused_one_is_kept(
    refused: RefusedResultStore, recorded: list[OutboxMessage], database: Database
) -> None:
    assert refused.replace(recorded[0].id, {"b": FAILED, "unknown": FAILED}) == {"b"}
    assert job(database, "b") == ("failed", FAILED.decode(), recorded[1].value.decode())
    assert recorded_results(database, ["b"]) == {"b": FAILED}, "a repeated delivery gets the same bytes"
    assert job(database, "a") == ("succeeded", recorded[0].value.decode(), None)
    waiting = taken_over(database)
    assert (waiting["b"].value, waiting["b"].headers) == (FAILED, recorded[1].headers)
    assert (waiting["a"], waiting["c"]) == (recorded[0], recorded[2])
    assert refused.replace(recorded[0].id, {"b": b'{"other":1}'}) == set(), "once"
    assert job(database, "b")[:2] == ("failed", FAILED.decode())


def test_what_another_worker_has_settled_is_left_alone(
    refused: RefusedResultStore, recorded: list[OutboxMessage], database: Database
) -> None:
    Outbox(database).delete([recorded[0].id])
    assert refused.replace(recorded[0].id, {"b": FAILED}) == set()
    assert refused.set_aside(recorded[0].id, {"b": "too large"}) == set()
    assert job(database, "b")[0] == "succeeded"
    assert num_pending(database) == 0


def test_a_row_set_aside_is_published_by_nobody_and_its_neighbours_go_on(
    refused: RefusedResultStore, recorded: list[OutboxMessage], database: Database
) -> None:
    outbox = Outbox(database)
    assert refused.set_aside(recorded[0].id, {"b": "b is too large", "c": "c is invalid"}) == {"b", "c"}
    assert taken_over(database) == {"a": recorded[0]}
    assert (num_pending(database), outbox.num_set_aside()) == (3, 2)
    refused.set_aside(recorded[0].id, {"a": "refused"})
    assert database.scalar(text("SELECT count(*) FROM outbox WHERE set_aside_at IS NULL")) == 0
    outbox.delete([recorded[0].id])
    assert num_pending(database) == outbox.num_set_aside() == 3, "clearing the row leaves what was set aside"


def test_the_documented_statements_show_what_is_set_aside_and_put_it_back(
    refused: RefusedResultStore, recorded: list[OutboxMessage], database: Database
) -> None:
    refused.set_aside(recorded[0].id, {"b": "b is too large"})
    show, put_back = documented("AlphaloopResultsSetAside")
    with database.begin() as connection:
        (shown,) = connection.execute(text(show)).mappings()
        assert (shown["job_ids"], shown["set_aside_because"]) == (["b"], "b is too large")
        connection.execute(text(put_back.replace("4711", str(shown["id"]))))
    back = taken_over(database)["b"]
    assert (back.value, back.headers) == (recorded[1].value, recorded[1].headers)
    assert Outbox(database).num_set_aside() == 0


def test_the_documented_statement_shows_a_refused_text_also_one_with_nul(
    refused: RefusedResultStore, recorded: list[OutboxMessage], database: Database
) -> None:
    refused.replace(recorded[0].id, dict.fromkeys("bc", FAILED))
    with database.begin() as connection:
        with_nul = text("UPDATE jobs SET refused_outcome = CAST(:document AS json) WHERE job_id = 'b'")
        connection.execute(with_nul, {"document": r'{"text": "a\u0000b\\u0000c\"", "usage": {}}'})
        (show,) = documented("AlphaloopResultsRefused")
        shown = {row["job_id"]: row["text"] for row in connection.execute(text(show)).mappings()}
    assert set(shown) == {"b", "c"}
    assert shown["b"] == 'a\ufffdb\\ufffdc"'


def documented(chapter: str) -> list[str]:
    """The statements of a chapter of docs/guides/operate.md."""
    page = (Path(__file__).resolve().parents[2] / "docs/guides/operate.md").read_text(encoding="utf-8")
    return re.findall(r"```sql\n(.*?)```", page.split(f"## {chapter}")[1].split("\n## ")[0], re.DOTALL)
