"""Every SQLSTATE has its consequence: the same connection again, another connection, or the end in words."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import psycopg
import pytest
from psycopg import errors
from pydantic import SecretStr
from sqlalchemy import URL, Connection, make_url, text

from alphaloop.embedded.process import ChildProcess, free_ports
from alphaloop.embedded.servers import EmbeddedPostgres, binaries, service_account
from alphaloop.errors import (
    LeadershipLost,
    StoreBusy,
    StoreError,
    StoreLoginRefused,
    StoreUnavailable,
    StoreValueRefused,
)
from alphaloop.store.coordination import LeaderLease
from alphaloop.store.database import Database, Listener, driver_of
from alphaloop.store.jobs import JobStore
from alphaloop.store.schema import upgrade
from tests.fixtures.postgres import read_only
from tests.fixtures.runs import claim_request
from tests.fixtures.worker import until

pytestmark = pytest.mark.postgres

#: By class: what the store raises. Codes that differ from their class stand below.
CLASSES: Final = {
    "01": StoreError,  # a warning is never raised by Postgres itself
    "02": StoreError,  # no data
    "03": StoreError,  # SQL statement not yet complete
    "08": StoreUnavailable,  # connection exception
    "09": StoreError,  # triggered action exception
    "0A": StoreError,  # feature not supported
    "0B": StoreError,  # invalid transaction initiation
    "0F": StoreError,  # locator exception
    "0L": StoreError,  # invalid grantor
    "0P": StoreError,  # invalid role specification
    "0Z": StoreError,  # diagnostics exception
    "10": StoreError,  # XQuery error
    "20": StoreError,  # case not found
    "21": StoreError,  # cardinality violation
    "22": StoreValueRefused,  # data exception
    "23": StoreValueRefused,  # integrity constraint violation
    "24": StoreError,  # invalid cursor state
    "25": StoreError,  # invalid transaction state
    "26": StoreUnavailable,  # invalid SQL statement name
    "27": StoreError,  # triggered data change violation
    "28": StoreLoginRefused,  # invalid authorization specification
    "2B": StoreError,  # dependent privilege descriptors still exist
    "2D": StoreError,  # invalid transaction termination
    "2F": StoreError,  # SQL routine exception
    "34": StoreError,  # invalid cursor name
    "38": StoreError,  # external routine exception
    "39": StoreError,  # external routine invocation exception
    "3B": StoreError,  # savepoint exception
    "3D": StoreLoginRefused,  # invalid catalog name
    "3F": StoreError,  # invalid schema name
    "40": StoreBusy,  # transaction rollback
    "42": StoreError,  # syntax error or access rule violation
    "44": StoreError,  # WITH CHECK OPTION violation
    "53": StoreUnavailable,  # insufficient resources
    "54": StoreValueRefused,  # program limit exceeded
    "55": StoreError,  # object not in prerequisite state
    "57": StoreError,  # operator intervention
    "58": StoreUnavailable,  # system error
    "72": StoreUnavailable,  # snapshot too old, until PostgreSQL 16
    "F0": StoreError,  # configuration file error
    "HV": StoreError,  # foreign data wrapper error
    "P0": StoreError,  # PL/pgSQL error
    "XX": StoreError,  # internal error
}
CODES: Final = {
    "25006": StoreUnavailable,  # read only: a standby, or a server after a failover
    "25P03": StoreUnavailable,  # idle in transaction session timeout
    "25P04": StoreUnavailable,  # transaction timeout
    "40003": StoreUnavailable,  # statement completion unknown
    "42P05": StoreUnavailable,  # duplicate prepared statement: behind a pooler
    "55000": StoreUnavailable,  # object not in prerequisite state
    "55006": StoreBusy,  # object in use
    "55P03": StoreBusy,  # lock not available
    "57000": StoreUnavailable,  # operator intervention
    "57014": StoreUnavailable,  # query canceled
    **dict.fromkeys(("57P01", "57P02", "57P03", "57P04", "57P05"), StoreUnavailable),  # the server ends the session
}
#: After these a connection is used again: they say something of rows, locks or values, and nothing of the session.
KEPT: Final = (StoreBusy, StoreValueRefused)
#: After these the connection is gone.
GONE: Final = ("08", "57P", "25P03", "25P04")

_RAISE: Final = "DO $$ BEGIN RAISE EXCEPTION 'planted' USING ERRCODE = '{}'; END $$"
_PID: Final = text("SELECT pg_backend_pid()")


def by_sqlalchemy(database: Database, state: str) -> None:
    database.change(text(_RAISE.format(state)))


def by_driver(database: Database, state: str) -> None:
    with database.begin() as connection:
        driver_of(connection).execute(_RAISE.format(state).encode())


def in_autocommit(database: Database, state: str) -> None:
    database.rows(text(_RAISE.format(state)))


def states() -> list[str]:
    """Every code that the driver knows, and one of each class that it does not know."""
    known = {state for state in errors._sqlcodes if len(state) == 5 and not state.startswith("00")}
    return sorted(known | {f"{begin}999" for begin in (*CLASSES, "99", "ZZ")})


#: A state with each error, with and without a connection that goes on.
SOME: Final = ("08006", "22012", "25006", "25P03", "28000", "3D000", "40001", "42601", "53300", "55P03", "57P01")


@pytest.mark.parametrize(("way", "tried"), [(by_sqlalchemy, states()), (by_driver, SOME), (in_autocommit, SOME)])
def test_every_state_has_its_error_and_its_connection(
    database_url: SecretStr, way: Callable[[Database, str], None], tried: Sequence[str]
) -> None:
    with Database(database_url, pool_size=1) as database:
        assert {state[:2] for state in states()} - CLASSES.keys() == {"99", "ZZ"}
        wrong = []
        for state in tried:
            expected = CODES.get(state, CLASSES.get(state[:2], StoreError))
            before = database.scalar(_PID)
            with pytest.raises(StoreError) as refusal:
                way(database, state)
            is_kept = database.scalar(_PID) == before
            assert refusal.value.__cause__ is None, "the driver's error holds parameters"
            # The error of a connection that is gone has no state.
            says = "planted" in refusal.value.message and (state in str(refusal.value) or state.startswith(GONE))
            if (refusal.type, is_kept) != (expected, expected in KEPT) or not says:
                wrong.append((state, refusal.type.__name__, is_kept, refusal.value.message))
        assert not wrong


def test_what_is_not_of_the_server_costs_no_connection(database: Database) -> None:
    before = database.scalar(_PID)
    for error in (LeadershipLost(), KeyError("ours")):
        with pytest.raises(type(error)), database.begin():
            raise error
    assert database.scalar(_PID) == before


def test_one_error_replaces_every_connection_of_the_pool(database_url: SecretStr) -> None:
    with Database(database_url, pool_size=2) as database:
        with database.begin() as one, database.begin() as other:
            before = {connection.execute(_PID).scalar_one() for connection in (one, other)}
        with pytest.raises(StoreUnavailable):
            by_sqlalchemy(database, "25006")
        with database.begin() as one, database.begin() as other:
            assert before.isdisjoint({connection.execute(_PID).scalar_one() for connection in (one, other)})


def test_writes_go_on_when_the_server_takes_them_again(postgres_server: str, database_url: SecretStr) -> None:
    with Database(database_url, pool_size=2) as database:
        jobs, lease = JobStore(database), LeaderLease(database, "scheduler", lease_s=60.0)
        with read_only(postgres_server, database_url):
            for write in (
                lambda: jobs.claim([claim_request("a")], owner="w", lease_s=60, max_attempts=3),
                lease.try_acquire,
                lambda: jobs.request_cancel("b"),
            ):
                with pytest.raises(StoreUnavailable, match="25006") as refusal:
                    write()
                assert "read-only" in (refusal.value.hint or "")
            assert not lease.is_held()
        assert len(jobs.claim([claim_request("a")], owner="w", lease_s=60, max_attempts=3)) == 1
        assert lease.try_acquire()


def test_what_only_reads_does_not_stay_on_an_old_server_for_ever(
    database: Database, database_url: SecretStr, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooled connection and a listener's are replaced when they are old, and the listener has missed nothing."""
    listeners = text("SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'")
    listener = Listener(database)
    assert listener.wait(0.0)
    assert not listener.wait(0.02)
    (listening,) = database.scalars(listeners)
    monkeypatch.setattr("alphaloop.store.database._LONGEST_S", 0.0)
    assert listener.wait(0.0), "it may have missed a notice"
    until(lambda: listening not in database.scalars(listeners), "the old connection is closed")
    listener.close()
    with Database(database_url, pool_size=1) as pooled:
        assert pooled.scalar(_PID) != pooled.scalar(_PID)


