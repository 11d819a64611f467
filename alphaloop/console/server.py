"""Serves the console from a thread of the process that starts it."""

from __future__ import annotations

import logging
import threading
from typing import Final, Self

import uvicorn

from alphaloop.console.app import Console
from alphaloop.console.sources import Sources
from alphaloop.liveness import listening, url_of
from alphaloop.settings import Settings

_STOP_S: Final = 5.0


class ConsoleServer:
    """Listens from its construction on, until it is closed."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where the port is taken, or no database is configured."""
        self._sources = Sources.of(settings)
        self._socket = listening(settings.console.http_host, settings.console.http_port, "console.http_port")
        self.listens_at: Final = url_of(*self._socket.getsockname()[:2])
        self.url: Final = settings.console.public_url or self.listens_at  #: what people type
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        config = uvicorn.Config(
            Console(self._sources).app(),
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=200,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="console", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and give the connections back."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._socket.close()
        self._sources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])
