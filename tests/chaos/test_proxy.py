"""The proxy passes everything on, and cuts exactly where it is asked to."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import urlsplit

import psycopg
import pytest
from pydantic import SecretStr

from tests.chaos.proxy import Proxy

pytestmark = pytest.mark.postgres

HELD_S: Final = 0.2
WAIT_S: Final = 30.0


@pytest.fixture
def proxy(empty_database_url: SecretStr) -> Iterator[Proxy]:
    port = urlsplit(empty_database_url.get_secret_value()).port
    assert port is not None
    proxy = Proxy(port)
    yield proxy
    proxy.close()


@pytest.fixture
def proxied(proxy: Proxy, empty_database_url: SecretStr) -> str:
    parts = urlsplit(empty_database_url.get_secret_value())
    with psycopg.connect(parts.geturl(), autocommit=True) as connection:
        connection.execute("CREATE TABLE numbers (number integer)")
    return parts._replace(netloc=parts.netloc.replace(str(parts.port), str(proxy.port))).geturl()


def numbers(url: SecretStr) -> list[int]:
    with psycopg.connect(url.get_secret_value()) as connection:
        return [number for (number,) in connection.execute("SELECT number FROM numbers ORDER BY 1")]


def insert(url: str, number: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO numbers VALUES (%s)", (number,))


def test_a_commit_is_lost_and_the_next_one_is_not_answered(
    proxy: Proxy, proxied: str, empty_database_url: SecretStr
) -> None:
    proxy.cut_commits(1, 1)
    with pytest.raises(psycopg.OperationalError):
        insert(proxied, 1)
    assert numbers(empty_database_url) == []
    with pytest.raises(psycopg.OperationalError):
        insert(proxied, 2)
    assert numbers(empty_database_url) == [2], "it was committed, and the client cannot know"
    insert(proxied, 3)
    assert numbers(empty_database_url) == [2, 3]
    assert proxy.num_cuts == 2


def test_a_cut_resets_every_connection(proxy: Proxy, proxied: str) -> None:
    with psycopg.connect(proxied, autocommit=True) as one, psycopg.connect(proxied, autocommit=True) as other:
        one.execute("SELECT 1")
        proxy.cut()
        for connection in (one, other):
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
    assert proxy.num_cuts == 2


def test_what_is_held_arrives_after_the_release(proxy: Proxy, proxied: str) -> None:
    with psycopg.connect(proxied, autocommit=True) as connection:
        proxy.hold()
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(lambda: connection.execute("SELECT 7").fetchone())
            with pytest.raises(TimeoutError):
                asked.result(HELD_S)
            proxy.release()
            assert asked.result(WAIT_S) == (7,)
