"""How long jobs take that come at once, as `alphaloop capacity` plans it from others, beside a real worker's drain.

    python -m benchmarks.week.drain --prompts FOLDER                          # three quarters of an hour
    python -m benchmarks.week.drain --prompts FOLDER --rounds 1 --num 40 --history 20    # two minutes

FOLDER holds TASK.jsonl files with a `prompt` a line. In each round a worker with an empty ledger drains some jobs, the
history. Load curve and work come from what it recorded of them alone. Each of the jobs that are judged, of other
prompts, is expected to take what the history's jobs of its task took; all arrive at once, and one device is played over
them. Then they are sent, and timed from Kafka to Kafka. Once with vanilla decoding, once as decisions choose. Last
line: JSON. Exit status 1 where a drain is not within 15 % of its plan.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from alphaloop.capacity.curve import Arrivals, LoadCurve, arrivals_of
from alphaloop.capacity.fleet import play
from alphaloop.store.arrivals import ArrivalStore, SeenArrivals
from alphaloop.store.database import Database
from benchmarks.jobs import Jobs, PromptJob, draw_jobs, prompts_of
from benchmarks.reporting import FOLDER, REPOSITORY, checkout, console, machine, parser_of, print_found, table_of
from benchmarks.servers import Servers, running_servers
from benchmarks.workers import started_worker

BAR: Final = 0.15  #: of the time that a drain took
MODES: Final = ("vanilla", "auto")
_MAX_CHARACTERS: Final = 600  #: of a prompt
#: Together they have enough prompts that are so short; sql and summarization have few.
TASKS: Final = ("chat", "code", "customer_support", "math", "translation")


@dataclass(frozen=True, slots=True)
class Drain:
    """One drain of jobs that came at once."""

    decoding: str
    seed: int
    planned_s: float
    actual_s: float
    num_tokens: int
    num_drafted: int  #: jobs that were decided speculative
    history_s: float  #: that the history took

    @property
    def ratio(self) -> float:
        """Planned over actual."""
        return self.planned_s / self.actual_s

    @property
    def is_met(self) -> bool:
        """Whether the plan was within the bar of what came."""
        return abs(self.ratio - 1) <= BAR


def planned_s(seen: SeenArrivals, num_jobs: Mapping[str, int], *, seed: int) -> float:
    """The seconds in which one device ends so many jobs of each task that come at once.

    `seen` is what was recorded of others. The jobs of a task are spread evenly over those recorded of it, by the
    seconds that they would take alone. Raises ValueError for a task of which none was recorded.
    """
    curve = LoadCurve.of_jobs(seen.groups)
    alone: defaultdict[str, list[float]] = defaultdict(list)
    for group in seen.groups:
        arrivals = arrivals_of(group, curve)
        alone[group.task] += [arrivals.alone_s] * arrivals.number
    coming: list[Arrivals] = []
    for task, number in num_jobs.items():
        if not (recorded := sorted(alone[task])):
            raise ValueError(f"expected a recorded job of {task}, found none")
        coming += [Arrivals(0.0, recorded[(2 * i + 1) * len(recorded) // (2 * number)], 1) for i in range(number)]
    random.Random(seed).shuffle(coming)
    return play(coming, curve, num_devices=1, num_slots=seen.most_running).slowest_s


def main() -> int:
    """Drain, print a line each, a table and the JSON line."""
    options = _options()
    return print_found(lambda: _measure(options), lambda found: not found["is_met"])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    folder = FOLDER / "drain"
    shutil.rmtree(folder, ignore_errors=True)  # servers of a killed run may be there
    folder.mkdir(parents=True)
    conditions = {**machine(), **checkout(), "jobs": options.num, "history": options.history, "slots": options.slots}
    console.print(conditions)
    with running_servers(folder) as servers:
        drains = list(_drains(options, servers, folder))
    table = table_of(
        "drains of jobs that came at once", "decoding", "planned s", "took s", "ratio", "tokens", "drafted"
    )
    for drain in drains:
        figures = (f"{drain.planned_s:.1f}", f"{drain.actual_s:.1f}", f"{drain.ratio:.3f}")
        table.add_row(drain.decoding, *figures, str(drain.num_tokens), str(drain.num_drafted))
    console.print(table)
    return {
        "conditions": conditions,
        "drains": [{**asdict(drain), "ratio": drain.ratio} for drain in drains],
        "num_met": {mode: sum(d.is_met for d in drains if d.decoding == mode) for mode in options.decoding},
        "is_met": all(drain.is_met for drain in drains),
    }


def _drains(options: argparse.Namespace, servers: Servers, folder: Path) -> Iterator[Drain]:
    """Each mode in every round, so that a slower hour of the machine meets both."""
    prompts = prompts_of(options.prompts, seed=options.seed, max_characters=_MAX_CHARACTERS)
    if missing := sorted(set(options.tasks) - set(prompts)):
        raise ValueError(f"{options.prompts}: no prompts of {', '.join(missing)}")
    chosen = {task: prompts[task] for task in options.tasks}
    for seed in range(options.seed, options.seed + options.rounds):
        drawn = draw_jobs(chosen, num=options.num, num_history=options.history, num_warm_up=options.slots, seed=seed)
        rng = random.Random(seed)
        jobs = replace(drawn, history=_limited(drawn.history, rng), measured=_limited(drawn.measured, rng))
        for decoding in options.decoding:
            drain = _drained(servers, jobs, decoding, num_slots=options.slots, seed=seed, folder=folder)
            console.print(
                f"seed {seed}, {decoding}: planned {drain.planned_s:.1f} s, took {drain.actual_s:.1f} s, "
                f"{drain.num_drafted} of {options.num} jobs drafted"
            )
            yield drain


def _limited(jobs: Sequence[PromptJob], rng: random.Random) -> tuple[PromptJob, ...]:
    """Short outputs, so that a drain takes minutes on a CPU."""
    return tuple(replace(job, max_tokens=rng.randint(8, 24)) for job in jobs)


def _drained(servers: Servers, jobs: Jobs, decoding: str, *, num_slots: int, seed: int, folder: Path) -> Drain:
    with started_worker(
        REPOSITORY,
        servers,
        jobs.tasks,
        num_slots=num_slots,
        seed=seed,
        folder=folder / "runs",
        name=f"{decoding}-{seed}",
        timeout_s=300.0,
    ) as worker:
        client = worker.client
        client.send_all(jobs.warm_up, decoding="vanilla")
        client.wait(jobs.warm_up)
        begins_at, began = datetime.now(UTC), time.monotonic()
        client.send_all(jobs.history, decoding=decoding)
        client.wait(jobs.history)
        history_s = time.monotonic() - began
        with Database(SecretStr(worker.database_url)) as database:
            (seen,) = ArrivalStore(database).seen(begins_at, datetime.now(UTC))
        plan_s = planned_s(seen, Counter(job.task for job in jobs.measured), seed=seed)
        began = time.monotonic()
        client.send_all(jobs.measured, decoding=decoding)
        client.wait(jobs.measured)
        actual_s = time.monotonic() - began
    results = [client.results[job.job_id] for job in jobs.measured]
    if failed := [result.job_id for result in results if result.status != "succeeded"]:
        raise RuntimeError(f"{len(failed)} jobs did not succeed: {', '.join(failed[:5])}")
    num_tokens = sum(result.num_tokens for result in results)
    num_drafted = sum(result.decided is not None for result in results)
    return Drain(decoding, seed, plan_s, actual_s, num_tokens, num_drafted, history_s)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="folder with TASK.jsonl files")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="of configs/tasks.toml, with files there")
    parser.add_argument("--num", type=int, default=300, help="jobs that come at once and are judged")
    parser.add_argument("--history", type=int, default=200, help="jobs that the plan is made from")
    parser.add_argument("--slots", type=int, default=16, help="sequences that decode together")
    parser.add_argument("--rounds", type=int, default=5, help="drains of each way of decoding")
    parser.add_argument("--decoding", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seed", type=int, default=1, help="of prompts, limits and the worker's exploration")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
