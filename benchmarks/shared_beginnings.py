"""The order of admission with and without preference for prompts that begin like a running job's, on the real engine.

    python -m benchmarks.shared_beginnings --prompts FOLDER                      # prompts as they are
    python -m benchmarks.shared_beginnings --prompts FOLDER --characters 2000    # behind a text of each task
    python -m benchmarks.shared_beginnings --prompts FOLDER --characters 2000 --texts 4

All jobs wait at the beginning and are decoded vanilla. `--texts` is the number of texts in each task, one of which
stands before each of its prompts: the instructions of a task, or of its customers. Both orders take turns. The target's
time for a prompt is measured first. Last line: JSON.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from alphaloop.costs import CostKind, CostPoint, CostTable
from alphaloop.settings import load_settings
from benchmarks.jobs import PromptJob, draw_jobs, forced, read_folder
from benchmarks.paired import paired_ratio
from benchmarks.reporting import parser_of
from worker.admission import AdmissionQueue, beginnings_of, lane_of
from worker.decoding.engine import TransformersEngine, load_engine
from worker.engine import PreparedJob, Sampling

SLACKS_S: Final = (0.0, 10.0)
PROMPT_LENGTHS: Final = (64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Decoded:
    """What the engine needed for all jobs."""

    seconds: float
    cpu_s: float
    num_prompt_tokens_read: int
    longest_wait_by_task_s: dict[str, float]  #: between two admissions of a task with waiting jobs


def main() -> None:
    """Decode the jobs in both orders, round by round, and compare."""
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num", type=int, default=130)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--characters", type=int, default=0)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    engine = load_engine(load_settings(profile="local").models, num_slots=options.slots)
    points = (
        CostPoint(None, 1, length, engine.measure_prefill_ms(None, length, 5), 5, 0, CostKind.PREFILL)
        for length in PROMPT_LENGTHS
    )
    costs = CostTable(points)
    prompts = read_folder(options.prompts)
    runs: dict[float, list[Decoded]] = {slack_s: [] for slack_s in SLACKS_S}
    for seed in range(options.rounds):
        drawn = draw_jobs(prompts, num=options.num, num_history=0, num_warm_up=0, seed=seed).measured
        jobs = _with_texts(drawn, options.characters, options.texts, random.Random(seed))
        sampling = Sampling(max_tokens=1, temperature=0.0)
        prepared = [engine.prepare(job.as_job(), replace(sampling, max_tokens=job.max_tokens)) for job in jobs]
        for slack_s in SLACKS_S if seed % 2 else reversed(SLACKS_S):
            runs[slack_s].append(_decode(engine, prepared, costs, slack_s, options.slots))
            print(slack_s, runs[slack_s][-1], flush=True)
    plain, sharing = (runs[slack_s] for slack_s in SLACKS_S)
    print(f"seconds without over with: {paired_ratio([r.seconds for r in plain], [r.seconds for r in sharing])}")
    print(f"CPU without over with: {paired_ratio([r.cpu_s for r in plain], [r.cpu_s for r in sharing])}")
    print(json.dumps({str(slack_s): [asdict(run) for run in found] for slack_s, found in runs.items()}))


def _with_texts(jobs: Sequence[PromptJob], num_characters: int, num_texts: int, rng: random.Random) -> list[PromptJob]:
    """The jobs behind one of their task's texts, which are made of all prompts' words."""
    words = [word for job in jobs for word in job.prompt.split()]
    tasks = sorted({job.task for job in jobs})
    texts = {(task, n): " ".join(rng.choices(words, k=num_characters)) for task in tasks for n in range(num_texts)}
    found = []
    for job in jobs:
        text = texts[job.task, rng.randrange(num_texts)][:num_characters]
        found.append(replace(job, prompt=f"{text}\n\n{job.prompt}" if num_characters else job.prompt))
    return found


def _decode(
    engine: TransformersEngine, jobs: Sequence[PreparedJob], costs: CostTable, slack_s: float, num_slots: int
) -> Decoded:
    queue: AdmissionQueue[PreparedJob] = AdmissionQueue(
        num_slots=num_slots, read_s=lambda n: min(slack_s, costs.prefill_ms(None, n) / 1000)
    )
    lanes = {job.job.job_id: lane_of(job.job, job.sampling) for job in jobs}
    for job in jobs:
        lane, beginnings = lanes[job.job.job_id], beginnings_of(job.token_ids)
        queue.add(lane, job, priority=0, num_bytes=0, now=0.0, beginnings=beginnings)
    running: dict[str, PreparedJob] = {}
    num_read = 0
    began, began_cpu = time.perf_counter(), time.process_time()
    admitted_at = dict.fromkeys({lane.task for lane in lanes.values()}, began)
    longest_wait_s = dict.fromkeys(admitted_at, 0.0)
    while len(queue) or running:
        for lane, job in queue.next(num_slots - len(running), running=Counter(lanes[name] for name in running)):
            engine.admit(job, forced())
            running[job.job.job_id] = job
            now = time.perf_counter()
            longest_wait_s[lane.task] = max(longest_wait_s[lane.task], now - admitted_at[lane.task])
            admitted_at[lane.task] = now
        step = engine.step()
        num_by_task = Counter(lanes[name].task for name in running)
        queue.charge({task: number * step.wall_s / len(running) for task, number in num_by_task.items()})
        num_read += step.num_prefill_tokens
        for generation in step.finished:
            del running[generation.job_id]
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    return Decoded(seconds, cpu_s, num_read, {task: round(wait_s, 1) for task, wait_s in longest_wait_s.items()})


if __name__ == "__main__":
    main()
