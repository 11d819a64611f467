"""Nobody waits for ever: locks, statements and transactions that stand still have their limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.errors import StoreBusy, StoreUnavailable
from alphaloop.messages import Mode
from alphaloop.settings import PostgresSettings
from alphaloop.settings.processes import UNLIMITED, SessionLimits
from alphaloop.store.database import Database
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import OutcomeStore
from tests.fixtures import runs
from tests.fixtures.runs import claim, decode_run, outcome, vanilla_counts
from tests.fixtures.worker import until

pytestmark = pytest.mark.postgres

#: Of the tables whose rows all workers share.
SHARED = ("acceptance_hourly", "acceptance_state")
IMPATIENT = SessionLimits(lock_s=0.1)
RUN = decode_run(vanilla_counts(5), mode=Mode.VANILLA)


def record(database: Database, name: str) -> None:
    runs.record(database, RUN, job_ids=[name])


def test_the_settings_reach_the_sessions(database_url: SecretStr) -> None:
    postgres = PostgresSettings()
    names = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout", "timezone")
    for limits, expected in (
        (postgres.limits(), ("5s", "1min", "20s", "UTC")),
        (postgres.long_limits(), ("5s", "30min", "20s", "UTC")),
        (UNLIMITED, ("0", "0", "0", "UTC")),
    ):
        with Database(database_url, limits=limits) as database:
            assert tuple(database.scalar(text(f"SHOW {name}")) for name in names) == expected
            with database.dedicated() as driver:
                assert driver.info.get_parameters()["tcp_user_timeout"] == "20000"


@pytest.mark.parametrize("table", SHARED)
def test_an_idle_session_that_holds_shared_rows_blocks_nobody_for_ever(
    database: Database, database_url: SecretStr, table: str
) -> None:
    record(database, "first")
    with Database(database_url, limits=IMPATIENT) as impatient:
        with database.begin() as idle:
            idle.execute(text(f"SELECT FROM {table} FOR UPDATE"))
            with pytest.raises(StoreBusy, match="55P03"):
                record(impatient, "second")
            assert JobStore(impatient).renew({"second": 1}, owner="w", lease_s=60) == {"second"}
        assert len(OutcomeStore(impatient).record([outcome("second", run=RUN)], owner="w")) == 1


def test_a_statement_has_its_longest_time(database_url: SecretStr) -> None:
    with (
        Database(database_url, limits=SessionLimits(statement_s=0.1)) as database,
        pytest.raises(StoreUnavailable, match="57014"),
    ):
        database.change(text("SELECT pg_sleep(60)"))


#: Records an outcome and stops itself in the middle of it, when it holds every lock; told to go on, it tries again.
STOPPED = """
import os, signal, sys
from pydantic import SecretStr
from alphaloop.errors import StoreUnavailable
from alphaloop.store import outcomes
from alphaloop.store.database import Database
from alphaloop.settings.processes import SessionLimits
from tests.contract.test_store_session_limits import RUN
from tests.fixtures.runs import claim, outcome

enqueue = outcomes.enqueue
def stop(*arguments):
    outcomes.enqueue = enqueue
    os.kill(os.getpid(), signal.SIGSTOP)
    return enqueue(*arguments)
outcomes.enqueue = stop

with Database(SecretStr(os.environ["TEST_DATABASE"]), limits=SessionLimits(idle_transaction_s=1.0)) as database:
    claim(database, "stopped", owner="stopped")
    ended, store = [outcome("stopped", run=RUN)], outcomes.OutcomeStore(database)
    try:
        store.record(ended, owner="stopped")
    except StoreUnavailable:
        print(len(store.record(ended, owner="stopped")))
"""


def test_a_worker_that_is_suspended_while_it_records_blocks_no_other(
    database: Database, database_url: SecretStr
) -> None:
    record(database, "first")
    environment = {**os.environ, "TEST_DATABASE": database_url.get_secret_value()}
    with Database(database_url, limits=IMPATIENT) as impatient:
        # It is connected before the other one stops, whose locks the server takes away after a second.
        claim(impatient, "second")
        child = subprocess.Popen([sys.executable, "-c", STOPPED], env=environment, stdout=subprocess.PIPE, text=True)
        num_busy = 0

        def is_recorded() -> bool:
            nonlocal num_busy
            try:
                return len(OutcomeStore(impatient).record([outcome("second", run=RUN)], owner="w")) == 1
            except StoreBusy:
                num_busy += 1
                return False

        try:
            _, status = os.waitpid(child.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            until(is_recorded, "the suspended worker has lost its locks")
            assert num_busy > 0
            os.kill(child.pid, signal.SIGCONT)
            told, _ = child.communicate(timeout=60)
            assert told == "1\n", "it noticed, and recorded its own outcome"
        finally:
            child.kill()
            child.wait(60)
    counted = "SELECT (SELECT count(*) FROM decode_runs), (SELECT sum(num_jobs) FROM acceptance_hourly)"
    assert tuple(database.one(text(counted))) == (3, 3)
