"""Whether the threads of a process still move, why a process ended, and the small HTTP server that says so.

A thread that hangs raises nothing, so only its silence shows. A thread beats each time that it begins a turn, and while
it waits for something that may rightly take long: room in a queue, a server that is away. So silence means that one
call does not return. The watchdog then ends the process, because a health check alone restarts nothing.

`MetricsServer` serves /metrics, /healthz and /readyz of both processes. /metrics may ask for a name and a password
(basic authentication). The two checks never do, because container engines and orchestrators ask them without any, and
they show no more than which part of the process is at fault.
"""

from __future__ import annotations

import base64
import faulthandler
import hmac
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NoReturn

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import SecretStr

from alphaloop.errors import ConfigError


class ExitCode(IntEnum):
    """Why a process ended. 2 is left out, because Python and argparse use it for wrong arguments."""

    STOPPED = 0  #: asked to stop, and everything was handed over
    FAILED = 1  #: an error that the last line of the log names
    ENGINE_SICK = 3  #: nothing could be decoded any more; its jobs were given back uncounted
    HUNG = 4  #: a step, a run or a thread did not move for too long

    @property
    def meaning(self) -> str:
        """What to say to a person, as the end of a sentence about the process."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.STOPPED: "it was asked to stop",
    ExitCode.FAILED: "it met an error",
    ExitCode.ENGINE_SICK: "its engine could decode nothing any more",
    ExitCode.HUNG: "a step, a run or a thread did not move any more",
}


_of_thread = threading.local()


class Pulse:
    """When something last moved: a thread, or the steps of an engine."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock
        self._beat_at: float | None = None

    @property
    def silence_s(self) -> float:
        """Seconds since the last beat; 0 while it is not expected to beat."""
        beat_at = self._beat_at
        return 0.0 if beat_at is None else self._clock() - beat_at

    def beat(self) -> None:
        """It moves."""
        self._beat_at = self._clock()

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Expect beats during this block. `beat` of this thread means this pulse."""
        before = getattr(_of_thread, "pulse", None)
        _of_thread.pulse = self
        self.beat()
        try:
            yield
        finally:
            self.rest()
            _of_thread.pulse = before

    def around(self, run: Callable[[], None]) -> Callable[[], None]:
        """`run` of a thread, with beats expected as long as it runs."""

        def run_watched() -> None:
            with self.expected():
                run()

        return run_watched

    def rest(self) -> None:
        """Expect no beat until the next one."""
        self._beat_at = None

    def excuse(self) -> None:
        """Forget the silence up to now."""
        if self._beat_at is not None:
            self.beat()


def beat() -> None:
    """The calling thread moves, or waits for something that may take long. Nothing happens in an unwatched thread."""
    pulse: Pulse | None = getattr(_of_thread, "pulse", None)
    if pulse is not None:
        pulse.beat()


class Liveness:
    """The pulses of a process, each with the longest silence that is still right."""

    def __init__(self) -> None:
        self._limits_s: dict[Pulse, float] = {}

    def watch(self, pulse: Pulse, limit_s: float) -> Pulse:
        """From now on a silence of more than `limit_s` of this pulse is a fault. Returns the pulse."""
        self._limits_s[pulse] = limit_s
        return pulse

    @property
    def pulses(self) -> tuple[Pulse, ...]:
        """All that are watched."""
        return tuple(self._limits_s)

    def hung(self) -> str | None:
        """What does not move any more, in words; None while all is well."""
        for pulse, limit_s in self._limits_s.items():
            if (silence_s := pulse.silence_s) > limit_s:
                return f"{pulse.name} has not moved for {silence_s:.0f} s, expected at most {limit_s:g} s"
        return None

    def excuse(self) -> None:
        """Forget every silence up to now, because the whole process was suspended."""
        for pulse in self._limits_s:
            pulse.excuse()


log = logging.getLogger(__name__)

TICK_S: Final = 1.0
#: Between the fault and the end: a health check sees it, and what was only slow can still go on.
GRACE_S: Final = 15.0
#: Ticks that come so much too late mean that the whole process was suspended.
_SUSPENDED_S: Final = 5.0
#: How long the last orders before the end may take.
_LAST_ORDERS_S: Final = 5.0


def _exit() -> NoReturn:
    """Stacks show where it hangs, and no values: neither prompts nor secrets. No clean-up, because that would wait."""
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(ExitCode.HUNG)


@dataclass(eq=False)
class Watchdog:
    """Looks at the pulses each second, from a thread of its own.

    If something hangs for GRACE_S after it was found, every thread's stack goes to standard error and the process ends
    with ExitCode.HUNG. `last_orders` is called before, for a few seconds at most. With `backstop_s` the C library ends
    the process, with code 1, when this thread itself gets no turn for this long because a call holds the interpreter.
    """

    liveness: Liveness
    _: KW_ONLY
    last_orders: Callable[[], object] = lambda: None
    end: Callable[[], object] = _exit
    backstop_s: float | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._looked_at = self.clock()
        self._hung_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._looked_at = self.clock()
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * TICK_S)
        if self.backstop_s is not None:
            faulthandler.cancel_dump_traceback_later()

    def look(self) -> None:
        """One look; ends the process when something has hung for too long."""
        now = self.clock()
        if now - self._looked_at > TICK_S + _SUSPENDED_S:
            self.liveness.excuse()
        self._looked_at = now
        hung = self.liveness.hung()
        if hung is None:
            self._hung_since = None
        elif self._hung_since is None:
            self._hung_since = now
            log.error("%s; ending in %.0f s", hung, GRACE_S, extra={"action": "hung"})
        elif now - self._hung_since >= GRACE_S:
            log.critical("%s: ending", hung, extra={"action": "hung_ending"})
            self._give_last_orders()
            self.end()

    def _give_last_orders(self) -> None:
        """In another thread, because they may meet the same hanging call."""
        thread = threading.Thread(target=self.last_orders, name="last-orders", daemon=True)
        thread.start()
        thread.join(_LAST_ORDERS_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self.backstop_s is not None:
                faulthandler.dump_traceback_later(self.backstop_s, exit=True)
            self.look()
            self._stop.wait(TICK_S)


Check = Callable[[], str | None]
"""None when all is well, else what is wrong, in one line."""


#: A connection has one request, and is cut after this time, so that its thread ends whatever its client does.
CONNECTION_S: Final = 10.0
#: One more cuts the oldest: who connects and says nothing leaves the process its files and threads.
MOST_CONNECTIONS: Final = 32


class MetricsServer(ThreadingHTTPServer):
    """Serves until closed. /healthz: should this process be restarted? /readyz: does it take work?

    With a `password` /metrics is shown to who sends the name `metrics` and that password only.
    """

    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        healthy: Check,
        ready: Check,
        password: SecretStr | None = None,
    ) -> None:
        listens = listening(host, port, "http_port")
        super().__init__(listens.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listens
        self.registry = registry
        self.checks = {"/healthz": healthy, "/readyz": ready}
        self.credentials = None if password is None else f"metrics:{password.get_secret_value()}"
        self._opened: dict[socket.socket, float] = {}  # when, in this order
        self._thread = threading.Thread(target=self.serve_forever, name="endpoint", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return url_of(*self.socket.getsockname()[:2])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer it in a thread of its own."""
        self._opened[request] = time.monotonic()
        self.service_actions()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Cut connections that are too old or too many; called twice a second."""
        self._opened = {connection: at for connection, at in self._opened.items() if connection.fileno() >= 0}
        for left, (connection, at) in zip(range(len(self._opened), 0, -1), self._opened.items(), strict=True):
            if left > MOST_CONNECTIONS or time.monotonic() > at + CONNECTION_S:
                with suppress(OSError):  # closed meanwhile
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()
        self._thread.join(5)


def listening(host: str, port: int, setting: str) -> socket.socket:
    """A socket that listens on an address of IPv4 or IPv6, or on the address of a name; `::` is every address of both.

    Raises ConfigError, which names `setting`.
    """
    try:
        family, *_ = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]  # noqa: S104 - as asked for
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=both)
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


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        path, checks = self.path.partition("?")[0], self.server.checks
        if path == "/metrics" and not _is_allowed(self.headers.get("Authorization"), self.server.credentials):
            self._answer(401, "text/plain; charset=utf-8", b"a name and a password are needed\n")
        elif path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(self.server.registry))
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


def _is_allowed(header: str | None, credentials: str | None) -> bool:
    """Whether a header `Authorization: Basic …` carries these credentials; None asks for none."""
    given = basic_credentials(header)
    # In constant time, so that an answer's delay shows nothing about the password.
    return credentials is None or (given is not None and hmac.compare_digest(given, credentials.encode()))


def basic_credentials(header: str | None) -> bytes | None:
    """`name:password` of a header `Authorization: Basic …`; None of any other."""
    scheme, _, encoded = (header or "").partition(" ")
    try:
        return base64.b64decode(encoded, validate=True) if scheme.lower() == "basic" else None
    except ValueError:
        return None
