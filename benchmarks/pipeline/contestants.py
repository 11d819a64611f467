"""Who runs: our worker by number of slots, the Parallel Consumer by jobs at once, and two loops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from alphaloop.embedded.install import find_java
from alphaloop.settings.load import ENV_PREFIX, PLAIN_ENV
from benchmarks.contestants.process import Contestant as Process
from benchmarks.pipeline.our_worker import WorkerOrder
from benchmarks.pipeline.topics import NUM_PARTITIONS, Topics
from benchmarks.reporting import REPOSITORY

RESULTS: Final = "results"
RUN_S: Final = 1800.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Race:
    """What a contestant is given for one run."""

    topics: Topics
    task: str
    num_jobs: int
    database_url: str
    group_id: str
    log: Path

    @property
    def topic(self) -> str:
        """Where the jobs lie."""
        return f"jobs.{self.task}"


class Contestant(Protocol):
    """One entry of the tables. `outcomes` is the table with a row a job, if it writes one."""

    @property
    def name(self) -> str: ...
    @property
    def outcomes(self) -> str | None: ...
    @property
    def is_migrated(self) -> bool:
        """Whether it needs the worker's schema."""

    def run(self, race: Race) -> dict[str, Any]:
        """Do all jobs and end; what the contestant says itself. Raises RuntimeError when it fails."""


class OurWorker:
    """A worker process, stopped when all results are there."""

    outcomes = "jobs"
    is_migrated = True

    def __init__(self, num_slots: int) -> None:
        self.name = f"ours, {num_slots} slots"
        self.num_slots = num_slots

    def run(self, race: Race) -> dict[str, Any]:
        """Until the results topic has grown by the number of jobs."""
        begin = sum(race.topics.ends(RESULTS).values())
        with running_worker(race, self.num_slots) as worker:
            deadline = time.monotonic() + RUN_S
            while sum(race.topics.ends(RESULTS).values()) - begin < race.num_jobs:
                worker.check()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name}: not done within {RUN_S:.0f} s")
                time.sleep(_POLL_S)
            return worker.finish()


@contextmanager
def running_worker(race: Race, num_slots: int) -> Iterator[Process]:
    """The process of benchmarks/pipeline/our_worker.py, once it consumes; it drains when its input is ended."""
    process = Process("our worker", "benchmarks.pipeline.our_worker", log=race.log, environment=_plain_environment())
    order = WorkerOrder(
        bootstrap_servers=race.topics.servers,
        database_url=race.database_url,
        group_id=race.group_id,
        task=race.task,
        num_partitions=NUM_PARTITIONS,
        num_slots=num_slots,
    )
    try:
        process.request(order.model_dump())
        yield process
    finally:
        process.close()


class Loop:
    """Consume and produce; with a row a message where `is_recording`."""

    is_migrated = False

    def __init__(self, *, is_recording: bool) -> None:
        self.name = "naive insert-and-commit loop" if is_recording else "bare consume-produce loop"
        self.outcomes = "outcomes" if is_recording else None

    def run(self, race: Race) -> dict[str, Any]:
        """The program ends by itself."""
        words = [race.topics.servers, race.topic, RESULTS, str(race.num_jobs), race.group_id]
        command = [sys.executable, "-m", "benchmarks.pipeline.loops", *words]
        return _run(self.name, command, f"{race.database_url}\n" if self.outcomes else "\n", race.log)


def _plain_environment() -> dict[str, str]:
    """Ours without settings of alphaloop: they would win over those that the benchmark gives."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX) and name not in PLAIN_ENV
    }


def _run(name: str, command: Sequence[str], given: str, log: Path) -> dict[str, Any]:
    """Run a program to its end; the last line of its standard output."""
    with log.open("a") as errors:
        ended = subprocess.run(
            command,
            cwd=REPOSITORY,
            input=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=RUN_S,
            check=False,
        )
    if ended.returncode != 0 or not ended.stdout.strip():
        raise RuntimeError(f"{name} ended with {ended.returncode}; its words are in {log}")
    answer: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return answer


PROGRAM = "PCBench.java"


class MissingPeer(Exception):
    """The peer cannot be run here; the text says why."""


class ParallelConsumer:
    """Confluent's, with one committed row and one result a job: a program that is compiled when it is run."""

    outcomes = "outcomes"
    is_migrated = False

    def __init__(self, folder: Path, kafka_home: Path, num_at_once: int) -> None:
        """Raises MissingPeer, in words, when anything lacks."""
        self.name = f"parallel consumer, {num_at_once} at once"
        self._folder, self._kafka_home, self._num_at_once = folder.resolve(), kafka_home, num_at_once
        if not (self._folder / PROGRAM).is_file() or not any(self._folder.glob("libs/parallel-consumer-core-*.jar")):
            raise MissingPeer(f"expected {PROGRAM} and libs/parallel-consumer-core-*.jar in {self._folder}, found none")
        java = find_java()
        if java is None:
            raise MissingPeer("expected Java 17 or newer, found none (set JAVA_HOME)")
        modules = subprocess.run([java, "--list-modules"], capture_output=True, text=True, check=False).stdout
        if "jdk.compiler" not in modules:
            raise MissingPeer(f"expected a Java with a compiler, found a bare runtime at {java} (set JAVA_HOME)")
        self._java = java

    def run(self, race: Race) -> dict[str, Any]:
        """The program ends by itself."""
        classes = f"{self._folder / 'libs'}/*:{self._kafka_home / 'libs'}/*"
        numbers = (str(race.num_jobs), str(self._num_at_once))
        database = ("pg", jdbc_url(race.database_url))
        program = (str(self._folder / PROGRAM), race.topics.servers, race.topic, *numbers, *database)
        return _run(self.name, [str(self._java), "-Xmx1g", "-cp", classes, *program], "", race.log)


def jdbc_url(database_url: str) -> str:
    """`postgresql://user:password@host:port/name` as the JDBC driver wants it."""
    parts = urlsplit(database_url)
    return (
        f"jdbc:postgresql://{parts.hostname}:{parts.port}{parts.path}?user={parts.username}&password={parts.password}"
    )
