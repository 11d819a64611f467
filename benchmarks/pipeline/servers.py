"""The broker and the database of one run, made anew under one folder, and what they use of the processor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql
from pydantic import SecretStr

from alphaloop.embedded.brokers import EmbeddedKafka
from alphaloop.embedded.postgres import EmbeddedPostgres
from alphaloop.store.schema import upgrade

_MIGRATED: Final = "migrated"


class NotDurable(RuntimeError):
    """The database does not force its commits to disk, so nothing that is measured on it counts."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Where they are."""

    kafka: str  #: HOST:PORT
    postgres_url: str
    kafka_pid: int | None
    postgres_pid: int | None

    def database(self, name: str, *, is_migrated: bool) -> str:
        """Make an empty database, with the worker's schema if asked for, and return its URL."""
        template = _MIGRATED if is_migrated else "template1"
        with psycopg.connect(self.postgres_url, autocommit=True) as connection:
            create = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
            connection.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
            # Every contestant begins behind a checkpoint: nobody pays for what another wrote.
            connection.execute("CHECKPOINT")
        return self._url(name)

    def drop(self, name: str) -> None:
        """Drop a database, whoever is still connected."""
        with psycopg.connect(self.postgres_url, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def migrate(self) -> None:
        """Make the database that is copied for the worker."""
        self.database(_MIGRATED, is_migrated=False)
        upgrade(SecretStr(self._url(_MIGRATED)))

    def durability(self) -> dict[str, str]:
        """The settings that make a commit durable; raises NotDurable when one is off."""
        with psycopg.connect(self.postgres_url) as connection:
            names = ("fsync", "synchronous_commit", "full_page_writes", "server_version", "wal_sync_method")
            found = {name: str(connection.execute(f"SHOW {name}").fetchone()[0]) for name in names}  # type: ignore[index]
        for name in ("fsync", "synchronous_commit", "full_page_writes"):
            if found[name] != "on":
                raise NotDurable(f"expected {name} = on, found {found[name]}")
        return found

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds used so far by the broker and by the database; empty where /proc does not tell."""
        pids = {"kafka": self.kafka_pid, "postgres": self.postgres_pid}
        return {name: _tree_cpu_s(pid) for name, pid in pids.items() if pid is not None and Path("/proc/stat").exists()}

    def _url(self, name: str) -> str:
        return f"{self.postgres_url.rsplit('/', 1)[0]}/{name}"


@contextmanager
def running_servers(kafka_home: Path, folder: Path) -> Iterator[Servers]:
    """Start both in `folder`, which is removed at the end."""
    broker = EmbeddedKafka(kafka_home, folder / "kafka", heap_mb=768)
    database = EmbeddedPostgres(folder / "postgres", durable=True)
    try:
        address, url = broker.start(), database.start()
        servers = Servers(address, url, broker.pid, database.pid)
        servers.migrate()
        yield servers
    finally:
        broker.stop()
        database.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _tree_cpu_s(pid: int) -> float:
    """A process, its children that ended, and those that run."""
    total_s, ticks = 0.0, os.sysconf("SC_CLK_TCK")
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, fields = int(file.parent.name), file.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        # Behind the name: state, parent's id, … ; utime, stime, cutime and cstime are the 12th to 15th (proc(5)).
        if number == pid:
            total_s += sum(map(int, fields[11:15])) / ticks
        elif int(fields[1]) == pid:
            total_s += sum(map(int, fields[11:13])) / ticks
    return total_s
