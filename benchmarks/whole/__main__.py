"""Tokens a second of the worker, Kafka to Kafka, beside its own engine, an earlier commit's worker and vLLM.

    python -m benchmarks.whole --prompts FOLDER --vllm-python .venv-vllm/bin/python
    python -m benchmarks.whole --prompts FOLDER --num 26 --slots 4 --rounds 1 --without vllm

FOLDER holds TASK.jsonl files with a `prompt` a line. docs/concepts/whole-benchmark.md says what is measured and how.
A table for each number of slots goes to standard error. Last line: JSON. Exit status 1 where a job has several
results, or one that did not succeed, and where a text differs from the engine's elsewhere than at a near-tie.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from alphaloop.settings import load_settings
from benchmarks.jobs import WARM_UP_TASK, Jobs, draw_jobs, read_folder
from benchmarks.reporting import FOLDER, REPOSITORY, checkout, commit_of, console, machine, parser_of, print_found
from benchmarks.servers import CONFIGS, on_cores, running_servers, split_cores
from benchmarks.whole.lineup import BASELINE, CONTESTANTS, ENGINE, VLLM, WORKER, Lineup, draw_order
from benchmarks.whole.report import Round, SlotsReport, met
from benchmarks.workers import worktree

#: The last commit whose worker decodes one batch to its end before it takes the next.
DEFAULT_BASELINE = "6a6cdd7"


def main() -> int:
    """Play all rounds, print a table for each number of slots, and the JSON line."""
    options = _options()
    return print_found(lambda: _measure(options), lambda found: not found["is_sound"])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    jobs = _jobs(options)
    contestants = [name for name in CONTESTANTS if name not in options.without]
    folder = FOLDER / "whole"
    # Servers of a killed run may be there.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    conditions = _conditions(options, jobs)
    console.print(conditions)
    rng = random.Random(options.seed)
    reports = []
    with ExitStack() as stack:
        baseline = None
        if BASELINE in contestants:
            baseline = stack.enter_context(worktree(REPOSITORY, conditions["baseline"], folder / "baseline"))
        server_cores, other_cores = split_cores(options.server_cores)
        with on_cores(server_cores):
            servers = stack.enter_context(running_servers(folder))
        stack.enter_context(on_cores(other_cores))
        for num_slots in options.slots:
            playing = Lineup(
                servers,
                jobs,
                num_slots=num_slots,
                baseline=baseline,
                vllm_python=options.vllm_python,
                folder=folder / "runs",
                timeout_s=options.timeout_s,
            )
            conditions["engine"] = playing.engine_name
            with closing(playing):
                rounds = [_round(playing, draw_order(contestants, rng), number) for number in range(options.rounds)]
            reports.append(SlotsReport(num_slots, len(jobs.measured), tuple(rounds)))
            console.print(reports[-1].table())
            _print_checks(reports[-1])
    return {
        "conditions": conditions,
        "slots": {str(report.num_slots): report.as_json() for report in reports},
        "bars": met(reports),
        "is_sound": all(report.is_sound() for report in reports),
    }


def _round(playing: Lineup, order: Sequence[str], number: int) -> Round:
    played = []
    for name in order:
        played.append(playing.play(name, seed=number))
        console.print(
            f"{playing.num_slots} slots, round {number + 1}: {name} {played[-1].tokens_per_s:.1f} tokens/s, "
            f"{played[-1].num_tokens} in {played[-1].seconds:.1f} s"
        )
    one = Round(tuple(played))
    worker, engine = one.of(WORKER), one.of(ENGINE)
    if worker is None or engine is None:
        return one
    return Round(one.played, tuple(playing.differences(worker, engine)))


def _print_checks(report: SlotsReport) -> None:
    differences = report.differences()
    num_ties = sum(difference.is_near_tie for difference in differences)
    console.print(
        f"texts of the worker and its engine: {report.num_compared() - len(differences)} of {report.num_compared()} "
        f"identical, {num_ties} differ at near-ties, {len(differences) - num_ties} elsewhere"
    )
    for fault, count in report.faults().items():
        console.print(f"{fault}: {count} jobs")


def _jobs(options: argparse.Namespace) -> Jobs:
    prompts = read_folder(options.prompts)
    known = load_settings(CONFIGS).tasks
    if unknown := sorted(set(prompts) - set(known)):
        raise ValueError(f"{options.prompts}: no such tasks in configs/tasks.toml: {', '.join(unknown)}")
    if WARM_UP_TASK in prompts:
        raise ValueError(f"{options.prompts}: {WARM_UP_TASK} is the task of the warm-up jobs, leave its file out")
    return draw_jobs(
        prompts, num=options.num, num_history=options.history, num_warm_up=max(options.slots), seed=options.seed
    )


def _conditions(options: argparse.Namespace, jobs: Jobs) -> dict[str, Any]:
    return {
        **machine(),
        "torch": version("torch"),
        **checkout(),
        "baseline": None if BASELINE in options.without else commit_of(REPOSITORY, options.baseline),
        "without": options.without,
        "jobs": len(jobs.measured),
        "history": len(jobs.history),
        "max_tokens": sum(job.max_tokens for job in jobs.measured),
        "tasks": len({job.task for job in jobs.measured}),
        "greedy": True,
        "rounds": options.rounds,
        "seed": options.seed,
        "servers": "one Apache Kafka, PostgreSQL with durable commits",
        "server_cores": options.server_cores or "the same",
    }


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="folder with TASK.jsonl files")
    parser.add_argument("--num", type=int, default=480, help="jobs, spread over the tasks")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 32], help="sequences that decode together")
    parser.add_argument("--rounds", type=int, default=2, help="runs of every contestant, for each number of slots")
    parser.add_argument("--history", type=int, default=0, help="other jobs that the workers decode before, unmeasured")
    parser.add_argument("--baseline", default=DEFAULT_BASELINE, metavar="COMMIT", help="whose worker is compared")
    parser.add_argument("--without", nargs="+", default=[], choices=CONTESTANTS, help="leave contestants out")
    parser.add_argument("--vllm-python", default=None, help="interpreter of an environment with vLLM")
    parser.add_argument(
        "--server-cores",
        type=int,
        nargs="+",
        default=[],
        metavar="CORE",
        help="cores for Kafka and PostgreSQL alone; all else runs on the others",
    )
    parser.add_argument("--timeout-s", type=float, default=900.0, help="without any result of a worker")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, limits, orders and the workers' exploration")
    options = parser.parse_args()
    if VLLM not in options.without and options.vllm_python is None:
        parser.error("vLLM needs --vllm-python; `make bench-whole` makes its environment, --without vllm leaves it out")
    if WORKER in options.without:
        options.without.append(ENGINE)
    return options


if __name__ == "__main__":
    sys.exit(main())
