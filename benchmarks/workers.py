"""A worker process of a checkout, on an empty database and empty topics, and a client that sends it jobs.

The worker is known as a process: a command, its settings in the environment, the event that says it is ready, and its
metrics. The checkout may be an earlier commit's: that the process runs its code is proven.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict

from alphaloop.cli.children import LogFollower, field_of
from alphaloop.embedded.process import ChildProcess
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.offsets import TopicPartition
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from benchmarks.jobs import PromptJob
from benchmarks.reporting import git
from benchmarks.servers import PROFILE, Servers

_READY_EVENT: Final = "worker_ready"
_ADDRESS_FIELD: Final = "metrics"  #: of that event: where /metrics and /readyz are
_STEP_BATCH: Final = "alphaloop_step_batch_size"  #: histogram: sequences a step
_STEP_SECONDS: Final = "alphaloop_step_seconds"  #: histogram: time of a step
#: What the person who runs the benchmark has set must not reach the contestants.
_FOREIGN: Final = ("KAFKA_BOOTSTRAP_SERVERS", "DATABASE_URL")
_PACKAGES: Final = ("alphaloop", "worker")
_ASK: Final = "".join(f"import {name}; print({name}.__file__); " for name in _PACKAGES)
#: Loading a model, compiling kernels for the first time, calibrating on an unknown device.
_START_TIMEOUT_S: Final = 600.0
_MIGRATE_TIMEOUT_S: Final = 120.0
_ASK_TIMEOUT_S: Final = 10.0
_FLUSH_S: Final = 60.0
_GRACE_S: Final = 60.0
_POLL_S: Final = 0.2


@contextmanager
def worktree(repository: Path, commit: str, folder: Path) -> Iterator[Path]:
    """The commit's files in `folder`, a git worktree; removed afterwards, also when an earlier run left one there."""
    _remove(repository, folder)
    done = git(repository, "worktree", "add", "--force", "--detach", str(folder), commit)
    if done.returncode:
        raise RuntimeError(f"git worktree add failed: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        _remove(repository, folder)


def _remove(repository: Path, folder: Path) -> None:
    if folder.exists():
        git(repository, "worktree", "remove", "--force", str(folder))
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """It is ready for jobs."""

    client: Client
    address: str  #: where its metrics are
    database_url: str
    stop: Callable[[], None]  #: drain and end it
    restart: Callable[[], None]  #: drain, end and start it; its address is another one then


@contextmanager
def started_worker(
    checkout: Path,
    servers: Servers,
    tasks: Sequence[str],
    *,
    num_slots: int,
    seed: int,
    folder: Path,
    name: str,
    timeout_s: float,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[StartedWorker]:
    """Migrate, start and wait until it is ready; it ends with the block. `settings`: further environment.

    Raises StartFailed where the worker does not come up; the client raises RuntimeError where results are missing.
    """
    servers.renew_topics(tasks)
    with ExitStack() as stack:
        database_url = stack.enter_context(servers.fresh_database())
        environment = environment_of(
            checkout, servers, database_url=database_url, num_slots=num_slots, data_dir=folder / "data"
        ) | dict(settings)
        check_imports(checkout, environment)
        _migrate(environment, checkout)
        worker = ChildProcess(
            f"worker ({name})",
            _python("worker", "--configs", str(checkout / "configs"), "--profile", PROFILE, "--seed", str(seed)),
            log=folder / f"{name}.log",
            env=environment,
            grace_s=_GRACE_S,
        )
        log = LogFollower(worker.log)
        stack.callback(worker.stop)
        worker.start()
        worker.wait_until(lambda: log.find(_READY_EVENT) is not None, _START_TIMEOUT_S)
        address = field_of(log.find(_READY_EVENT) or "", _ADDRESS_FIELD) or ""
        worker.wait_until(lambda: _is_ready(address), _START_TIMEOUT_S)

        def check_alive() -> None:
            if not worker.is_running:
                raise worker.failed("ended by itself")

        def restart() -> None:
            worker.stop()
            worker.start()

        client = Client(servers.kafka, check_alive, timeout_s)
        stack.callback(client.close)
        yield StartedWorker(client, address, database_url, worker.stop, restart)


def environment_of(
    checkout: Path, servers: Servers, *, database_url: str, num_slots: int, data_dir: Path
) -> dict[str, str]:
    """The environment of the checkout's processes: its own code first, and these servers."""
    kept = {
        name: value for name, value in os.environ.items() if name not in _FOREIGN and not name.startswith("ALPHALOOP_")
    }
    return kept | {
        "PYTHONPATH": str(checkout),
        "KAFKA_BOOTSTRAP_SERVERS": servers.broker,
        "DATABASE_URL": database_url,
        "ALPHALOOP_KAFKA__GROUP_ID": f"benchmark-{uuid.uuid4().hex}",
        "ALPHALOOP_WORKER__BATCH_SIZE": str(num_slots),
        "ALPHALOOP_WORKER__HTTP_PORT": "0",
        "ALPHALOOP_LOGS__FORMAT": "json",
        "ALPHALOOP_DATA_DIR": str(data_dir),
    }


def check_imports(checkout: Path, environment: Mapping[str, str]) -> None:
    """Ask a process with that environment which files it imports. Raises RuntimeError where they are not `checkout`'s.

    An editable install of another checkout would win silently otherwise.
    """
    command = [sys.executable, "-P", "-c", _ASK]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=True, timeout=60)
    for found in done.stdout.split("\n")[: len(_PACKAGES)]:
        if not Path(found).resolve().is_relative_to(checkout.resolve()):
            raise RuntimeError(f"expected modules of {checkout}, the process imports {found}")


def _migrate(environment: Mapping[str, str], checkout: Path) -> None:
    # In the checkout, because that is whose settings the command reads.
    done = subprocess.run(
        _python("alphaloop.cli", "migrate"),
        cwd=checkout,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=_MIGRATE_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"the migration of the fresh database failed: {done.stderr.strip()[-1000:]}")


def _python(module: str, *arguments: str) -> list[str]:
    """How this interpreter runs a module of the checkout that PYTHONPATH names, whatever the current folder holds."""
    return [sys.executable, "-P", "-m", module, *arguments]


def _is_ready(address: str) -> bool:
    """Whether the worker consumes: /readyz answers 200 once partitions are assigned."""
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=_ASK_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Usage(_Part):
    completion_tokens: int = 0


class _Timings(_Part):
    wall_s: float


class _Decoding(_Part):
    drafter: str | None = None
    num_draft_tokens: int = 0
    reason: str = ""


class JobResult(_Part):
    """What is read of a message on `results`; another commit's worker may write more."""

    job_id: str
    task: str = ""
    status: str
    text: str | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    decoding: _Decoding | None = None

    @property
    def num_tokens(self) -> int:
        """Completion tokens, as reported."""
        return self.usage.completion_tokens if self.usage else 0

    @property
    def drafter(self) -> str | None:
        """What drafted where it was decoded."""
        return self.decoding.drafter if self.decoding else None

    @property
    def decided(self) -> tuple[str, int] | None:
        """Drafter and k; None for vanilla."""
        if self.decoding is None or self.decoding.drafter is None or self.decoding.num_draft_tokens == 0:
            return None
        return self.decoding.drafter, self.decoding.num_draft_tokens


@dataclass(frozen=True, slots=True)
class Sent:
    """Jobs that were sent together, and what came of them."""

    seconds: float  #: from the first job sent to the last result read
    results: tuple[JobResult, ...]
    latencies_s: tuple[float, ...]  #: of each result, from sending its job to reading it

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all."""
        return sum(result.num_tokens for result in self.results)

    @property
    def beside_s(self) -> tuple[float, ...]:
        """By job, the time that was not spent in its request: Kafka both ways, claim, record, decision."""
        return tuple(
            latency - result.timings.wall_s
            for latency, result in zip(self.latencies_s, self.results, strict=True)
            if result.timings is not None
        )


class Client:
    """A producer of jobs and a reader of results, on one thread."""

    def __init__(self, kafka: KafkaSettings, check_alive: Callable[[], None], timeout_s: float) -> None:
        self._kafka = kafka
        self._producer = Producer(kafka, client_id="benchmark-producer")
        self._consumer = Consumer(kafka, group_id=f"benchmark-{uuid.uuid4().hex}", client_id="benchmark-reader")
        self._consumer.assign_from([RESULTS], at="latest")
        self._check_alive, self._timeout_s = check_alive, timeout_s
        self.results: dict[str, JobResult] = {}  #: by job_id, the first of each
        self.num_results: Counter[str] = Counter()  #: messages on `results` so far, by job_id
        #: Jobs with two different results. The same one may come again: a worker that restarts publishes it anew.
        self.contradicted: set[str] = set()
        self._first: dict[str, bytes] = {}

    def send_all(self, jobs: Sequence[PromptJob], *, decoding: str = "auto") -> None:
        """Send without waiting for results."""
        for job in jobs:
            self._send(job, decoding)
        self._producer.flush(_FLUSH_S)

    def wait(self, jobs: Sequence[PromptJob], *, num_left: int = 0) -> None:
        """Until no more than `num_left` results are missing. Raises RuntimeError where none comes for the time-out."""
        names = {job.job_id for job in jobs}
        if not self.read(lambda: len(names - self.results.keys()) <= num_left):
            missing = sorted(names - self.results.keys())
            raise RuntimeError(f"no result for {self._timeout_s:g} s; missing {len(missing)}: {', '.join(missing[:5])}")

    def read(self, is_enough: Callable[[], bool]) -> bool:
        """Read results until it is enough. Returns False where none has come for the time-out."""
        last = time.monotonic()
        while not is_enough():
            if self._next() is not None:
                last = time.monotonic()
                continue
            self._check_alive()
            if time.monotonic() - last > self._timeout_s:
                return False
        return True

    def play(self, jobs: Sequence[PromptJob], *, decoding: str, load: int) -> Sent:
        """Send all, `load` at a time. Raises RuntimeError where a job has no result in time, or did not succeed."""
        waiting = deque(jobs)
        sent_at: dict[str, float] = {}
        results: list[JobResult] = []
        latencies: list[float] = []
        began = last = time.monotonic()
        while len(results) < len(jobs):
            num_new = min(len(waiting), load - (len(sent_at) - len(results)))
            for job in [waiting.popleft() for _ in range(num_new)]:
                sent_at[job.job_id] = time.monotonic()
                self._send(job, decoding)
            if num_new:
                # A client that waits for jobs does not let them linger for others.
                self._producer.serve(_POLL_S)
            result = self._next()
            now = time.monotonic()
            if result is None or result.job_id not in sent_at or self.num_results[result.job_id] > 1:
                self._check_alive()
                if now - last > self._timeout_s:
                    missing = sorted(sent_at.keys() - {one.job_id for one in results})
                    raise RuntimeError(f"no result for {self._timeout_s:g} s; missing: {', '.join(missing[:5])}")
                continue
            if result.status != "succeeded":
                raise RuntimeError(f"{result.job_id}: expected a result, found that it {result.status}")
            last = now
            results.append(result)
            latencies.append(now - sent_at[result.job_id])
        return Sent(last - began, tuple(results), tuple(latencies))

    def read_to_the_end(self) -> None:
        """Every message that lies on `results` now; the worker may have ended. Nothing was there before this client."""
        partitions = range(self._kafka.num_partitions)
        ends = [self._consumer.bounds([RESULTS])[TopicPartition(RESULTS, number)] for number in partitions]
        num_kept = sum(end - begin for begin, end in ends)
        while self.num_results.total() < num_kept:
            self._next()

    def close(self) -> None:
        """Let go of the broker."""
        self._consumer.close()
        self._producer.close()

    def _send(self, job: PromptJob, decoding: str) -> None:
        self._producer.send(jobs_topic(job.task), key=job.job_id.encode(), value=job.encoded(decoding=decoding))

    def _next(self) -> JobResult | None:
        record = self._consumer.poll(_POLL_S)
        if record is None:
            self._producer.poll(0)
            return None
        result = JobResult.model_validate_json(record.value or b"{}")
        self.num_results[result.job_id] += 1
        self.results.setdefault(result.job_id, result)
        if self._first.setdefault(result.job_id, record.value or b"") != record.value:
            self.contradicted.add(result.job_id)
        return result


@dataclass(frozen=True, slots=True)
class StepSums:
    """Steps of the engine since the worker started."""

    num_steps: int
    num_sequence_steps: int  #: sequences of all steps, added up
    step_s: float

    def since(self, before: StepSums) -> StepSums:
        """What came after `before`."""
        return StepSums(
            self.num_steps - before.num_steps,
            self.num_sequence_steps - before.num_sequence_steps,
            self.step_s - before.step_s,
        )

    def occupied(self, num_slots: int) -> float | None:
        """Mean share of the slots that held a sequence in a step; None without steps."""
        return self.num_sequence_steps / (self.num_steps * num_slots) if self.num_steps else None


def read_step_sums(address: str) -> StepSums:
    """Ask the worker at `http://host:port`. Raises OSError where it does not answer."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=_ASK_TIMEOUT_S) as answer:
        return parse_step_sums(answer.read().decode())


def parse_step_sums(exposition: str) -> StepSums:
    """From Prometheus' text format. Raises ValueError that names a histogram which is not there."""
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if not sample.labels
    }
    try:
        return StepSums(
            int(samples[f"{_STEP_BATCH}_count"]), int(samples[f"{_STEP_BATCH}_sum"]), samples[f"{_STEP_SECONDS}_sum"]
        )
    except KeyError as missing:
        raise ValueError(f"the worker's metrics have no {missing.args[0]}") from None
