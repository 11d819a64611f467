"""Clients of the console that are silent, half done or slow close the door to nobody else."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from alphaloop.batches.advancing import Advancing
from alphaloop.console import connections
from alphaloop.console.openai_api import MOST_OF_KEY
from alphaloop.settings import PostgresSettings, Settings, TaskSettings
from alphaloop.store.api import ApiKeyStore
from alphaloop.store.database import Database
from tests.fixtures.openai_api import create_key, served

pytestmark = pytest.mark.postgres

NUM = 300
HEAD = b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer KEY\r\nContent-Length: 5000\r\n"
HEAD += b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
BEGUN = {
    "nothing": b"",
    "half a line": b"GET / HT",
    "half a header": b"GET /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow:",
    "half a body": HEAD + b"--b\r\nContent-Disposition: form-data",
}


@pytest.fixture
def url(console_login: SecretStr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Advancing, "run_once", lambda self: 0)
    settings = Settings(postgres=PostgresSettings(url=console_login), tasks={"chat": TaskSettings()})
    with served(settings, tmp_path) as address:
        yield address


def connect(url: str, source: str = "127.0.0.1") -> socket.socket:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    return socket.create_connection((host, port), 30, source_address=(source, 0))  # type: ignore[arg-type]


def get(url: str, path: str, source: str, key: str) -> int:
    """The status of a page, asked for from an address of this machine; of three tries one has to take a second at most.

    Others may use this machine too.
    """
    for _ in range(3):
        began = time.monotonic()
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30, source_address=(source, 0))
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
            status = connection.getresponse().status
        finally:
            connection.close()
        if time.monotonic() - began < 1:
            return status
    raise AssertionError(f"{path} from {source} took longer each time")


@pytest.mark.parametrize("begun", sorted(BEGUN))
def test_three_hundred_that_stop_in_the_middle_leave_room_for_others(url: str, begun: str, database: Database) -> None:
    bad, good = (create_key(database, name).encode() for name in ("bad", "good"))
    get(url, "/reports", "127.0.0.2", "")  # what is read and compiled once
    with ExitStack() as stack:
        for _ in range(NUM):
            client = stack.enter_context(connect(url))
            with suppress(ConnectionError):
                client.sendall(BEGUN[begun].replace(b"KEY", bad))
        for source in ("127.0.0.1", "127.0.0.2"):
            assert get(url, "/v1/files", source, good.decode()) == 200
            assert get(url, "/reports", source, "") == 200


def test_silent_clients_of_many_addresses_leave_room_too(url: str, database: Database) -> None:
    key = create_key(database, "good")
    get(url, "/reports", "127.0.0.2", "")
    with ExitStack() as stack:
        for number in range(NUM):
            stack.enter_context(connect(url, f"127.0.1.{number % 60 + 1}"))
        assert get(url, "/v1/files", "127.0.0.1", key) == 200
        assert get(url, "/reports", "127.0.1.7", "") == 200


def test_where_all_are_being_answered_one_more_is_asked_to_come_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(connections, "MOST_OF_ADDRESS", 2)
    monkeypatch.setattr(ApiKeyStore, "find", lambda self, secret: goes_on.wait(30) and None)
    with connect(url) as one, connect(url) as two:
        for client in (one, two):
            client.sendall(BEGUN["half a header"] + b" a\r\nAuthorization: Bearer x\r\n\r\n")
        time.sleep(0.5)  # their requests have begun
        assert get(url, "/static/icon.svg", "127.0.0.1", "") == 503
        assert get(url, "/static/icon.svg", "127.0.0.2", "") == 200
        goes_on.set()
        assert one.recv(100).startswith(b"HTTP/1.1 401")
        assert two.recv(100).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("begun", sorted(BEGUN))
def test_each_part_of_a_request_has_a_deadline_and_a_slow_body_a_least_pace(
    url: str, begun: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PATIENCE_S", 0.5)
    monkeypatch.setattr(connections, "_LOOK_S", 0.05)
    key = create_key(database, "slow").encode()
    with connect(url) as client:
        client.sendall(BEGUN[begun].replace(b"KEY", key))
        client.settimeout(0.1)
        began, answer = time.monotonic(), None
        while answer is None:
            assert time.monotonic() - began < 10
            try:
                answer = client.recv(4096)
            except TimeoutError:
                if begun != "nothing":
                    with suppress(ConnectionError):
                        client.send(b"a")  # ten bytes a second
            except ConnectionError:
                answer = b""
        assert answer.split(b"\r\n")[0] in ((b"",) if begun == "nothing" else (b"", b"HTTP/1.1 408 Request Timeout"))


def test_an_answer_that_is_not_read_and_a_pause_between_requests_end_too(
    url: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = create_key(database, "reader")
    boundary = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    boundary += b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    body = boundary + b"x" * 20_000_000 + b"\r\n--b--\r\n"
    header = {"Authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("POST", "/v1/files", body, {**header, "Content-Type": "multipart/form-data; boundary=b"})
    answer = connection.getresponse()
    file_id = answer.read().split(b'"')[3].decode()
    for name, seconds in (("READER_S", 0.3), ("PATIENCE_S", 0.3), ("_LOOK_S", 0.05)):
        monkeypatch.setattr(connections, name, seconds)
    connection.close()
    with connect(url) as client:
        client.sendall(
            f"GET /v1/files/{file_id}/content HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
        )
        time.sleep(2)  # it reads nothing meanwhile
        num_bytes = 0
        with suppress(ConnectionError):
            while piece := client.recv(1 << 20):
                num_bytes += len(piece)
        assert 0 < num_bytes < 20_000_000


def test_a_key_has_so_many_requests_at_once(url: str, database: Database) -> None:
    key, other = create_key(database, "much").encode(), create_key(database, "other")
    with ExitStack() as stack:
        for _ in range(MOST_OF_KEY):
            stack.enter_context(connect(url)).sendall(BEGUN["half a body"].replace(b"KEY", key))
        ended = time.monotonic() + 30
        while get(url, "/v1/files", "127.0.0.1", key.decode()) != 429:
            assert time.monotonic() < ended
        assert get(url, "/v1/files", "127.0.0.1", other) == 200
    while get(url, "/v1/files", "127.0.0.1", key.decode()) != 200:
        assert time.monotonic() < ended, "they are over"


def test_two_lengths_in_one_request_are_refused(url: str) -> None:
    for path in (b"/v1/files", b"/sign-in"):
        with connect(url) as client:
            client.sendall(
                b"POST "
                + path
                + b" HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"0\r\n\r\nGET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            )
            answer = b""
            with suppress(ConnectionError):
                while piece := client.recv(4096):
                    answer += piece
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1, "what came behind is no request"
