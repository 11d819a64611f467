"""A real Kafka and a durable PostgreSQL: fresh topics and a fresh database for each run; cores, and what is used.

Processor time, unlike the clock, hardly depends on what else runs on the machine.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
from confluent_kafka.admin import AdminClient
from psycopg import sql
from pydantic import SecretStr

from alphaloop.embedded.install import find_kafka_home
from alphaloop.embedded.process import ChildProcess
from alphaloop.embedded.servers import EmbeddedKafka, EmbeddedPostgres
from alphaloop.errors import StartFailed
from alphaloop.kafka.client import client_config
from alphaloop.kafka.topics import ensure_topics, list_topics
from alphaloop.settings import KafkaSettings, load_settings
from alphaloop.store.schema import upgrade
from benchmarks.reporting import REPOSITORY

CONFIGS: Final = REPOSITORY / "configs"
#: As `alphaloop up` starts everything on one machine.
PROFILE: Final = "local"
_HEAP_MB: Final = 768  #: of the broker
_DELETE_TIMEOUT_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.1
_DURABLE: Final = ("fsync", "synchronous_commit", "full_page_writes")
_IDLE: Final = 0.1  #: of a core
_IDLE_LOOK_S: Final = 0.5
_IDLE_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Servers:
    """Both servers run. `kafka` has the number of partitions of the profile that the workers run with."""

    kafka: KafkaSettings
    database_url: str
    kafka_home: Path
    kafka_pid: int | None = None
    postgres_pid: int | None = None

    @property
    def broker(self) -> str:
        """HOST:PORT."""
        return str(self.kafka.bootstrap_servers)

    def renew_topics(self, tasks: Sequence[str]) -> None:
        """Delete every topic of the run before, offsets of groups with them, and create those of these tasks."""
        self.delete_topics([name for name in list_topics(self.kafka) if not name.startswith("__")])
        ensure_topics(self.kafka, tasks)

    def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics, and wait until no client sees them any more. Raises StartFailed where that takes long."""
        if names:
            admin = AdminClient(client_config(self.kafka))
            for answer in admin.delete_topics(list(names), request_timeout=_DELETE_TIMEOUT_S).values():
                answer.result()
        deadline = time.monotonic() + _DELETE_TIMEOUT_S
        while set(names) & set(list_topics(self.kafka)):
            if time.monotonic() > deadline:
                raise StartFailed(f"the broker did not delete its topics within {_DELETE_TIMEOUT_S:g} s")
            time.sleep(_LOOK_EVERY_S)

    @contextmanager
    def fresh_database(self, *, is_migrated: bool = False) -> Iterator[str]:
        """The URL of an empty database, with the schema of this checkout if asked for; dropped afterwards."""
        name = f"run_{uuid.uuid4().hex}"
        url = f"{self.database_url.rsplit('/', 1)[0]}/{name}"
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            if is_migrated:
                upgrade(SecretStr(url))
            # Every contestant begins after a checkpoint: none pays for what another wrote.
            connection.execute("CHECKPOINT")
        try:
            yield url
        finally:
            with psycopg.connect(self.database_url, autocommit=True) as connection:
                connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def durability(self) -> dict[str, str]:
        """The settings that make a commit durable. Raises StartFailed where one is off: no figure would count."""
        with psycopg.connect(self.database_url) as connection:
            names = (*_DURABLE, "server_version", "wal_sync_method")
            found = {name: str(connection.execute(f"SHOW {name}").fetchone()[0]) for name in names}  # type: ignore[index]
        for name in _DURABLE:
            if found[name] != "on":
                raise StartFailed(f"expected {name} = on, found {found[name]}")
        return found

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds used so far by the broker and by the database; empty where /proc does not tell."""
        pids = {"kafka": self.kafka_pid, "postgres": self.postgres_pid}
        return {name: cpu_seconds(pid) for name, pid in pids.items() if pid is not None and Path("/proc/stat").exists()}


@contextmanager
def running_servers(folder: Path) -> Iterator[Servers]:
    """Start both under `folder`, which should lie on a real disk: commits are forced to it.

    Raises StartFailed where there is no Apache Kafka, or a server does not come up.
    """
    settings = load_settings(CONFIGS, profile=PROFILE)
    home = find_kafka_home(settings)
    if home is None:
        raise StartFailed("expected an Apache Kafka, found none", hint="`alphaloop kafka install` fetches one")
    with ExitStack() as stack:
        postgres = EmbeddedPostgres(folder / "postgres", log_dir=folder / "logs", durable=True)
        stack.callback(postgres.stop)
        url = postgres.start()
        broker = EmbeddedKafka(home, folder / "kafka", log_dir=folder / "logs", heap_mb=_HEAP_MB)
        stack.callback(broker.stop)
        kafka = settings.kafka.model_copy(update={"bootstrap_servers": broker.start()})
        yield Servers(kafka, url, home, broker.pid, postgres.pid)


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Processes and threads that this thread starts in the block run on these cores; without any, wherever they may."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def split_cores(servers: Collection[int]) -> tuple[set[int], set[int]]:
    """The servers' cores and all others; without any for the servers alone, all for both.

    Raises ValueError where this process does not have those cores, or would have no other.
    """
    own = os.sched_getaffinity(0)
    if not servers:
        return own, own
    wanted = set(servers)
    if not wanted < own:
        raise ValueError(
            f"--server-cores: expected some of the cores {sorted(own)} and not all, found {sorted(wanted)}"
        )
    return wanted, own - wanted


def cpu_seconds(pid: int) -> float:
    """Processor seconds of the process, its living descendants and the children that they waited for.

    An ended process counts nothing.
    """
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name may hold spaces and brackets: what counts stands after the last bracket.
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        # utime, stime, cutime and cstime are the 12th to 15th behind the name (proc(5)).
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    waiting, total = [pid], 0.0
    while waiting:
        one = waiting.pop()
        total += seconds.get(one, 0.0)
        waiting += children.get(one, [])
    return total


def wait_until_idle(processes: Collection[ChildProcess]) -> None:
    """Until they and all below them take less than a tenth of a core. Raises TimeoutError after a minute."""
    pids = [process.pid for process in processes if process.pid is not None]
    began, before = time.monotonic(), sum(map(cpu_seconds, pids))
    while True:
        time.sleep(_IDLE_LOOK_S)
        now = sum(map(cpu_seconds, pids))
        if now - before < _IDLE * _IDLE_LOOK_S:
            return
        if time.monotonic() - began > _IDLE_PATIENCE_S:
            raise TimeoutError(f"an inference server without requests is still busy after {_IDLE_PATIENCE_S:g} s")
        before = now
