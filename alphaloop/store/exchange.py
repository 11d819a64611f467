"""Statements of the hot path: straight to the driver, several in one exchange with the server.

SQLAlchemy takes 25 to 80 µs for a statement, and each answer that is waited for costs a change of threads twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import psycopg
from sqlalchemy import Connection


def driver_of(connection: Connection) -> psycopg.Connection:
    """The driver's connection, in the same transaction. Raises psycopg.Error, which `Database.begin` converts."""
    return cast(psycopg.Connection, connection.connection.driver_connection)


@contextmanager
def one_exchange(connection: Connection) -> Iterator[psycopg.Connection]:
    """Statements of the block are sent together; their answers can be read behind the block.

    Each sees what those before it did. COPY is not possible here.
    """
    driver = driver_of(connection)
    with driver.pipeline():
        yield driver
