"""The small HTTP server of both processes: /metrics, /healthz, /readyz."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from alphaloop.errors import ConfigError

Check = Callable[[], str | None]
"""None when all is well, else what is wrong, in one line."""


class Endpoint:
    """Serves until closed. /healthz: should this process be restarted? /readyz: does it take work?"""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, *, healthy: Check, ready: Check) -> None:
        handler = _handler(registry, {"/healthz": healthy, "/readyz": ready})
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as error:
            raise ConfigError(
                f"http_port: cannot listen on {host}:{port}: {error.strerror}", hint="0 picks a free port"
            ) from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def _handler(registry: CollectorRegistry, checks: dict[str, Check]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
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
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Scrapes are not news."""

    return Handler
