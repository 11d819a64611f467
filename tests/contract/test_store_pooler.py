"""Behind PgBouncer in transaction mode: no session state is relied on, and many workers share few sessions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.errors import StoreUnavailable
from alphaloop.messages import Mode
from alphaloop.settings.processes import SessionLimits
from alphaloop.store.coordination import LeaderLease
from alphaloop.store.database import POOL_SIZE, Database, DatabaseClock, Listener
from alphaloop.store.housekeeping import ensure_ahead
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import Outbox, OutcomeStore
from tests.fixtures.postgres import NUM_SESSIONS, count
from tests.fixtures.runs import claim_request, decode_run, outcome, vanilla_counts
from tests.fixtures.worker import until
from worker.background import Retry

pytestmark = pytest.mark.postgres

POOLED = SessionLimits(through_pooler=True)
NUM_WORKERS, NUM_ROUNDS, NUM_JOBS = 100, 2, 5
RUN = decode_run(vanilla_counts(5), mode=Mode.VANILLA)
ENDED = "jobs WHERE status = 'succeeded' AND num_crashes = 0"


def decode(database: Database, owner: str) -> None:
    """The life of some jobs, as a worker with a null engine has it."""
    jobs, outcomes, outbox = JobStore(database), OutcomeStore(database), Outbox(database)
    for number in range(NUM_ROUNDS):
        names = [f"{owner}-{number}-{name}" for name in range(NUM_JOBS)]
        claimed = jobs.claim([claim_request(name) for name in names], owner=owner, lease_s=600, max_attempts=3)
        attempts = {claim.job_id: claim.attempt for claim in claimed}
        assert jobs.renew(attempts, owner=owner, lease_s=600) == set(names)
        assert jobs.cancelled(names) == set()
        messages = outcomes.record([outcome(name, attempts[name], run=RUN) for name in names], owner=owner)
        assert len(messages) == NUM_JOBS
        outbox.delete({message.id for message in messages})


def test_a_hundred_workers_share_a_few_sessions(database: Database, pooler_url: SecretStr) -> None:
    size = POOL_SIZE
    is_over, most = threading.Event(), 0

    def look() -> None:
        nonlocal most
        while not is_over.wait(0.05):
            counted = """
                SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND backend_type = 'client backend'
            """
            most = max(most, int(database.scalar(text(counted))) - 1)

    def work(number: int) -> None:
        with Database(pooler_url, pool_size=size, connect_timeout_s=60, limits=POOLED) as one:
            decode(one, f"w{number}")

    with ThreadPoolExecutor(NUM_WORKERS + 1) as pool:
        looking = pool.submit(look)
        try:
            for done in [pool.submit(work, number) for number in range(NUM_WORKERS)]:
                done.result(120)
        finally:
            is_over.set()
        looking.result(60)
    assert count(database, ENDED) == NUM_WORKERS * NUM_ROUNDS * NUM_JOBS
    assert 0 < most <= NUM_SESSIONS


def test_limits_and_times_hold_whatever_session_a_transaction_gets(database: Database, pooler_url: SecretStr) -> None:
    with Database(pooler_url, limits=SessionLimits(lock_s=1.5, through_pooler=True)) as pooled:
        with pooled.begin() as one, pooled.begin() as other:
            for connection in (one, other):
                found = connection.execute(text("SELECT current_setting('lock_timeout'), now()")).one()
                assert (found[0], found[1].utcoffset().total_seconds()) == ("1500ms", 0)
                assert connection.execute(text("SHOW timezone")).scalar_one() == "UTC"
        now = datetime.now(UTC)
        assert abs((DatabaseClock(pooled).now() - now).total_seconds()) < 60
        assert ensure_ahead(pooled, now, 20)


def test_nothing_listens_and_nothing_is_missed(database: Database, pooler_url: SecretStr) -> None:
    with Database(pooler_url, limits=POOLED) as pooled:
        listener = Listener(pooled)
        JobStore(database).request_cancel("a")
        assert listener.wait(0.01) is False
        assert JobStore(pooled).cancelled(["a"]) == {"a"}
        listener.close()


def test_a_leader_keeps_its_lease_until_it_gives_it_up_or_dies(database: Database, pooler_url: SecretStr) -> None:
    with Database(pooler_url, limits=POOLED) as pooled:
        first, second = (LeaderLease(pooled, owner, lease_s=600.0) for owner in ("first", "second"))
        assert (first.try_acquire(), second.try_acquire()) == (True, False)
        term = first.begin_term()
        with pooled.guarded(term.check).begin() as connection:
            connection.execute(text("SELECT 1"))
        assert (first.is_held(), second.is_held()) == (True, False)
        first.release()
        assert (first.is_held(), second.try_acquire()) == (False, True)
        database.change(text("UPDATE leader_leases SET expires_at = now()"))
        assert (second.is_held(), first.try_acquire(), second.is_held()) == (False, True, False)
        assert first.begin_term().number == term.number + 1


def test_too_many_connections_are_waited_for(database: Database, database_url: SecretStr) -> None:
    """Without a pooler the server refuses those beyond its limit; they come in when others have left."""
    is_refused = threading.Event()

    class Hurry(threading.Event):
        """Never set; says when somebody waits for it."""

        def wait(self, timeout: float | None = None) -> bool:
            is_refused.set()
            return super().wait(timeout)

    def work() -> None:
        retry = Retry(Hurry())
        with Database(database_url) as late:
            retry.until_done("claim", lambda: late.check_revision())
            decode(late, "late")

    with ThreadPoolExecutor(1) as pool:
        with ExitStack() as others:
            until(lambda: not has_room(database_url, others), "the server refuses more connections")
            working = pool.submit(work)
            assert is_refused.wait(60)
        working.result(60)
    assert count(database, ENDED) == NUM_ROUNDS * NUM_JOBS


def has_room(url: SecretStr, others: ExitStack) -> bool:
    """Open one more connection, which `others` close."""
    try:
        others.enter_context(others.enter_context(Database(url, pool_size=1)).begin())
    except StoreUnavailable:
        return False
    return True
