"""Who runs: our worker by number of slots, the Parallel Consumer by jobs at once, and two loops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from alphaloop.settings.load import ENV_PREFIX, PLAIN_ENV
from benchmarks.pipeline.our_worker import WorkerOrder
from benchmarks.pipeline.parallel_consumer import ParallelConsumer
from benchmarks.pipeline.topics import NUM_PARTITIONS, Topics

REPOSITORY: Final = Path(__file__).resolve().parents[2]
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
    """A worker process, told to stop when so many results are there."""

    outcomes = "jobs"
    is_migrated = True

    def __init__(self, num_slots: int, *, is_sampled: bool = False) -> None:
        self.name = f"ours, {num_slots} slots" + (", sampled" if is_sampled else "")
        self.num_slots = num_slots
        self._is_sampled = is_sampled

    def run(self, race: Race) -> dict[str, Any]:
        """Until the results topic has grown by the number of jobs."""
        begin = sum(race.topics.ends(RESULTS).values())
        with RunningWorker(race, self.num_slots, is_sampled=self._is_sampled) as worker:
            deadline = time.monotonic() + RUN_S
            while sum(race.topics.ends(RESULTS).values()) - begin < race.num_jobs:
                worker.check()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name}: not done within {RUN_S:.0f} s")
                time.sleep(_POLL_S)
            return worker.finish()


class RunningWorker:
    """The process of benchmarks/pipeline/our_worker.py; entered when it consumes."""

    def __init__(self, race: Race, num_slots: int, *, is_sampled: bool = False) -> None:
        self._log = race.log
        self._order = WorkerOrder(
            bootstrap_servers=race.topics.servers,
            database_url=race.database_url,
            group_id=race.group_id,
            task=race.task,
            num_partitions=NUM_PARTITIONS,
            num_slots=num_slots,
            num_jobs=race.num_jobs,
            is_sampled=is_sampled,
        )

    def __enter__(self) -> RunningWorker:
        command = [sys.executable, "-m", "benchmarks.pipeline.our_worker"]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=_plain_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(self._order.model_dump_json() + "\n")
        self._process.stdin.flush()
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def check(self) -> None:
        """Raises RuntimeError when the process has ended by itself."""
        if self._process.poll() is not None:
            raise RuntimeError(f"our worker ended with {self._process.returncode}; its words are in {self._log}")

    def finish(self) -> dict[str, Any]:
        """Let it drain and end; its report."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        report = self._answer()
        self._process.wait(RUN_S)
        return report

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"our worker ended with {self._process.wait()}; its words are in {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class ParallelConsumerPeer:
    """One row and one result a job, so many jobs at once."""

    outcomes = "outcomes"
    is_migrated = False

    def __init__(self, peer: ParallelConsumer, num_at_once: int) -> None:
        self.name = f"parallel consumer, {num_at_once} at once"
        self._peer = peer
        self._num_at_once = num_at_once

    def run(self, race: Race) -> dict[str, Any]:
        """The program ends by itself."""
        command = self._peer.command(
            race.topics.servers, race.topic, race.num_jobs, self._num_at_once, race.database_url
        )
        return _run(self.name, command, "", race.log)


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