def test_several_hosts_of_one_url_are_tried_in_turn(database_url: SecretStr) -> None:
    """Also by what is no part of the pool; the first does not answer, the second takes writes."""
    url = make_url(database_url.get_secret_value())
    hosts = [f"127.0.0.1:{free_ports(1)[0]}", f"{url.host}:{url.port}"]
    several = URL.create(url.drivername, url.username, url.password, database=url.database).update_query_dict(
        {"host": hosts, "target_session_attrs": "read-write"}
    )
    with Database(SecretStr(several.render_as_string(hide_password=False))) as database:
        database.change(text("INSERT INTO cancellations (job_id) VALUES ('a')"))
        with database.dedicated() as driver:
            assert driver.execute("SELECT job_id FROM cancellations").fetchall() == [("a",)]


def test_a_text_that_no_column_holds_is_the_values_fault(database: Database) -> None:
    for statement in ("SELECT %s::text", "INSERT INTO cancellations (job_id) VALUES (%s)"):
        with pytest.raises(StoreValueRefused), database.begin() as connection:
            driver_of(connection).execute(statement, ["NUL \x00 inside"])


def test_a_connection_that_the_driver_found_broken_is_replaced(database: Database, database_url: SecretStr) -> None:
    """Not SQLAlchemy but the driver met the break, so the pool does not know of it."""

    def meet_it(block: AbstractContextManager[Connection]) -> None:
        with block as connection:
            driver = driver_of(connection)
            with psycopg.connect(database_url.get_secret_value()) as other:
                other.execute("SELECT pg_terminate_backend(%s, 10000)", [driver.info.backend_pid])
            driver.execute("SELECT 1")

    for block in (database.single(), database.begin()):
        with pytest.raises(StoreUnavailable):
            meet_it(block)
        assert database.scalar(text("SELECT 1")) == 1


