"""What the scheduler counts, and its `/metrics` and `/healthz`.

Labels are tasks, causes and outcomes: few and known. Every counter is in base units.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from alphaloop.errors import ConfigError
from scheduler.facts import SentProbes
from scheduler.report.data import Report

BUCKETS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
CAUSES: Final = ("traffic_changed", "draft_stale", "unexplained")


class SchedulerMetrics:
    """The figures of this process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry: Final = CollectorRegistry()
        prefix, registry = "alphaloop_scheduler", self.registry
        self._runs = Counter(f"{prefix}_runs", "Measurement runs by outcome", ["outcome"], registry=registry)
        self._seconds = Histogram(
            f"{prefix}_run_seconds", "Duration of a measurement run", buckets=BUCKETS, registry=registry
        )
        self._last = Gauge(f"{prefix}_last_success_timestamp_seconds", "When the last run succeeded", registry=registry)
        self._leader = Gauge(f"{prefix}_is_leader", "1 while this process holds the lock", registry=registry)
        self._missed = Counter(f"{prefix}_missed_ticks", "Ticks that came too late to run", registry=registry)
        self._probes = Counter(f"{prefix}_probe_jobs", "Probes and controls sent", ["task"], registry=registry)
        self._budget = Gauge(f"{prefix}_probe_budget_seconds", "Device time a run's probes may take", registry=registry)
        self._drift = Gauge(f"{prefix}_open_drift_events", "Drift that is not over", ["cause"], registry=registry)
        self._stale = Gauge(f"{prefix}_stale_drafts", "Draft revisions flagged stale", registry=registry)
        self._reports = Counter(f"{prefix}_reports", "Reports made", registry=registry)
        for outcome in ("succeeded", "failed"):
            self._runs.labels(outcome)

    @contextmanager
    def time_run(self) -> Iterator[None]:
        """Time a run, however it ends."""
        with self._seconds.time():
            yield

    def run_failed(self) -> None:
        """Count a run that raised."""
        self._runs.labels("failed").inc()

    def run_succeeded(self, report: Report, sent: SentProbes, now: datetime) -> None:
        """Count a run and what it found."""
        self._runs.labels("succeeded").inc()
        self._reports.inc()
        self._last.set(now.timestamp())
        self._budget.set(sent.budget_device_s)
        self._stale.set(sum(1 for draft in report.drafts if draft.status == "stale"))
        open_by_cause = Tally(line.cause for line in report.drift)
        for cause in CAUSES:
            self._drift.labels(cause).set(open_by_cause[cause])
        for task, number in sent.num_jobs_by_task.items():
            self._probes.labels(task).inc(number)

    def tick_missed(self) -> None:
        """Count a tick that came too late."""
        self._missed.inc()

    def set_leader(self, is_leader: bool) -> None:
        """Note whether this process leads."""
        self._leader.set(is_leader)

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class MetricsServer:
    """`/metrics` and `/healthz` on a thread of its own. `health` returns None, or what is wrong."""

    def __init__(self, host: str, port: int, metrics: SchedulerMetrics, health: Callable[[], str | None]) -> None:
        """Listens at once; port 0 picks a free one. Raises ConfigError when the address is taken."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.split("?")[0] == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, metrics.render())
                elif self.path == "/healthz":
                    wrong = health()
                    self._answer(503 if wrong else 200, "text/plain; charset=utf-8", f"{wrong or 'ok'}\n".encode())
                else:
                    self._answer(404, "text/plain; charset=utf-8", b"expected /metrics or /healthz\n")

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """A scrape every few seconds is not news."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"expected a free address for /metrics, found {host}:{port}: {error.strerror or error}",
                hint="set scheduler.http_port to another port, or to 0 for any",
            ) from None
        self._server.daemon_threads = True
        self.port: Final[int] = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, name="scheduler-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
