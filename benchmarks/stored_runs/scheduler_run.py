"""Runs of the scheduler in a process of their own: every statement they send, and their memory."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr
from sqlalchemy import Engine, event

from alphaloop.kafka.producer import Producer
from alphaloop.settings import Settings, TaskSettings
from alphaloop.settings.processes import UNLIMITED
from alphaloop.store.database import Database
from benchmarks.stored_runs.filling import TASKS
from benchmarks.stored_runs.questions import cpu_ms

_STATUS: Final = Path("/proc/self/status")


@dataclass(slots=True)
class Statement:
    """A statement by where it was sent from: how often in a run, and how long these took together."""

    name: str
    ms: list[float] = field(default_factory=list)  #: by run, of all its executions
    cpu_ms: list[float] = field(default_factory=list)  #: of the server
    calls: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  #: read or written
    slowest_ms: float = 0.0  #: processor time of one execution in the last run

    @property
    def together_ms(self) -> float:
        """Median of the runs but the first; 0 of what only the first one sent."""
        return statistics.median(self.ms[1:]) if len(self.ms) > 1 else 0.0

    @property
    def together_cpu_ms(self) -> float:
        """The same, of the server's processor time."""
        return statistics.median(self.cpu_ms[1:]) if len(self.cpu_ms) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Runs:
    """What the runs did; the first one is not among them."""

    statements: Sequence[Statement]
    run_s: float  #: median
    run_cpu_s: float  #: median, of the scheduler itself
    server_cpu_s: float  #: median, of the server; with what is fetched in portions, which no statement's time has
    rss_before: int  #: bytes, before the first run
    rss_peak: int  #: the highest of all runs, the first one among them

    @property
    def grown(self) -> int:
        """Bytes that the runs needed at their peak."""
        return self.rss_peak - self.rss_before


class NoProducer(Producer):
    """Takes messages and sends none: the runs are about reading."""

    def __init__(self) -> None:
        """Without a broker."""

    def send(self, topic: str, **_: Any) -> None:
        """Nothing."""

    def flush(self, timeout_s: float) -> None:
        """Nothing."""


def run_scheduler(url: str, num_runs: int) -> Runs:
    """One run and `num_runs` more, a second apart by their clock, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_run, (url, num_runs))


def _run(url: str, num_runs: int) -> Runs:
    # Imported before memory is measured.
    from scheduler.loop import Scheduler
    from scheduler.metrics import SchedulerMetrics

    found: dict[str, Statement] = {}
    times: list[float] = []
    cpu: list[float] = []
    server_cpu: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Database(SecretStr(url), limits=UNLIMITED) as database:
        scheduler = Scheduler(
            database,
            NoProducer(),
            Settings(data_dir=Path(folder), tasks={task: TaskSettings() for task in TASKS}),
            owner="benchmark",
            metrics=SchedulerMetrics(),
            message_retention=lambda: timedelta(days=7),
            schedule_id="benchmark",
        )
        database.check_revision()
        before = _rss()
        watch = _Watch(found)
        event.listen(Engine, "before_cursor_execute", watch.begins)
        event.listen(Engine, "after_cursor_execute", watch.ends)
        start = datetime.now(UTC)
        for number in range(num_runs + 1):
            watch.begin_run()
            server_before = watch.server_cpu_s()
            began, cpu_before = time.perf_counter(), time.process_time()
            scheduler.run_once(start + timedelta(seconds=number))
            times.append(time.perf_counter() - began)
            cpu.append(time.process_time() - cpu_before)
            server_cpu.append(watch.server_cpu_s() - server_before)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    run_s, cpu_s, server_cpu_s = (statistics.median(one[1:]) for one in (times, cpu, server_cpu))
    return Runs(list(found.values()), run_s, cpu_s, server_cpu_s, before, peak)


class _Watch:
    """Times every statement that SQLAlchemy sends."""

    def __init__(self, found: dict[str, Statement]) -> None:
        self._found = found
        self._began = self._cpu_before = 0.0
        self._number = -1
        self._connections: dict[int, Any] = {}

    def begin_run(self) -> None:
        self._number += 1
        for one in self._found.values():
            one.slowest_ms = 0.0

    def server_cpu_s(self) -> float:
        return sum(map(cpu_ms, self._connections.values())) / 1000

    def begins(self, connection: Any, *_: Any) -> None:
        self._cpu_before = cpu_ms(connection.connection.dbapi_connection)
        self._began = time.perf_counter()

    def ends(self, connection: Any, cursor: Any, sql: str, parameters: Any, context: Any, many: bool) -> None:
        ms = 1000 * (time.perf_counter() - self._began)
        driver = connection.connection.dbapi_connection
        self._connections[driver.info.backend_pid] = driver
        cpu = cpu_ms(driver) - self._cpu_before
        name = _sent_from()
        one = self._found.setdefault(name, Statement(name))
        for kept in (one.ms, one.cpu_ms, one.calls, one.rows):
            kept += [0] * (self._number + 1 - len(kept))
        one.ms[-1] += ms
        one.cpu_ms[-1] += cpu
        one.calls[-1] += 1
        one.rows[-1] += max(0, cursor.rowcount)
        one.slowest_ms = max(one.slowest_ms, cpu)


def _sent_from() -> str:
    """The method of alphaloop.store that sends: `traffic.streams`."""
    frame: Any = sys._getframe(2)
    inner = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("alphaloop.store.") and module != "alphaloop.store.database":
            inner = f"{module.rsplit('.', 1)[1]}.{frame.f_code.co_name}"
            if not frame.f_code.co_name.startswith(("_", "<")):
                return inner
        frame = frame.f_back
    return inner or "a connection"


def _rss() -> int:
    """Bytes of this process's memory now."""
    (line,) = (one for one in _STATUS.read_text(encoding="ascii").splitlines() if one.startswith("VmRSS"))
    return int(line.split()[1]) * 1024
