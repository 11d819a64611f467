"""Rows are deleted once they are too old, in small transactions, and what is still needed stays."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, insert, select, text

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.messages import Mode
from alphaloop.store.database import Database
from alphaloop.store.decisions import BudgetSubject, DecisionLog
from alphaloop.store.housekeeping import TABLES, RetentionStore
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import Outbox, OutcomeStore
from alphaloop.tables import cancellations, decisions, jobs, metadata, schedule_runs
from tests.fixtures.runs import claim, outcome

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def never() -> bool:
    return False


@pytest.fixture
def store(database: Database) -> RetentionStore:
    return RetentionStore(database, chunk_rows=3)


@pytest.fixture
def end(database: Database) -> Callable[..., None]:
    """Claims and ends jobs as if `days` ago; `published` says whether Kafka acknowledged their results."""

    def end_jobs(*job_ids: str, days: float = 0.0, published: bool = True) -> None:
        claim(database, *job_ids)
        messages = OutcomeStore(database).record([outcome(one) for one in job_ids], owner="w")
        if published:
            Outbox(database).delete({message.id for message in messages})
        ago, by = "created_at = created_at - :by", timedelta(days=days)
        moved = text(f"UPDATE jobs SET {ago}, finished_at = finished_at - :by WHERE job_id = ANY(:ids)")
        database.change(moved, {"ids": list(job_ids), "by": by})
        database.change(text(f"UPDATE outbox SET {ago} WHERE id = :row"), {"row": messages[0].id, "by": by})

    return end_jobs


def left(database: Database) -> set[str]:
    return set(database.scalars(select(jobs.c.job_id)))


def test_jobs_go_with_their_texts_once_they_ended_long_ago(
    store: RetentionStore, end: Callable[..., None], database: Database
) -> None:
    """And claims that nobody renewed for so long; not a job that was claimed long ago and ended lately."""
    end("waited", days=5)
    database.change(text("UPDATE jobs SET created_at = created_at - interval '90 days'"))
    claim(database, "given-up", owner="dead")
    given_up = "created_at = now() - interval '50 d', lease_expires_at = now() - interval '49 d'"
    database.change(text(f"UPDATE jobs SET {given_up} WHERE owner = 'dead'"))
    for number in range(10):
        end(f"old-{number}", days=31 + number)
    end("new", days=29)
    claim(database, "running")
    dropped = store.drop_jobs(NOW - 30 * DAY, never)
    assert (dropped.num_rows, dropped.is_all) == (11, True)
    assert left(database) == {"new", "running", "waited"}
    assert store.drop_jobs(NOW - 30 * DAY, never).num_rows == 0


def test_a_result_that_kafka_has_not_acknowledged_keeps_its_job(
    store: RetentionStore, end: Callable[..., None], database: Database
) -> None:
    end("unacknowledged", days=40, published=False)
    end("acknowledged", days=40)
    assert store.drop_jobs(NOW - 30 * DAY, never).num_rows == 1
    assert left(database) == {"unacknowledged"}
    outbox = Outbox(database)
    relayed = outbox.take_over(older_than_s=0, limit=10)
    assert [message.key for messages in relayed.values() for message in messages] == [b"unacknowledged"]
    outbox.delete(relayed)
    assert store.drop_jobs(NOW - 30 * DAY, never).num_rows == 1


def test_a_chunk_is_a_transaction_and_the_time_is_looked_at_between_them(
    store: RetentionStore, end: Callable[..., None], database: Database
) -> None:
    end(*(f"old-{number}" for number in range(8)), days=40)
    answers = iter([False, False, True])
    dropped = store.drop_jobs(NOW - 30 * DAY, lambda: next(answers))
    assert (dropped.num_rows, dropped.is_all) == (6, False)
    assert len(left(database)) == 2
    assert store.drop_jobs(NOW - 30 * DAY, never).is_all


def test_a_row_that_somebody_holds_is_passed_over(
    store: RetentionStore, end: Callable[..., None], database: Database
) -> None:
    """Retention waits for nobody, so nobody waits for retention behind it."""
    end("held", "free", days=40)
    with database.begin() as connection:
        connection.execute(text("SELECT FROM jobs WHERE job_id = 'held' FOR UPDATE"))
        assert store.drop_jobs(NOW - 30 * DAY, never).num_rows == 1
    assert left(database) == {"held"}


def test_a_cancellation_stays_while_its_job_runs(store: RetentionStore, database: Database) -> None:
    claims = JobStore(database)
    claim(database, "running")
    for job_id in ("running", "never-seen", "young"):
        claims.request_cancel(job_id)
    old = "now() - interval '40 d'"
    database.change(text(f"UPDATE cancellations SET requested_at = {old}, ends_at = {old} WHERE job_id <> 'young'"))
    assert store.drop("cancellations", NOW - 30 * DAY, never).num_rows == 1
    assert set(database.scalars(select(cancellations.c.job_id))) == {"running", "young"}


def test_the_choice_that_was_in_force_stays(store: RetentionStore, database: Database) -> None:
    """`explain --at` a moment within the history needs the last choice before it."""
    log = DecisionLog(database)
    for target, k in (("target", 1), ("target", 2), ("gone", 3), ("target", 4)):
        chosen = Decision(Mode.SPECULATIVE, "lookup", "draft", k, Reason.FASTER, "because")
        log.record_change(BudgetSubject("code", target, "cpu", "greedy"), 1, chosen, "w")
    with database.begin() as connection:
        connection.execute(
            text("UPDATE decisions SET decided_at = now() - interval '200 d' WHERE to_num_draft_tokens < 4")
        )
        connection.execute(
            text(
                "INSERT INTO acceptance_state (target_revision, engine, drafter, draft_revision, task, segment, "
                "sampling_bucket, prompt_bucket, as_of, num_jobs, evidence, last_ledger_id, changed_in) "
                "VALUES ('target', '', '', '', 'code', '', '', '', now(), 1, '', 1, 1)"
            )
        )
    assert store.drop("decisions", NOW - 90 * DAY, never).num_rows == 2
    kept = database.scalars(select(decisions.c.to_num_draft_tokens).order_by(decisions.c.id))
    assert kept == [2, 4], "the one superseded before the history began, and the one of a target without evidence, went"


def test_other_tables_lose_their_old_rows_in_chunks(store: RetentionStore, database: Database) -> None:
    due = [NOW - n * DAY for n in range(100)]
    database.change(
        insert(schedule_runs), [{"schedule_id": "measure", "scheduled_for": at, "owner": "w"} for at in due]
    )
    assert {table: store.drop(table, NOW - 90 * DAY, never).num_rows for table in TABLES} == {
        **dict.fromkeys(TABLES, 0),
        "schedule_runs": 9,
    }
    assert database.scalar(select(func.min(schedule_runs.c.scheduled_for))) == NOW - 90 * DAY


def test_every_table_that_grows_with_time_has_a_retention() -> None:
    """Who adds a table says here how it is bounded, or adds it to retention."""
    partitioned = {
        table.name for table in metadata.sorted_tables if table.dialect_options["postgresql"]["partition_by"]
    }
    bounded_otherwise = {
        "outbox": "emptied when Kafka has acknowledged",
        "acceptance_state": "dropped after history_retention_days without a job",
        "task_speedups": "one row a subject of the last day",
        "rival_speedups": "one row a subject and rival of the last day",
        "cost_profiles": "one row a shape of a device",
        "exploration_budgets": "one row a task and device",
        "probe_sets": "written by people",
        "probe_prompts": "written by people",
        "draft_revisions": "written by people",
        "refresh_prompts": "deleted with their refresh",
        "code_revisions": "one row a release",
        "drift_event_states": "deleted with their drift event",
        "drift_memories": "dropped when their stream had no job for as long as a run reads back",
        "drift_positions": "one row a task",
        "server_identities": "one row a change of an endpoint",
        "notification_sinks": "one row an address",
        "remembered_results": "dropped after jobs_retention_days, and beyond max_memory_bytes of a task",
        "stored_texts": "dropped after their jobs, with what lies at their addresses",
        "leader_terms": "one row",
        "installation": "one row",
        "leader_leases": "one row, and one a batch that a scheduler goes on with",
        "api_keys": "written by people",
        "api_files": "deleted with what they name when their time is over",
        "workers": "one row a worker, deleted when it ends, and by another if it cannot",
    }
    known = partitioned | set(TABLES) | {"jobs"} | bounded_otherwise.keys()
    assert {table.name for table in metadata.sorted_tables} == known