def test_a_server_out_of_transaction_ids_is_an_outage_and_no_fault_of_values(
    postgres_server: str, tmp_path: Path
) -> None:
    """Its SQLSTATE is that of a row too large: a worker would send every job to the dead letters."""
    folder, account = tmp_path / "postgres", service_account()
    server = EmbeddedPostgres(folder, durable=False)
    upgrade(SecretStr(server.start()))
    server.stop()
    xid = 2**31 - 2_000_000  # the last ones before the oldest in use; one segment of the log has 2^20
    segment = folder / "data" / "pg_xact" / f"{xid >> 20:04X}"
    segment.write_bytes(bytes(262_144))
    if account is not None:
        os.chown(segment, *account)
    command = [binaries() / "pg_resetwal", "-f", "-x", str(xid), folder / "data"]
    reset = ChildProcess("pg_resetwal", command, log=folder / "reset.log", run_as=account, keep_search=True)
    reset.start()
    assert reset.wait(60) == 0
    try:
        with Database(SecretStr(server.start())) as database:
            for write in (
                lambda: JobStore(database).claim([claim_request("a")], owner="w", lease_s=60, max_attempts=3),
                lambda: JobStore(database).request_cancel("b"),
            ):
                with pytest.raises(StoreUnavailable, match="wraparound") as refusal:
                    write()
                assert "VACUUM" in (refusal.value.hint or "")
    finally:
        server.stop()
