"""vLLM inside the worker beside vLLM's server: the same jobs through Kafka, and whether texts and counts are the same.

    PYTHON -m benchmarks.engines.in_process MODEL_FOLDER --prompts FOLDER

PYTHON has vLLM and alphaloop's own packages. Each of four workers gets the same jobs, one at a time, so that the texts
of a batch do not differ by its company, and then as many at once as `--requests` says, for the time they take. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psycopg

from alphaloop.embedded.process import free_ports
from benchmarks.contestants.process import REPOSITORY
from benchmarks.engines.closed_loop import ClosedLoop, Played
from benchmarks.engines.serve import FOLDER, NGRAM
from benchmarks.engines.server import ENVIRONMENT, EXECUTOR, running, vllm
from benchmarks.engines.setting_up import environment
from benchmarks.whole.jobs import PromptJob, draw_jobs, read_folder
from benchmarks.whole.servers import running_servers
from benchmarks.whole.started_worker import started_worker

PLACES: Final = ("server", "in_process")
DRAFTERS: Final[Mapping[str, Mapping[str, Any] | None]] = {"plain": None, "ngram": NGRAM}
_TIMEOUT_S: Final = 600.0
_COUNTS: Final = "SELECT job_id, num_tokens, rounds, proposed, trials, accepts FROM decode_runs"


@dataclass(frozen=True, slots=True)
class Found:
    """What one worker made of the jobs."""

    alone: Played
    together: Played
    counts: Mapping[str, tuple[Any, ...]]  #: of the jobs that were sent one at a time

    @property
    def texts(self) -> dict[str, str | None]:
        """Of the jobs that were sent one at a time."""
        return {result.job_id: result.text for result in self.alone.results}


def main() -> int:
    """Play all four, compare, say."""
    options = _options()
    drawn = draw_jobs(read_folder(options.prompts), num=options.jobs, num_history=0, num_warm_up=0, seed=options.seed)
    jobs = [replace(job, max_tokens=min(job.max_tokens, options.max_tokens)) for job in drawn.measured]
    told: dict[str, Any] = {}
    with environment(ENVIRONMENT):
        for name, speculative in DRAFTERS.items():
            found = {place: _played(options, place, name, speculative, jobs) for place in PLACES}
            told[name] = _compared(found["server"], found["in_process"])
            print(name, json.dumps(told[name]), flush=True)
    print(json.dumps({"jobs": len(jobs), "requests": options.requests, "dtype": options.dtype, **told}))
    return 0


def _played(
    options: argparse.Namespace, place: str, name: str, speculative: Mapping[str, Any] | None, jobs: Sequence[PromptJob]
) -> Found:
    folder = FOLDER / f"in-process-{place}-{name}"
    with ExitStack() as stack:
        settings = stack.enter_context(_endpoint(options, place, name, speculative, folder))
        servers = stack.enter_context(running_servers(folder, REPOSITORY / "configs"))
        worker = stack.enter_context(
            started_worker(
                REPOSITORY,
                servers,
                sorted({job.task for job in jobs}),
                num_slots=options.requests,
                seed=options.seed,
                folder=folder,
                name="worker",
                timeout_s=_TIMEOUT_S,
                settings=settings,
            )
        )
        loop = ClosedLoop(servers.kafka, worker.check_alive, _TIMEOUT_S)
        stack.callback(loop.close)
        alone = loop.play(jobs, decoding="auto", load=1)
        with psycopg.connect(worker.database_url) as connection:
            counts = {row[0]: row[1:] for row in connection.execute(_COUNTS)}
        again = [replace(job, job_id=f"together-{job.job_id}") for job in jobs]
        return Found(alone, loop.play(again, decoding="auto", load=options.requests), counts)


@contextmanager
def _endpoint(
    options: argparse.Namespace, place: str, name: str, speculative: Mapping[str, Any] | None, folder: Path
) -> Iterator[dict[str, str]]:
    """The worker's settings of its one endpoint."""
    settings = {"ALPHALOOP_MODELS__TARGET__ENGINE": "server", "ALPHALOOP_MODELS__TARGET__NAME": "model"}
    folder.mkdir(parents=True, exist_ok=True)
    if place == "server":
        (port,) = free_ports(1)
        server = vllm(
            name,
            sys.executable,
            options.model,
            port,
            speculative=speculative,
            dtype=options.dtype,
            max_requests=options.requests,
        )
        with running([server], folder):
            yield settings | server.settings()
        return
    given: dict[str, Any] = {
        "kind": "vllm_in_process",
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": 2048,
        "max_requests": options.requests,
        "gpu_memory_utilization": 0.3,
        "options": json.dumps(
            {"enforce_eager": True, "enable_prefix_caching": False, "distributed_executor_backend": EXECUTOR}
        ),
    }
    if speculative is not None:
        given |= {"drafter": speculative["method"], "num_draft_tokens": speculative["num_speculative_tokens"]}
        given |= {"speculative_config": json.dumps(speculative)}
    place_of = f"ALPHALOOP_MODELS__ENDPOINTS__{name.upper()}"
    yield settings | {f"{place_of}__{key.upper()}": str(value) for key, value in given.items()}


def _compared(server: Found, here: Found) -> dict[str, Any]:
    jobs = sorted(server.texts)
    return {
        "other_texts": [job for job in jobs if server.texts[job] != here.texts[job]],
        "other_counts": [job for job in jobs if server.counts[job] != here.counts[job]],
        "tokens": [server.alone.num_tokens, here.alone.num_tokens],
        "proposed": [_sum(server, 2), _sum(here, 2)],
        "accepted": [_sum(server, 4), _sum(here, 4)],
        "tokens_per_s_alone": [round(one.alone.num_tokens / one.alone.seconds, 1) for one in (server, here)],
        "tokens_per_s_together": [round(one.together.num_tokens / one.together.seconds, 1) for one in (server, here)],
        "revisions": sorted(
            {one.decoding.target_revision for found in (server, here) for one in found.alone.results if one.decoding}
        ),
        "engines": sorted(
            {one.decoding.engine for found in (server, here) for one in found.alone.results if one.decoding}
        ),
    }


def _sum(found: Found, column: int) -> int:
    return sum(sum(counts[column]) for counts in found.counts.values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines.in_process",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="folder with config.json and safetensors")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of TASK.jsonl with a `prompt` a line")
    parser.add_argument("--jobs", type=int, default=39)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
