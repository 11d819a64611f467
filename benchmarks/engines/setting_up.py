"""All that the benchmark runs: two inference servers, Kafka, PostgreSQL, and one worker in front."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psycopg

from alphaloop.embedded.process import ChildProcess, free_ports
from benchmarks.contestants.process import REPOSITORY
from benchmarks.engines.closed_loop import ClosedLoop
from benchmarks.engines.serve import NGRAM, draft_model
from benchmarks.engines.server import Server, running, vllm
from benchmarks.whole.servers import running_servers
from benchmarks.whole.started_worker import started_worker

FOLDER: Final = REPOSITORY / ".alphaloop" / "benchmarks" / "engines"
PLAIN, DRAFTING = "plain", "drafting"
#: Settings of a worker whose costs do not matter: they are measured as shortly as possible.
SHORT_CALIBRATION: Final = {"CALIBRATION_SAMPLES": "1", "CALIBRATION_BUDGET_S": "0"}
_ALPHA: Final = """
    SELECT task, sum(num_jobs)::int, sum(alpha * num_jobs) / sum(num_jobs) FROM task_alpha_now
    WHERE purpose = 'traffic' AND alpha IS NOT NULL GROUP BY task ORDER BY task
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be set up."""

    vllm_python: str
    model: str
    draft: str | None  #: folder of a draft model; None: look-up
    dtype: str
    requests: int  #: that each server decodes at once
    ahead: int
    cores: tuple[int, ...]  #: of the inference servers
    timeout_s: float
    seed: int
    endpoint: Mapping[str, str] = field(default_factory=dict)  #: further settings of both endpoints
    worker: Mapping[str, str] = field(default_factory=dict)  #: further settings of the worker
    num_threads: int = 1  #: of each inference server


@dataclass(frozen=True, slots=True)
class Running:
    """It runs."""

    plain: Server
    drafting: Server
    processes: Mapping[str, ChildProcess]  #: of the inference servers, by name
    loop: ClosedLoop
    database_url: str
    restart_worker: Callable[[], None]  #: drain, end, start; does not wait until it is ready

    def alpha_by_task(self) -> dict[str, dict[str, float]]:
        """Jobs that were drafted for and their pooled acceptance rate, as Postgres has it."""
        with psycopg.connect(self.database_url) as connection:
            found = connection.execute(_ALPHA).fetchall()
        return {task: {"num_jobs": num_jobs, "alpha": round(alpha, 4)} for task, num_jobs, alpha in found}


def two_servers(wanted: Wanted) -> tuple[Server, Server]:
    """The same model without and with drafts."""
    ports = free_ports(2)
    speculative = draft_model(wanted.draft) if wanted.draft else NGRAM
    plain, drafting = (
        vllm(
            name,
            wanted.vllm_python,
            wanted.model,
            port,
            speculative=given,
            dtype=wanted.dtype,
            max_requests=wanted.requests,
            num_threads=wanted.num_threads,
        )
        for name, port, given in ((PLAIN, ports[0], None), (DRAFTING, ports[1], speculative))
    )
    return plain, drafting


@contextmanager
def set_up(wanted: Wanted, tasks: Sequence[str], folder: Path) -> Iterator[Running]:
    """Start everything; it ends with the block. `folder` is emptied first. Raises StartFailed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plain, drafting = two_servers(wanted)
    with ExitStack() as stack:
        started = stack.enter_context(running([plain, drafting], folder, wanted.cores))
        processes = {process.name: process for process in started}
        servers = stack.enter_context(running_servers(folder, REPOSITORY / "configs"))
        settings = {"ALPHALOOP_MODELS__TARGET__ENGINE": "server", "ALPHALOOP_MODELS__TARGET__NAME": "model"}
        settings |= {f"ALPHALOOP_WORKER__{name}": value for name, value in wanted.worker.items()}
        for one in (plain, drafting):
            settings |= one.settings(ahead=wanted.ahead, more=wanted.endpoint)
        worker = stack.enter_context(
            started_worker(
                REPOSITORY,
                servers,
                tasks,
                num_slots=wanted.requests,
                seed=wanted.seed,
                folder=folder,
                name="worker",
                timeout_s=wanted.timeout_s,
                settings=settings,
            )
        )
        loop = ClosedLoop(servers.kafka, worker.check_alive, wanted.timeout_s)
        stack.callback(loop.close)
        yield Running(plain, drafting, processes, loop, worker.database_url, worker.restart)


@contextmanager
def environment(given: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started in the block inherit these."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
