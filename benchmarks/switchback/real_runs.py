"""Runs of one task on the real engine: as the worker decides, forced both ways, and by an earlier commit's worker."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg

from alphaloop.intervals import t95
from benchmarks.contestants.process import REPOSITORY
from benchmarks.switchback.methods import JobCost, ratio_of_jobs
from benchmarks.whole.jobs import WARM_UP_TASK, PromptJob
from benchmarks.whole.product import PROFILE, python_module
from benchmarks.whole.servers import Servers
from benchmarks.whole.started_worker import StartedWorker, started_worker

CONFIGS: Final = REPOSITORY / "configs"
_COMMAND_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What both workers are given."""

    task: str
    prompts: tuple[str, ...]
    num_slots: int
    max_tokens: int
    num_repeats: int  #: times that all prompts are decoded as the worker decides
    num_blocks: int  #: of forced runs
    control_share: float
    seed: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Figure:
    """A speed-up with its 95 % interval."""

    low: float
    ratio: float
    high: float

    @property
    def width(self) -> float:
        """Of the interval, as a share of the ratio."""
        return (self.high - self.low) / self.ratio


@dataclass(frozen=True, slots=True)
class Shown:
    """What a user sees after the worker's own decisions."""

    by_place: Mapping[str, Figure | None]  #: view, status, report, explain
    control_share: float  #: of sequence seconds, as it came out
    drafter: str | None
    num_jobs: int

    @property
    def agrees(self) -> bool:
        """Whether all places show the same figure."""
        return len(set(self.by_place.values())) == 1


@dataclass(frozen=True, slots=True)
class Forced:
    """Blocks of prompts, each decoded both ways, one directly behind the other."""

    figure: Figure
    vanilla_tokens_per_s: float
    speculative_tokens_per_s: float
    num_blocks: int


def play_ours(plan: Plan, servers: Servers, folder: Path) -> tuple[Shown, Forced]:
    with _worker(plan, servers, REPOSITORY, folder, "worker") as worker:
        for number in range(plan.num_repeats):
            worker.client.send_and_wait(_jobs(plan, plan.prompts, f"auto-{number}"))
        share = _slice_share(worker.database_url, plan.task)
        shown = _shown(worker, plan.task, share, plan.num_repeats * len(plan.prompts))
        forced = _force(plan, worker)
    return shown, forced


def play_baseline(plan: Plan, servers: Servers, folder: Path, checkout: Path) -> tuple[Figure | None, float]:
    """The ratio of its speculative jobs to its vanilla ones, with jobs as independent, and its share of control."""
    with _worker(plan, servers, checkout, folder, "baseline") as worker:
        for number in range(plan.num_repeats):
            worker.client.send_and_wait(_jobs(plan, plan.prompts, f"auto-{number}"))
        worker.stop()
        with psycopg.connect(worker.database_url) as connection:
            rows = connection.execute(
                "SELECT mode, num_tokens, device_s FROM decode_runs WHERE task = %s", (plan.task,)
            ).fetchall()
    jobs = [(mode, JobCost(num_tokens, device_s)) for mode, num_tokens, device_s in rows]
    vanilla = [job for mode, job in jobs if mode == "vanilla"]
    low, ratio, high = ratio_of_jobs([job for mode, job in jobs if mode == "speculative"], vanilla)
    control_s, device_s = sum(job.device_s for job in vanilla), sum(job.device_s for _, job in jobs)
    return (None if math.isnan(ratio) else Figure(low, ratio, high)), control_s / device_s


def _worker(
    plan: Plan, servers: Servers, checkout: Path, folder: Path, name: str
) -> AbstractContextManager[StartedWorker]:
    return started_worker(
        checkout,
        servers,
        [plan.task, WARM_UP_TASK],
        num_slots=plan.num_slots,
        seed=plan.seed,
        folder=folder / "runs",
        name=name,
        timeout_s=plan.timeout_s,
        settings={"ALPHALOOP_POLICY__CONTROL_SHARE": str(plan.control_share)},
    )


