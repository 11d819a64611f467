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
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Final

from rich.console import Console

from alphaloop.acceptance import Interval
from alphaloop.cli.options import GlobalOptions, open_database
from alphaloop.cli.services import prepare
from alphaloop.demo_prompts import harvest
from alphaloop.embedded.process import ChildProcess
from alphaloop.embedded.stack import EmbeddedStack
from alphaloop.messages import Body, Decoding, Job, Mode, Result
from benchmarks.agreement.asking import Asked, ask_everywhere, differences
from benchmarks.agreement.deployed import Deployed
from benchmarks.agreement.forced import ForcedBlock, agree, forced_speedup
from benchmarks.whole.jobs import read_folder

console = Console(stderr=True)
#: Of all tasks together: with five tasks each figure has 99 %.
CONFIDENCE: Final = 0.95
NOT_COMPARED: Final = "not compared"
_HARVESTED: Final = 20  #: prompts of a task that the demo finds in Python's library


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
        _job(f"forced-{number:03d}-{task}-{i}", task, prompt, options.max_tokens)
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
    if options.prompts is None:
        found = harvest(options.seed, num_traffic=_HARVESTED, num_probes=0).traffic
        return {task: list(found[task]) for task in options.tasks or found}
    read = read_folder(options.prompts)
    short = {task: [one for one in read[task] if len(one) <= options.max_chars] for task in options.tasks or read}
    return {task: lines for task, lines in short.items() if len(lines) >= options.block_jobs}


def _jobs(prompts: Mapping[str, Sequence[str]], options: argparse.Namespace, rng: Random) -> list[Job]:
    tasks = sorted(prompts)
    jobs = [
        _job(f"job-{number:05d}", task := tasks[number % len(tasks)], rng.choice(prompts[task]), options.max_tokens)
        for number in range(options.jobs)
    ]
    rng.shuffle(jobs)
    return jobs


def _job(job_id: str, task: str, prompt: str, max_tokens: int) -> Job:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0.0}
    return Job(job_id=job_id, task=task, body=Body.model_validate(body))


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=Path, help="a folder of TASK.jsonl files; Python's library, if not given")
    parser.add_argument("--tasks", nargs="+", help="only these tasks")
    parser.add_argument("--max-chars", type=int, default=900, help="longer prompts of the folder are left out")
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
