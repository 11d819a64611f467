"""Postgres's disk is full: SQLSTATE 53100.

Where a file system can be mounted, the tables' is made full for real: whatever needs a new page is refused. Elsewhere
triggers refuse every write as Postgres does then, because a machine's own disk is not to be filled.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from tests.chaos.faults.fault import Fault, Target

if TYPE_CHECKING:
    from tests.chaos.world import World

_FUNCTION: Final = """
    CREATE OR REPLACE FUNCTION chaos_disk_full() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100';
    END $$
"""
_TABLES: Final = """
    SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')
    AND NOT relispartition ORDER BY 1
"""
_FILL: Final = """
    CREATE TRIGGER chaos_disk_full BEFORE INSERT OR UPDATE ON {} FOR EACH STATEMENT EXECUTE FUNCTION chaos_disk_full()
"""
_EMPTY: Final = "DROP TRIGGER IF EXISTS chaos_disk_full ON {}"
_NUM_TRIES: Final = 20


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    if world.disk is None:
        _refuse_writes(world, seconds)
        return
    world.disk.fill()
    try:
        world.wait(seconds)
    finally:
        world.disk.free()


def _refuse_writes(world: World, seconds: float) -> None:
    with world.administrator() as connection:
        connection.execute(_FUNCTION)
        tables = [name for (name,) in connection.execute(_TABLES)]
        try:
            _on_each(connection, tables, _FILL)
            world.wait(seconds)
        finally:
            _on_each(connection, tables, _EMPTY)


def _on_each(connection: psycopg.Connection, tables: list[str], statement: str) -> None:
    for table in tables:
        for number in range(_NUM_TRIES):
            try:
                connection.execute(sql.SQL(statement).format(sql.Identifier(table)))
                break
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                if number == _NUM_TRIES - 1:
                    raise


FAULT: Final = Fault("disk full", "no space for Postgres's tables: SQLSTATE 53100", Target.POSTGRES, _inject)
