"""Confluent's Parallel Consumer as a contestant: a program of its own folder, compiled when it is run."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from alphaloop.embedded.install import find_java

PROGRAM = "PCBench.java"


class MissingPeer(Exception):
    """The peer cannot be run here; the text says why."""


@dataclass(frozen=True, slots=True)
class ParallelConsumer:
    """Where its program, its jars and a Java with a compiler are."""

    java: Path
    folder: Path
    kafka_home: Path

    @classmethod
    def find(cls, folder: Path, kafka_home: Path) -> ParallelConsumer:
        """Raises MissingPeer, in words, when anything lacks."""
        folder = folder.resolve()
        if not (folder / PROGRAM).is_file() or not any(folder.glob("libs/parallel-consumer-core-*.jar")):
            raise MissingPeer(f"expected {PROGRAM} and libs/parallel-consumer-core-*.jar in {folder}, found none")
        java = find_java()
        if java is None:
            raise MissingPeer("expected Java 17 or newer, found none (set JAVA_HOME)")
        modules = subprocess.run([java, "--list-modules"], capture_output=True, text=True, check=False).stdout
        if "jdk.compiler" not in modules:
            raise MissingPeer(f"expected a Java with a compiler, found a bare runtime at {java} (set JAVA_HOME)")
        return cls(java, folder, kafka_home)

    def command(self, servers: str, topic: str, num_jobs: int, num_at_once: int, database_url: str) -> list[str]:
        """A run with one committed row and one result a job."""
        classes = f"{self.folder / 'libs'}/*:{self.kafka_home / 'libs'}/*"
        return [
            str(self.java),
            "-Xmx1g",
            "-cp",
            classes,
            str(self.folder / PROGRAM),
            servers,
            topic,
            str(num_jobs),
            str(num_at_once),
            "pg",
            jdbc_url(database_url),
        ]


def jdbc_url(database_url: str) -> str:
    """`postgresql://user:password@host:port/name` as the JDBC driver wants it."""
    parts = urlsplit(database_url)
    return (
        f"jdbc:postgresql://{parts.hostname}:{parts.port}{parts.path}?user={parts.username}&password={parts.password}"
    )
