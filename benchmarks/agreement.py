"""Real jobs, the figure that every screen shows of them, and forced runs of the same prompts.

    make bench-agreement
    make bench-agreement ARGS="--jobs 400 --blocks 12" PROMPTS=folder

Jobs of several tasks go through Kafka, a worker and PostgreSQL, decided by the worker. Then status, report, explain,
the view task_speedup_now and the metrics are asked: they must show equal figures. Then the same prompts are decoded in
blocks, each forced to vanilla and forced to speculate, in an order drawn by lot. Tasks that the worker left vanilla
stay vanilla in both, because the figures are of a device on which only the others speculate. A task's shown speed-up
agrees where it differs from that of its forced blocks by no more than both intervals allow. What was asked and forced
is kept in agreement.json as it comes. Last line: JSON. Exit code 1 where screens differ, a shown figure is not that of
the forced runs, or no task has a figure to compare.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text

from alphaloop.acceptance import Interval, t_quantile
from alphaloop.cli.children import (
    LogFollower,
    await_event,
    child_command,
    child_environment,
    child_process,
    field_of,
)
from alphaloop.cli.options import GlobalOptions, open_database
from alphaloop.cli.services import prepare
from alphaloop.client import Client
from alphaloop.embedded.process import ChildProcess
from alphaloop.embedded.stack import EmbeddedStack
from alphaloop.messages import Decoding, Job, Mode, Result
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from benchmarks.jobs import PromptJob, prompts_of
from benchmarks.reporting import console, parser_of

#: Figures that must be equal; the view's columns have these names, the others are turned into them.
FIGURES: Final = ("speedup", "low", "high", "num_blocks", "min_num_draft_tokens", "max_num_draft_tokens")
_TIMEOUT_S: Final = 120.0
#: A command prints what Postgres stores, a metric is a float of the same: only the last digits may differ.
_SAME: Final = 1e-9
_VIEW: Final = text(
    "SELECT task, speedup, speedup_low AS low, speedup_high AS high, num_blocks, min_num_draft_tokens, "
    "max_num_draft_tokens FROM task_speedup_now"
)
_METRICS: Final = {
    "ratio": "speedup",
    "low": "low",
    "high": "high",
    "blocks": "num_blocks",
    "min_draft_tokens": "min_num_draft_tokens",
    "max_draft_tokens": "max_num_draft_tokens",
}

#: By task, then by figure; a figure that is not shown is missing or None.
Shown = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What one place shows."""

    place: str
    by_task: Shown


def ask_everywhere(
    environment: Mapping[str, str], database: Database, metrics: str, tasks: Sequence[str]
) -> list[Asked]:
    """What the view, status, report, explain and the scheduler's metrics show of these tasks."""
    status = {line["task"]: _bounds(line["measured"]) for line in _command(environment, "status", "--json")["tasks"]}
    report = {line["task"]: _bounds(line["measured"]) for line in _command(environment, "report", "--json")["tasks"]}
    explained = {
        task: _bounds(_command(environment, "explain", task, "--json")["measured"]["speedup"]) for task in tasks
    }
    return [
        Asked("view", _view(database)),
        Asked("status", status),
        Asked("report", report),
        Asked("explain", explained),
        Asked("metrics", _scraped(metrics)),
    ]


def differences(asked: Sequence[Asked], tasks: Sequence[str]) -> list[str]:
    """Every figure on which two places do not agree, as a sentence without anything else."""
    first, *others = asked
    found = []
    for task in tasks:
        for name in FIGURES:
            truth = first.by_task.get(task, {}).get(name)
            for other in others:
                told = other.by_task.get(task, {}).get(name)
                if not _is_same(truth, told):
                    found.append(f"{task}, {name}: {first.place} {truth}, {other.place} {told}")
    return found


def _is_same(one: float | None, another: float | None) -> bool:
    if one is None or another is None:
        return one is another
    return abs(one - another) <= _SAME * max(abs(one), abs(another))


