"""Prompts that begin alike, on the real engine: the order of admission, and beginnings that stay when nobody runs.

    python -m benchmarks.shared_beginnings --prompts FOLDER                      # prompts as they are
    python -m benchmarks.shared_beginnings --prompts FOLDER --characters 2000    # behind a text of each task
    python -m benchmarks.shared_beginnings --prompts FOLDER --characters 2000 --texts 4
    python -m benchmarks.shared_beginnings --prompts FOLDER --resident           # a template, and rag's passages

All jobs wait at the beginning and are decoded vanilla. `--texts` is the number of texts in each task, one of which
stands before each of its prompts: the instructions of a task, or of its customers. Both orders take turns. The target's
time for a prompt is measured first. Last line: JSON.

With `--resident` the engine without resident beginnings and the one with them take turns. Nobody runs between two jobs
one by one, nor between two bursts of as many jobs as there are slots. `template`: 1,500 tokens before each of the
folder's prompts. `rag`: eight passages of rag.jsonl, each before questions of other prompts. Two jobs had each
beginning before anything is measured. Bars: time to first token of jobs one by one at most .3 x, whole bursts 1.2 x as
fast.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from alphaloop.costs import CostKind, CostPoint, CostTable
from alphaloop.messages import Job
from alphaloop.settings import load_settings
from benchmarks.jobs import PromptJob, draw_jobs, forced, read_folder, without_residents
from benchmarks.paired import paired_ratio
from benchmarks.reporting import checkout, machine, parser_of
from worker.admission import AdmissionQueue, Line, beginnings_of, lane_of
from worker.decoding.engine import TransformersEngine, load_engine
from worker.engine import PreparedJob, Sampling

SLACKS_S: Final = (0.0, 10.0)
PROMPT_LENGTHS: Final = (64, 256, 1024)
TEMPLATE_TOKENS: Final = 1500
NUM_PASSAGES: Final = 8
PASSAGE_CHARACTERS: Final = 4000
QUESTION_CHARACTERS: Final = 160
_NUMBERS: Final = count()
MOST_FIRST: Final = 0.3
LEAST_SPEED: Final = 1.2


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
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer, with --resident")
    options = parser.parse_args()
    if options.resident:
        _compare_resident(options.prompts, options.slots, options.rounds, options.tokens)
        return
    engine = load_engine(without_residents(load_settings(profile="local").models), num_slots=options.slots)
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


def _compare_resident(folder: Path, num_slots: int, num_rounds: int, num_tokens: int) -> None:
    models = load_settings(profile="local").models
    engines = {
        "without": load_engine(without_residents(models), num_slots=num_slots),
        "with": load_engine(models, num_slots=num_slots),
    }
    prompts = read_folder(folder)
    if "rag" not in prompts:
        raise ValueError(f"expected rag.jsonl in {folder}, found {', '.join(prompts)}")
    found: dict[str, Any] = {}
    for name, drawn in (("template", _behind_a_template), ("rag", _about_passages)):
        first: dict[str, list[float]] = {one: [] for one in engines}
        burst: dict[str, list[float]] = {one: [] for one in engines}
        num_spared = 0
        for seed in range(num_rounds):
            texts = drawn(prompts, engines["with"], num_slots, random.Random(seed))
            for engine in engines.values():
                engine.abandon()
                _run(engine, [texts[:NUM_PASSAGES], texts[NUM_PASSAGES : 2 * NUM_PASSAGES]], num_tokens)
            measured = texts[2 * NUM_PASSAGES :]
            alone = [[text] for text in measured[:num_slots]]
            together = [measured[begin : begin + num_slots] for begin in range(num_slots, len(measured), num_slots)]
            for which in ("without", "with") if seed % 2 else ("with", "without"):
                first[which].append(median(_run(engines[which], alone, num_tokens).first_token_s))
                done = _run(engines[which], together, num_tokens)
                burst[which].append(done.seconds)
                num_spared += done.num_spared
        found[name] = {
            "first_token_ratio": paired_ratio(first["with"], first["without"]).median,
            "speed_of_bursts": paired_ratio(burst["without"], burst["with"]).median,
            "first_token_s": {one: fmean(seconds) for one, seconds in first.items()},
            "burst_s": {one: fmean(seconds) for one, seconds in burst.items()},
            "num_spared_tokens": num_spared,
        }
        print(name, found[name], flush=True)
    kept = all(
        one["first_token_ratio"] <= MOST_FIRST and one["speed_of_bursts"] >= LEAST_SPEED for one in found.values()
    )
    bars = {"first_token_ratio": MOST_FIRST, "speed_of_bursts": LEAST_SPEED, "kept": kept}
    print(json.dumps({**found, "bars": bars, "machine": machine(), "checkout": checkout()}))


def _behind_a_template(
    prompts: dict[str, list[str]], engine: TransformersEngine, num_slots: int, rng: random.Random
) -> list[str]:
    """Prompts behind a text of TEMPLATE_TOKENS tokens, which is made of their words."""
    short = [one for found in prompts.values() for one in found if len(one) < PASSAGE_CHARACTERS // 10]
    words = [word for one in short for word in one.split()]
    template = " ".join(rng.choices(words, k=2 * TEMPLATE_TOKENS)).split(" ")
    low, high = 0, len(template)
    while low < high:
        middle = (low + high + 1) // 2
        num_tokens = len(engine.prepare(_job_of(" ".join(template[:middle])), Sampling(1, 0.0)).token_ids)
        low, high = (middle, high) if num_tokens <= TEMPLATE_TOKENS else (low, middle - 1)
    beginning = " ".join(template[:low])
    return [f"{beginning}\n\n{one}" for one in rng.sample(short, 2 * NUM_PASSAGES + 4 * num_slots)]


def _about_passages(
    prompts: dict[str, list[str]], engine: TransformersEngine, num_slots: int, rng: random.Random
) -> list[str]:
    """Passages in turn, each with the last words of another prompt behind it."""
    passages = [one[:PASSAGE_CHARACTERS] for one in rng.sample(prompts["rag"], NUM_PASSAGES)]
    questions = [one[-QUESTION_CHARACTERS:] for found in prompts.values() for one in found]
    drawn = rng.sample(questions, 2 * NUM_PASSAGES + 4 * num_slots)
    return [f"{passages[number % NUM_PASSAGES]}\n\n{question}" for number, question in enumerate(drawn)]


@dataclass(frozen=True, slots=True)
class _Ran:
    first_token_s: list[float]
    seconds: float
    num_spared: int


def _run(engine: TransformersEngine, groups: Sequence[Sequence[str]], num_tokens: int) -> _Ran:
    """Decode group behind group; nobody runs in between."""
    first_token_s, num_spared, seconds = [], 0, 0.0
    for group in groups:
        jobs = [
            engine.prepare(_job_of(text, f"job-{next(_NUMBERS)}"), Sampling(num_tokens, 0.0, ignore_eos=True))
            for text in group
        ]
        began = time.perf_counter()
        while jobs or engine.load().num_running:
            while jobs and engine.has_room(jobs[0]):
                engine.admit(jobs.pop(0), forced())
            step = engine.step()
            num_spared += step.num_resident_tokens
            first_token_s += [one.time_to_first_token_s for one in step.finished]
        seconds += time.perf_counter() - began
    return _Ran(first_token_s, seconds, num_spared)


def _job_of(text: str, job_id: str = "job") -> Job:
    return PromptJob(job_id, "rag", text, 1).as_job()


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
        for lane, job in queue.next(num_slots - len(running), running=Counter(Line(lanes[name]) for name in running)):
            engine.admit(job, forced())
            running[job.job.job_id] = job
            now = time.perf_counter()
            longest_wait_s[lane.task] = max(longest_wait_s[lane.task], now - admitted_at[lane.task])
            admitted_at[lane.task] = now
        step = engine.step()
        num_by_line = Counter(Line(lanes[name]) for name in running)
        queue.charge({line: number * step.wall_s / len(running) for line, number in num_by_line.items()})
        num_read += step.num_prefill_tokens
        for generation in step.finished:
            del running[generation.job_id]
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    return Decoded(seconds, cpu_s, num_read, {task: round(wait_s, 1) for task, wait_s in longest_wait_s.items()})


if __name__ == "__main__":
    main()
