"""All that the benchmark runs: two inference servers, Kafka, PostgreSQL, and one worker in front."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import psycopg

from alphaloop.embedded.process import ChildProcess, free_ports
from benchmarks.engines.serve import NGRAM, Server, dense_folder, draft_model, running, vllm
from benchmarks.jobs import prompts_of
from benchmarks.reporting import REPOSITORY, checkout, machine
from benchmarks.servers import running_servers
from benchmarks.workers import Client, started_worker

PLAIN, DRAFTING = "plain", "drafting"
#: Settings of a worker whose costs do not matter: they are measured as shortly as possible.
SHORT_CALIBRATION: Final = {"CALIBRATION_BUDGET_S": "0"}
_ALPHA: Final = """
    SELECT task, sum(num_jobs)::int, sum(alpha * num_jobs) / sum(num_jobs) FROM task_alpha_now
    WHERE purpose = 'traffic' AND alpha IS NOT NULL GROUP BY task ORDER BY task
"""


@dataclass(frozen=True, slots=True)
class Running:
    """It runs."""

    plain: Server
    drafting: Server
    processes: Mapping[str, ChildProcess]  #: of the inference servers, by name
    client: Client
    database_url: str
    restart_worker: Callable[[], None]  #: drain, end, start; does not wait until it is ready

    def alpha_by_task(self) -> dict[str, dict[str, float]]:
        """Jobs that were drafted for and their pooled acceptance rate, as Postgres has it."""
        with psycopg.connect(self.database_url) as connection:
            found = connection.execute(_ALPHA).fetchall()
        return {task: {"num_jobs": num_jobs, "alpha": round(alpha, 4)} for task, num_jobs, alpha in found}


def two_servers(options: argparse.Namespace, *, dtype: str, num_requests: int) -> tuple[Server, Server]:
    """The same model without and with drafts: look-up, or the draft model of the options."""
    model = options.model or str(dense_folder(dtype))
    speculative = draft_model(options.draft) if options.draft else NGRAM
    plain, drafting = (
        vllm(
            name,
            str(options.vllm_python),
            model,
            port,
            speculative=given,
            dtype=dtype,
            max_requests=num_requests,
            num_threads=options.threads,
        )
        for name, port, given in zip((PLAIN, DRAFTING), free_ports(2), (None, speculative), strict=True)
    )
    return plain, drafting


@contextmanager
def set_up(
    options: argparse.Namespace,
    tasks: Sequence[str],
    folder: Path,
    *,
    dtype: str = "bfloat16",
    num_requests: int = 8,
    ahead: int = 2,
    endpoint: Mapping[str, str] = MappingProxyType({}),
    worker: Mapping[str, str] = SHORT_CALIBRATION,
) -> Iterator[Running]:
    """Start everything; it ends with the block. `folder` is emptied first. Raises StartFailed.

    `options` are those of `add_vllm`, `add_pair` and `add_run`. Each server decodes `num_requests` at once, and `ahead`
    requests may wait in its queue; `endpoint` and `worker` are further settings of both endpoints and of the worker.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plain, drafting = two_servers(options, dtype=dtype, num_requests=num_requests)
    with ExitStack() as stack:
        children = stack.enter_context(running([plain, drafting], folder, options.cores))
        processes = {process.name: process for process in children}
        servers = stack.enter_context(running_servers(folder))
        settings = {"ALPHALOOP_MODELS__TARGET__ENGINE": "server", "ALPHALOOP_MODELS__TARGET__NAME": "model"}
        settings |= {f"ALPHALOOP_WORKER__{name}": value for name, value in worker.items()}
        for one in (plain, drafting):
            settings |= one.settings(ahead=ahead, more=endpoint)
        started = stack.enter_context(
            started_worker(
                REPOSITORY,
                servers,
                tasks,
                num_slots=num_requests,
                seed=options.seed,
                folder=folder,
                name="worker",
                timeout_s=options.timeout_s,
                settings=settings,
            )
        )
        yield Running(plain, drafting, processes, started.client, started.database_url, started.restart)


def conditions_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a run over such servers is stated with, whatever is measured."""
    return {
        **machine(),
        **checkout(),
        "cores_of_the_servers": options.cores or "all",
        "servers": f"vLLM 0.32 CPU, eager, one process and {options.threads} thread(s) each, no prefix cache",
        "model": Path(options.model).name if options.model else "SmolLM2",
        "dtype": options.dtype,
        "max_tokens": options.max_tokens,
        **({"history": options.history} if hasattr(options, "history") else {}),
        "seed": options.seed,
    }


def prompts_for(options: argparse.Namespace) -> dict[str, list[str]]:
    """The prompts of `options.tasks` by task, of all tasks where it names none. Raises ValueError."""
    prompts = prompts_of(options.prompts, seed=options.seed, max_characters=options.max_characters)
    if not options.tasks:
        return prompts
    if absent := set(options.tasks) - set(prompts):
        short = f"no prompt of at most {options.max_characters} characters: {', '.join(sorted(absent))}"
        raise ValueError(f"expected tasks of {', '.join(sorted(prompts))}; {short}")
    return {task: prompts[task] for task in options.tasks}
