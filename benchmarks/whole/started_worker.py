"""A worker process of a checkout, on an empty database and empty topics, and a client that sends it jobs."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from alphaloop.cli.children import LogFollower, field_of
from alphaloop.embedded.process import ChildProcess
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from benchmarks.whole.checkout import check_imports
from benchmarks.whole.jobs import PromptJob
from benchmarks.whole.metrics import StepSums, is_ready
from benchmarks.whole.product import (
    ADDRESS_FIELD,
    READY_EVENT,
    environment_of,
    migrate_command,
    worker_command,
)
from benchmarks.whole.servers import Servers

#: Loading a model, compiling kernels for the first time, calibrating on an unknown device.
_START_TIMEOUT_S: Final = 600.0
_MIGRATE_TIMEOUT_S: Final = 120.0
_FLUSH_S: Final = 60.0
_GRACE_S: Final = 60.0
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """It is ready for jobs."""

    client: Client
    address: str  #: where its metrics are
    database_url: str
    environment: Mapping[str, str]  #: for other commands of the same checkout on the same servers
    stop: Callable[[], None]  #: drain and end it
    check_alive: Callable[[], None]  #: raises StartFailed where it has ended by itself
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
            checkout,
            broker=servers.broker,
            database_url=database_url,
            group=f"whole-{uuid.uuid4().hex}",
            num_slots=num_slots,
            data_dir=folder / "data",
        ) | dict(settings)
        check_imports(checkout, environment)
        _migrate(environment, checkout)
        worker = ChildProcess(
            f"worker ({name})",
            worker_command(checkout, seed=seed),
            log=folder / f"{name}.log",
            env=environment,
            grace_s=_GRACE_S,
        )
        log = LogFollower(worker.log)
        stack.callback(worker.stop)
        worker.start()
        worker.wait_until(lambda: log.find(READY_EVENT) is not None, _START_TIMEOUT_S)
        address = field_of(log.find(READY_EVENT) or "", ADDRESS_FIELD) or ""
        worker.wait_until(lambda: is_ready(address), _START_TIMEOUT_S)
        client = Client(servers.kafka, lambda: _check_alive(worker), timeout_s)
        stack.callback(client.close)

        def restart() -> None:
            worker.stop()
            worker.start()

        yield StartedWorker(
            client, address, database_url, environment, worker.stop, lambda: _check_alive(worker), restart
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """Jobs that were sent together and answered."""

    seconds: float  #: from the first one sent to the last result read
    under_backlog: StepSums  #: what `on_left` gave
    backlog_s: float  #: how long that was


class Client:
    """A producer of jobs and a reader of results. Results carry their job_id as key."""

    def __init__(self, kafka: KafkaSettings, check_alive: Callable[[], None], timeout_s: float) -> None:
        self._producer = Producer(kafka, client_id="whole-producer")
        self._consumer = Consumer(kafka, group_id=f"whole-reader-{uuid.uuid4().hex}", client_id="whole-reader")
        self._consumer.assign_from([RESULTS], at="latest")
        self._check_alive = check_alive
        self._timeout_s = timeout_s

    def send_and_wait(
        self,
        jobs: Sequence[PromptJob],
        *,
        decoding: str = "auto",
        num_left: int = 0,
        on_left: Callable[[], StepSums] = lambda: StepSums(0, 0, 0.0),
    ) -> Timed:
        """Send all jobs at once and wait for their results. `on_left` is asked once only `num_left` are missing."""
        messages = [(jobs_topic(job.task), job.job_id.encode(), job.encoded(decoding=decoding)) for job in jobs]
        waiting = {key for _, key, _ in messages}
        began = time.monotonic()
        for topic, key, value in messages:
            self._producer.send(topic, key=key, value=value)
        self._producer.flush(_FLUSH_S)
        self._wait(waiting, num_left, began + self._timeout_s)
        backlog_s = time.monotonic() - began
        sums = on_left()
        self._wait(waiting, 0, began + self._timeout_s)
        return Timed(time.monotonic() - began, sums, backlog_s)

    def _wait(self, waiting: set[bytes], num_left: int, deadline: float) -> None:
        while len(waiting) > num_left:
            record = self._consumer.poll(_POLL_S)
            if record is not None:
                waiting.discard(record.key or b"")
                continue
            self._check_alive()
            if time.monotonic() > deadline:
                names = ", ".join(sorted(key.decode() for key in waiting)[:5])
                raise RuntimeError(f"no result of {len(waiting)} jobs within {self._timeout_s:g} s, among them {names}")

    def close(self) -> None:
        """Let go of the broker."""
        self._consumer.close()
        self._producer.close()


def _migrate(environment: Mapping[str, str], checkout: Path) -> None:
    # In the checkout, because that is whose settings the command reads.
    done = subprocess.run(
        migrate_command(),
        cwd=checkout,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=_MIGRATE_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"the migration of the fresh database failed: {done.stderr.strip()[-1000:]}")


def _check_alive(worker: ChildProcess) -> None:
    if not worker.is_running:
        raise worker.failed("ended by itself")
