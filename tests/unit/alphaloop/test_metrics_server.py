"""The HTTP server of both processes: what it shows, and to whom."""

from __future__ import annotations

import base64
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from prometheus_client import CollectorRegistry, Counter
from pydantic import SecretStr

from alphaloop.errors import ConfigError
from alphaloop.liveness import Check, MetricsServer
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


def test_a_client_that_sends_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphaloop.liveness._Handler.timeout", 0.1)
    with serving() as url:
        host, _, port = url.removeprefix("http://").partition(":")
        # On a busy machine the server may close the connection before the client has sent.
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as client, suppress(ConnectionError):
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
            assert client.recv(1024) == b""


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
