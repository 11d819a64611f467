"""What waits of a segment: requests of its open batches, and how fast its jobs end."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sqlalchemy import insert, text

from alphaloop.store.api import LATELY, LONGEST_WAIT_S, UNKNOWN_WAIT_S, SegmentBacklog, backlog_of_segment
from alphaloop.store.database import Database
from alphaloop.store.jobs import JobStore
from alphaloop.tables import api_batches
from tests.fixtures.postgres import count
from tests.fixtures.runs import claim_request

CLAIM = {"owner": "w", "lease_s": 60.0, "max_attempts": 3}


def jobs_of(database: Database, segment: str, batch_id: str | None, *, num_running: int, num_ended: int) -> None:
    """Jobs that a worker has claimed, and of which some have ended just now."""
    names = [f"{segment}-{batch_id}-{number}" for number in range(num_running + num_ended)]
    requests = [claim_request(name)._replace(segment=segment, batch_id=batch_id) for name in names]
    JobStore(database).claim(requests, **CLAIM)
    ended = text("""
        UPDATE jobs SET status = 'succeeded', outcome = '{}', finished_at = clock_timestamp()
        WHERE job_id = ANY(:names)
    """)
    database.change(ended, {"names": names[num_running:]})


def batch_of(database: Database, segment: str, **values: object) -> None:
    """A batch of the API, of the file `file-1` and the key `nightly`."""
    columns = {
        "id": f"batch_{count(database, 'api_batches')}",
        "key_name": "nightly",
        "segment": segment,
        "tasks": [],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {},
        "errors": [],
        "input_file_id": "file-1",
        "expires_at": datetime(2027, 1, 1, tzinfo=UTC),
        "status": "in_progress",
        **values,
    }
    database.change(insert(api_batches).values(columns))


@pytest.mark.postgres
def test_requests_of_open_batches_wait_until_they_have_ended(database: Database) -> None:
    batch_of(database, "gold", num_total=100, num_sent=50, num_invalid=1, num_completed=2, num_failed=3)
    batch_of(database, "gold", num_total=10, num_sent=10, num_completed=4, status="cancelling")
    batch_of(database, "gold", num_total=0, status="validating")
    batch_of(database, "gold", num_total=7, num_sent=7, num_completed=3, status="cancelled")
    batch_of(database, "free", num_total=1000, num_sent=1000)
    found = backlog_of_segment(database, "gold")
    assert (found.num_waiting, found.num_in_kafka) == (95 + 6, 45 + 6)
    assert backlog_of_segment(database, "nobody") == SegmentBacklog(0, 0, 0.0)


@pytest.mark.postgres
def test_the_rate_is_that_of_jobs_that_ended_lately(database: Database) -> None:
    jobs_of(database, "gold", "b1", num_running=2, num_ended=3)
    jobs_of(database, "gold", None, num_running=5, num_ended=5)
    jobs_of(database, "free", "b3", num_running=1, num_ended=7)
    assert backlog_of_segment(database, "gold").ended_per_s == pytest.approx(8 / LATELY.total_seconds())
    database.change(text("UPDATE jobs SET finished_at = finished_at - interval '11 minutes'"))
    assert backlog_of_segment(database, "gold") == SegmentBacklog(0, 0, 0.0)


@pytest.mark.parametrize(
    ("num_waiting", "ended_per_s", "most_waiting", "expected"),
    [
        (0, 0.0, 5, 0),
        (4, 9.0, 5, 0),
        (5, 0.0, 5, UNKNOWN_WAIT_S),
        (5000, 2.0, 5000, 1),
        (5099, 2.0, 5000, 50),
        (5099, 0.001, 5000, LONGEST_WAIT_S),
    ],
)
def test_a_refused_sender_is_told_when_there_may_be_room(
    num_waiting: int, ended_per_s: float, most_waiting: int, expected: int
) -> None:
    assert SegmentBacklog(num_waiting, 0, ended_per_s).retry_after_s(most_waiting) == expected