def _command(environment: Mapping[str, str], *arguments: str) -> Any:
    done = subprocess.run(
        child_command("alphaloop.cli", arguments),
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"alphaloop {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def _bounds(measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """A measured speed-up as the commands print it, under the names of `FIGURES`."""
    if measured is None:
        return {}
    bounds = measured["speedup"] or {}
    if not isinstance(bounds, Mapping):
        bounds = dict(zip(("mean", "low", "high"), bounds, strict=True))
    return {
        "speedup": bounds.get("mean"),
        "low": bounds.get("low"),
        "high": bounds.get("high"),
        **{name: measured[name] for name in FIGURES[3:]},
    }


def _view(database: Database) -> Shown:
    with database.begin() as connection:
        return {row["task"]: dict(row) for row in connection.execute(_VIEW).mappings()}


def _scraped(address: str) -> Shown:
    with urllib.request.urlopen(f"{address}/metrics", timeout=_TIMEOUT_S) as answer:
        page = answer.read().decode()
    prefix = "alphaloop_scheduler_speedup_"
    found: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(page):
        name = _METRICS.get(family.name.removeprefix(prefix)) if family.name.startswith(prefix) else None
        if name is not None:
            for sample in family.samples:
                found.setdefault(sample.labels["task"], {})[name] = sample.value
    return found


_STALLED_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Deployed:
    """What runs; `settings` name the servers."""

    options: GlobalOptions
    settings: Settings
    seed: int

    @property
    def environment(self) -> dict[str, str]:
        """For commands on the same servers."""
        return child_environment(self.options, self.settings)

    @contextmanager
    def worker(self) -> Iterator[ChildProcess]:
        """A worker that is ready; it drains at the end."""
        child = child_process("worker", ["--seed", str(self.seed)], self.options, self.settings)
        follower = LogFollower(child.log)
        child.start()
        try:
            await_event(child, follower, "worker_ready")
            yield child
        finally:
            child.stop()

    @contextmanager
    def scheduler(self) -> Iterator[str]:
        """A scheduler that has made a report since; the address of its metrics."""
        child = child_process("scheduler", ["run"], self.options, self.settings)
        follower = LogFollower(child.log)
        child.start()
        try:
            ready = await_event(child, follower, "scheduler_ready")
            await_event(child, follower, "run_finished")
            yield field_of(ready or "", "metrics") or ""
        finally:
            child.stop()

    def decode(self, jobs: Sequence[Job], worker: ChildProcess) -> dict[str, Result]:
        """The results by job_id. Raises RuntimeError where a job has no text."""
        results = dict[str, Result]()
        since = time.monotonic()

        def alive() -> None:
            if not worker.is_running:
                raise worker.failed("ended by itself")
            if time.monotonic() - since > _STALLED_S:
                raise RuntimeError(f"nothing ended in {_STALLED_S:.0f} s; {len(results)} of {len(jobs)} results")

        with Client(self.settings) as client:
            batch = client.submit(jobs)
            for outcome in client.results(batch, timeout_s=86_400.0, alive=alive):
                if outcome.usage is None or outcome.timings is None:
                    raise RuntimeError(f"job {outcome.job_id} ended without a text")
                results[outcome.job_id], since = outcome, time.monotonic()
        return results


#: Fewer pairs of blocks give no interval.
LEAST_BLOCKS: Final = 4


@dataclass(frozen=True, slots=True)
class ForcedBlock:
    """The same jobs of one task in both arms: seconds from the start of decoding to the last token, and tokens."""

    vanilla_s: float
    vanilla_tokens: int
    drafted_s: float
    drafted_tokens: int


def forced_speedup(blocks: Sequence[ForcedBlock], confidence: float) -> Interval | None:
    """Seconds a token, vanilla over speculative, of all blocks together; None with too few.

    The bounds leave out one block at a time (jackknife of the logarithm), with Student's t.
    """
    number = len(blocks)
    if number < LEAST_BLOCKS:
        return None
    whole = _log_ratio(blocks)
    without = [_log_ratio([*blocks[:i], *blocks[i + 1 :]]) for i in range(number)]
    mean = sum(without) / number
    error = math.sqrt((number - 1) / number * sum((one - mean) ** 2 for one in without))
    half = t_quantile(number - 1, 1 - confidence) * error
    return Interval(math.exp(whole), math.exp(whole - half), math.exp(whole + half))


def agree(shown: Interval, forced: Interval) -> bool:
    """Whether the difference of two independent figures may be chance: within the root of their squared half-widths."""
    higher, lower = (shown, forced) if shown.mean > forced.mean else (forced, shown)
    doubt = math.hypot(math.log(higher.mean / higher.low), math.log(lower.high / lower.mean))
    return math.log(higher.mean / lower.mean) <= doubt


def _log_ratio(blocks: Sequence[ForcedBlock]) -> float:
    vanilla = sum(one.vanilla_s for one in blocks) / sum(one.vanilla_tokens for one in blocks)
    drafted = sum(one.drafted_s for one in blocks) / sum(one.drafted_tokens for one in blocks)
    return math.log(vanilla / drafted)


#: Of all tasks together: with five tasks each figure has 99 %.
CONFIDENCE: Final = 0.95
NOT_COMPARED: Final = "not compared"


def main() -> int:
    """Decode, ask, force, compare."""
    options = _options()
    data_dir = (options.data_dir or Path(tempfile.mkdtemp(prefix="alphaloop-agreement-"))).absolute()
    os.environ.update(_environment(options))
    console.print(f"seed {options.seed}; everything is kept in {data_dir}", markup=False, soft_wrap=True)
    rng, began = Random(options.seed), time.monotonic()
    prompts = _prompts(options)
    jobs = _jobs(prompts, options, rng)
    given = GlobalOptions(profile="local", data_dir=data_dir)
    with EmbeddedStack(given.settings(), on_event=_say) as running:
        prepare(running)
        deployed = Deployed(given, running, options.seed)
        with deployed.worker() as worker:
            _say(f"{len(jobs)} jobs of {len(prompts)} tasks, decided by the worker")
            ended = deployed.decode(jobs, worker)
            # While no job is decoded no figure moves.
            with deployed.scheduler() as metrics, open_database(running) as database:
                asked = ask_everywhere(deployed.environment, database, metrics, sorted(prompts))
            _keep(data_dir, asked, {})
            drafted = _drafted(ended.values(), asked[0])
            _say(f"{options.blocks} blocks of {options.block_jobs} prompts a task; forced both ways: {sorted(drafted)}")
            blocks: dict[str, list[ForcedBlock]] = {task: [] for task in prompts}
            for number in range(options.blocks):
                forced = _force(deployed, worker, _draw(prompts, number, options, rng), drafted, rng)
                for task, block in forced.items():
                    blocks[task].append(block)
                _keep(data_dir, asked, blocks)
    return _conclude(options, asked, blocks, sorted(prompts), time.monotonic() - began)


def _drafted(ended: Iterable[Result], shown: Asked) -> set[str]:
    """The tasks of which the worker decoded most jobs speculatively, and those that have a figure."""
    modes: dict[str, list[bool]] = {}
    for result in ended:
        if result.decoding is not None:
            modes.setdefault(result.task, []).append(result.decoding.mode is Mode.SPECULATIVE)
    found = {task for task, speculated in modes.items() if 2 * sum(speculated) >= len(speculated)}
    return found | {task for task in modes if shown.by_task.get(task, {}).get("speedup") is not None}


def _draw(prompts: Mapping[str, Sequence[str]], number: int, options: argparse.Namespace, rng: Random) -> list[Job]:
    drawn = [
        PromptJob(f"forced-{number:03d}-{task}-{i}", task, prompt, options.max_tokens).as_job()
        for task, lines in prompts.items()
        for i, prompt in enumerate(rng.sample(list(lines), options.block_jobs))
    ]
    rng.shuffle(drawn)
    return drawn


def _force(
    deployed: Deployed, worker: ChildProcess, drawn: Sequence[Job], drafted: set[str], rng: Random
) -> dict[str, ForcedBlock]:
    """The jobs decoded twice: all vanilla, and with `drafted` tasks speculative. One block by task."""
    ended: dict[Decoding, dict[str, Result]] = {}
    for way in rng.sample([Decoding.VANILLA, Decoding.SPECULATIVE], 2):
        forced = [replaced(job, way, way if job.task in drafted else Decoding.VANILLA) for job in drawn]
        results = deployed.decode(forced, worker)
        ended[way] = {job.job_id: results[sent.job_id] for job, sent in zip(drawn, forced, strict=True)}
    found = {}
    for task in sorted({job.task for job in drawn}):
        its = [job.job_id for job in drawn if job.task == task]
        sums = [_sums([ended[way][name] for name in its]) for way in (Decoding.VANILLA, Decoding.SPECULATIVE)]
        found[task] = ForcedBlock(*sums[0], *sums[1])
    return found


def _keep(data_dir: Path, asked: Sequence[Asked], blocks: Mapping[str, Sequence[ForcedBlock]]) -> None:
    """What is known so far, for a run that is ended early."""
    known = {
        "asked": [asdict(one) for one in asked],
        "blocks": {task: [asdict(one) for one in its] for task, its in blocks.items()},
    }
    (data_dir / "agreement.json").write_text(json.dumps(known, indent=1), encoding="utf-8")


def replaced(job: Job, arm: Decoding, way: Decoding) -> Job:
    """The same job in an arm, forced one way."""
    return job.model_copy(update={"job_id": f"{job.job_id}-{arm.value}", "decoding": way})


def _sums(results: Sequence[Result]) -> tuple[float, int]:
    """Seconds of decoding and tokens, over these results."""
    return (
        sum(one.timings.wall_s for one in results if one.timings),
        sum(one.usage.completion_tokens for one in results if one.usage),
    )


def _conclude(
    options: argparse.Namespace,
    asked: Sequence[Asked],
    blocks: Mapping[str, Sequence[ForcedBlock]],
    tasks: Sequence[str],
    wall_s: float,
) -> int:
    unlike = differences(asked, tasks)
    lines = [_line(task, asked[0].by_task.get(task, {}), blocks[task], len(tasks)) for task in tasks]
    for line in lines:
        console.print(
            f"{line['task']:<20} shown {_told(line['shown'])}  forced {_told(line['forced'])}  {line['verdict']}",
            markup=False,
        )
    for sentence in unlike:
        console.print(f"screens differ: {sentence}", markup=False, soft_wrap=True)
    num_compared = sum(line["verdict"] != NOT_COMPARED for line in lines)
    is_right = is_shown_right(unlike, [line["verdict"] for line in lines])
    found: dict[str, Any] = {
        "right": is_right,
        "seed": options.seed,
        "num_jobs": options.jobs,
        "num_compared": num_compared,
        "screens_differ": unlike,
        "tasks": lines,
        "load": os.getloadavg()[0],
        "wall_s": round(wall_s),
    }
    print(json.dumps(found))
    return int(not is_right)


def is_shown_right(unlike: Sequence[str], verdicts: Sequence[str]) -> bool:
    """Whether all screens agree, and every figure with the forced runs. Without a figure nothing is shown."""
    compared = [verdict for verdict in verdicts if verdict != NOT_COMPARED]
    return not unlike and bool(compared) and "DIFFERS" not in compared


def _line(task: str, shown: Mapping[str, Any], blocks: Sequence[ForcedBlock], num_tasks: int) -> dict[str, Any]:
    forced = forced_speedup(blocks, 1 - (1 - CONFIDENCE) / num_tasks)
    figure = None
    if shown.get("speedup") is not None:
        figure = Interval(shown["speedup"], shown["low"], shown["high"])
    verdict = NOT_COMPARED
    if forced is not None and figure is not None:
        verdict = "agrees" if agree(figure, forced) else "DIFFERS"
    return {
        "task": task,
        "shown": None if figure is None else asdict(figure),
        "num_blocks": shown.get("num_blocks"),
        "forced": None if forced is None else asdict(forced),
        "verdict": verdict,
    }


def _told(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "no figure yet".ljust(17)
    return f"{found['mean']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _prompts(options: argparse.Namespace) -> dict[str, list[str]]:
    found = prompts_of(options.prompts, seed=options.seed, max_characters=options.max_chars)
    wanted = {task: found[task] for task in options.tasks or found}
    return {task: lines for task, lines in wanted.items() if len(lines) >= options.block_jobs}


def _jobs(prompts: Mapping[str, Sequence[str]], options: argparse.Namespace, rng: Random) -> list[Job]:
    tasks = sorted(prompts)
    jobs = []
    for number in range(options.jobs):
        task = tasks[number % len(tasks)]
        jobs.append(PromptJob(f"job-{number:05d}", task, rng.choice(prompts[task]), options.max_tokens).as_job())
    rng.shuffle(jobs)
    return jobs


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """For the worker and the scheduler, which read the shipped settings otherwise."""
    return {
        "ALPHALOOP_MODELS__TARGET__NUM_THREADS": str(options.threads),
        "ALPHALOOP_POLICY__CONTROL_SHARE": str(options.control_share),
        "ALPHALOOP_SCHEDULER__DRIFT_SETTLE_S": "0",
    }


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, help="a folder of TASK.jsonl files; Python's library, if not given")
    parser.add_argument("--tasks", nargs="+", help="only these tasks")
    parser.add_argument("--max-chars", type=int, default=900, help="longer prompts are left out")
    parser.add_argument("--jobs", type=int, default=2000, help="that the worker decides; prompts repeat")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--blocks", type=int, default=24, help="pairs of forced blocks")
    parser.add_argument("--block-jobs", type=int, default=2, help="prompts of each task in a block")
    parser.add_argument("--control-share", type=float, default=0.2, help="[policy] control_share of the worker")
    parser.add_argument("--threads", type=int, default=2, help="of the worker")
    parser.add_argument("--seed", type=int, default=20261123)
    parser.add_argument("--data-dir", type=Path, help="where everything is kept; a new folder, if not given")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