def _jobs(plan: Plan, prompts: Sequence[str], name: str) -> list[PromptJob]:
    return [
        PromptJob(f"{name}-{number:04d}", plan.task, prompt, plan.max_tokens) for number, prompt in enumerate(prompts)
    ]


def _force(plan: Plan, worker: StartedWorker) -> Forced:
    """Blocks in both ways, the first way drawn for each block. The mean log ratio, with t bounds over blocks."""
    rng = random.Random(plan.seed)
    order = list(plan.prompts)
    rng.shuffle(order)
    size = max(plan.num_slots, len(order) // plan.num_blocks)
    rates: dict[str, list[float]] = {"vanilla": [], "speculative": []}
    num_blocks = len(order) // size
    for block in range(num_blocks):
        ways = ["vanilla", "speculative"]
        rng.shuffle(ways)
        for way in ways:
            jobs = _jobs(plan, order[block * size : (block + 1) * size], f"{way}-{block}")
            timed = worker.client.send_and_wait(jobs, decoding=way)
            rates[way].append(_num_tokens(worker.database_url, [job.job_id for job in jobs]) / timed.seconds)
    logs = [math.log(fast / slow) for fast, slow in zip(rates["speculative"], rates["vanilla"], strict=True)]
    mean, margin = statistics.fmean(logs), t95(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    figure = Figure(*(math.exp(log) for log in (mean - margin, mean, mean + margin)))
    return Forced(figure, statistics.fmean(rates["vanilla"]), statistics.fmean(rates["speculative"]), num_blocks)


def _num_tokens(database_url: str, job_ids: Sequence[str]) -> int:
    with psycopg.connect(database_url) as connection:
        row = connection.execute(
            "SELECT sum(num_tokens) FROM decode_runs WHERE job_id = ANY(%s)", (list(job_ids),)
        ).fetchone()
    return int(row[0]) if row and row[0] else 0


def _slice_share(database_url: str, task: str) -> float:
    with psycopg.connect(database_url) as connection:
        row = connection.execute(
            "SELECT sum(sequence_s + prompt_sequence_s) FILTER (WHERE phase = 'control') "
            "/ sum(sequence_s + prompt_sequence_s) FROM switchback_slices WHERE task = %s",
            (task,),
        ).fetchone()
    return float(row[0] or 0.0) if row else 0.0


def _shown(worker: StartedWorker, task: str, share: float, num_jobs: int) -> Shown:
    """A run of the scheduler first, because the view and the report hold what it computed."""
    _command(worker, "scheduler", "once", "--configs", str(CONFIGS), "--profile", PROFILE)
    with psycopg.connect(worker.database_url) as connection:
        row = connection.execute(
            "SELECT drafter, speedup_low, speedup, speedup_high FROM task_speedup_now WHERE task = %s", (task,)
        ).fetchone()
    by_place: dict[str, Figure | None] = {"view": Figure(*row[1:]) if row and row[2] else None}
    status = json.loads(_command(worker, "alphaloop.cli", "status", "--json"))
    by_place["status"] = _figure(next(now["measured"] for now in status["tasks"] if now["task"] == task))
    report = json.loads(_command(worker, "alphaloop.cli", "report", "--json"))
    by_place["report"] = _figure(next(line["measured"] for line in report["tasks"] if line["task"] == task))
    explained = json.loads(_command(worker, "alphaloop.cli", "explain", task, "--json"))
    by_place["explain"] = _figure(explained["measured"]["speedup"])
    return Shown(by_place, share, row[0] if row else None, num_jobs)


def _figure(measured: dict[str, Any] | None) -> Figure | None:
    found = measured and measured["speedup"]
    return Figure(found["low"], found["mean"], found["high"]) if found else None


def _command(worker: StartedWorker, module: str, *arguments: str) -> str:
    done = subprocess.run(
        python_module(module, *arguments),
        cwd=REPOSITORY,
        env=dict(worker.environment),
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)}: {done.stderr.strip()[-1000:]}")
    return done.stdout
