"""The small HTTP server of both processes: /metrics, /healthz, /readyz.

/metrics may ask for a name and a password (basic authentication). The two checks never do, because container engines
and orchestrators ask them without any, and they show no more than which part of the process is at fault.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import SecretStr

from alphaloop.errors import ConfigError

Check = Callable[[], str | None]
"""None when all is well, else what is wrong, in one line."""


#: A client that neither sends nor reads for so long is let go, so that its thread ends.
SOCKET_TIMEOUT_S: Final = 10.0


class MetricsServer:
    """Serves until closed. /healthz: should this process be restarted? /readyz: does it take work?

    With a `password` /metrics is shown to who sends `username` and that password only.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        healthy: Check,
        ready: Check,
        username: str = "metrics",
        password: SecretStr | None = None,
    ) -> None:
        handler = _handler(
            registry,
            {"/healthz": healthy, "/readyz": ready},
            None if password is None else f"{username}:{password.get_secret_value()}",
        )
        self._server = _Server(listening(host, port, "http_port"), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return url_of(*self._server.socket.getsockname()[:2])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def listening(host: str, port: int, setting: str) -> socket.socket:
    """A socket that listens on an address of IPv4 or IPv6, or on the address of a name; `::` is every address of both.

    Raises ConfigError, which names `setting`.
    """
    try:
        family, *_ = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]  # noqa: S104 - as asked for
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot listen on {in_url(host)}:{port}: {error.strerror}", hint="0 picks a free port"
        ) from None


def in_url(host: str) -> str:
    """A host as URLs have it: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def url_of(host: str, port: int) -> str:
    """The URL of a server without TLS."""
    return f"http://{in_url(host)}:{port}"


class _Server(ThreadingHTTPServer):
    """Serves a socket that listens already."""

    daemon_threads = True

    def __init__(self, listens: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(listens.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listens


def _handler(
    registry: CollectorRegistry, checks: dict[str, Check], credentials: str | None
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = SOCKET_TIMEOUT_S

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics" and not _is_allowed(self.headers.get("Authorization"), credentials):
                self._answer(401, "text/plain; charset=utf-8", b"a name and a password are needed\n")
            elif path == "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, content_type, encode(registry))
            elif path in checks:
                wrong = checks[path]()
                self._answer(503 if wrong else 200, "text/plain; charset=utf-8", f"{wrong or 'ok'}\n".encode())
            else:
                self._answer(404, "text/plain; charset=utf-8", b"try /metrics, /healthz or /readyz\n")

        def _answer(self, status: int, content_type: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="metrics"')
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Scrapes are not news."""

    return Handler


def _is_allowed(header: str | None, credentials: str | None) -> bool:
    """Whether a header `Authorization: Basic …` carries these credentials; None asks for none."""
    if credentials is None:
        return True
    scheme, _, encoded = (header or "").partition(" ")
    try:
        given = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return False
    # In constant time, so that an answer's delay tells nothing about the password.
    return scheme.lower() == "basic" and hmac.compare_digest(given, credentials.encode())
