"""The HTTP server of both processes: what it shows, and to whom."""

from __future__ import annotations

import base64
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle

import pytest
from prometheus_client import CollectorRegistry, Counter
from pydantic import SecretStr

from alphaloop.errors import ConfigError
from alphaloop.liveness import MOST_CONNECTIONS, Check, MetricsServer
from alphaloop.settings import ConsoleSettings

WAIT_S = 10.0


@contextmanager
def serving(
    host: str = "127.0.0.1", port: int = 0, *, password: str | None = None, healthy: Check = lambda: None
) -> Iterator[str]:
    registry = CollectorRegistry()
    Counter("jobs", "Jobs", registry=registry).inc()
    secret = None if password is None else SecretStr(password)
    server = MetricsServer(host, port, registry, healthy=healthy, ready=lambda: None, password=secret)
    try:
        yield server.url
    finally:
        server.close()


def get(url: str, authorization: str | None = None) -> tuple[int, str]:
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def basic(credentials: str) -> str:
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


def test_checks_say_what_is_wrong() -> None:
    with serving(healthy=lambda: "the step has not moved") as url:
        assert get(f"{url}/healthz") == (503, "the step has not moved\n")
        assert get(f"{url}/readyz?verbose") == (200, "ok\n")
        assert get(f"{url}/")[0] == 404
        status, text = get(f"{url}/metrics")
        assert (status, "jobs_total 1.0" in text) == (200, True)


def test_metrics_are_shown_to_the_password_only_and_checks_to_everybody() -> None:
    with serving(password="s3cret") as url:
        wrong = (None, basic("metrics:wrong"), basic("other:s3cret"), "Basic ???", "Bearer s3cret", "Basic")
        assert [get(f"{url}/metrics", given)[0] for given in wrong] == [401] * len(wrong)
        assert get(f"{url}/metrics", basic("metrics:s3cret"))[0] == 200
        assert get(f"{url}/healthz") == (200, "ok\n")


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\nHost:"])
def test_silent_clients_are_let_go_and_hold_neither_threads_nor_the_door(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go_after_s = WAIT_S / 2
    monkeypatch.setattr("alphaloop.liveness.CONNECTION_S", let_go_after_s)
    with serving() as url, ExitStack() as stack:
        host, _, port = url.removeprefix("http://").partition(":")
        before = threading.active_count()
        silent = [stack.enter_context(socket.create_connection((host, int(port)), WAIT_S)) for _ in range(300)]
        for one in silent:
            with suppress(ConnectionError):  # it is closed already
                one.sendall(said)
        began = time.monotonic()
        assert get(f"{url}/healthz") == (200, "ok\n")
        assert time.monotonic() - began < let_go_after_s, "the check does not wait for silent clients"
        assert threading.active_count() - before <= 2 * MOST_CONNECTIONS, "no thread for each"
        for one in silent:
            with suppress(ConnectionError):
                assert one.recv(1024) == b""


def test_a_client_that_sends_a_byte_now_and_then_is_let_go_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphaloop.liveness.CONNECTION_S", 0.3)
    with serving() as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=0.05) as client:
            ended = time.monotonic() + WAIT_S
            for byte in cycle(b"GET /metrics HTTP/1.1\r\nHost: aaaaaaaaaa"):
                assert time.monotonic() < ended
                try:
                    client.send(bytes([byte]))
                    if client.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except ConnectionError:
                    break


@pytest.mark.parametrize(
    ("host", "shown"), [("::1", "http://[::1]:"), ("127.0.0.1", "http://127.0.0.1:"), ("::", "http://[::]:")]
)
def test_it_listens_on_addresses_of_both_families(host: str, shown: str) -> None:
    with serving(host) as url:
        assert url.startswith(shown)
        assert get(f"{url}/healthz") == (200, "ok\n")
        port = int(url.rpartition(":")[2])
        if host == "::":
            assert get(f"http://127.0.0.1:{port}/healthz") == (200, "ok\n"), "every address, of IPv4 too"
        with (
            pytest.raises(ConfigError, match=re.escape(f"http_port: cannot listen on {shown[7:]}")),
            serving(host, port),
        ):
            pass


def test_a_name_without_an_address_is_told() -> None:
    with pytest.raises(ConfigError, match="http_port: cannot listen on no-such-host"), serving("no-such-host.invalid"):
        pass


def test_a_browser_may_ask_the_console_by_an_address_of_ipv6() -> None:
    console = ConsoleSettings(http_host="fd00::5", public_url="http://[fd00::6]:80", password=SecretStr("p"))
    assert {"[fd00::5]", "[fd00::6]", "[::1]"} <= set(console.hosts or ()), "as the header Host has them"
