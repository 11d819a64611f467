"""One measurement over an engine that is loaded: from the user's own prompts, by a plan, to its report.

A line of the prompts is read by the contract of the queue (alphaloop.job_lines) with three exceptions, because they may
have been written for another system: the task may be missing or unknown, `model` is ignored, and so are the fields that
say when or how a job is decoded.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Final

from alphaloop import page
from alphaloop.commands import AdvanceEvent, MeasureOrder, StageEvent, Tell
from alphaloop.engine import Engine, PreparedJob
from alphaloop.errors import ConfigError, DecodeFailed, MessageError
from alphaloop.files import reading
from alphaloop.job_lines import BadLine, JobLine, JobReader, Overrides
from alphaloop.messages import Purpose
from alphaloop.payoff.figures import VANILLA, Acceptance, Candidate, ShipVerdict, min_values
from alphaloop.payoff.report import Footprint, Report, Setup, best_of
from alphaloop.settings import Settings, TaskSettings
from worker.intake.validation import sampling_of
from worker.measuring.observing import ExactnessCheck, Measurements, Runner, Stopped, divide, turns
from worker.measuring.report import DrafterRecords, GreedySample, report_of

MIN_PROMPTS: Final = 10
FEW_PROMPTS: Final = 30
#: From here on a file is traffic, not a sample of it.
MAX_FILE_BYTES: Final = 256 << 20
NO_TASK: Final = "prompts"
NUM_SHOWN: Final = 10
#: Sampled prompts decoded greedy as well, to see what the temperature costs.
NUM_GREEDY: Final = 12


def read_lines(order: MeasureOrder, settings: Settings, say: Callable[[str], object] | None = None) -> list[JobLine]:
    """Every job of the order's file, `-` being standard input. Raises ConfigError with the first wrong lines."""
    task, file = order.task, order.prompts
    if task is not None and settings.tasks and task not in settings.tasks:
        raise ConfigError(f"--task: expected one of {', '.join(sorted(settings.tasks))}, found {task!r}")
    defaults = {"max_tokens": order.max_tokens, "temperature": order.temperature}
    overrides = Overrides(
        # Whatever model a line was written for, the configured target is what is measured.
        body={"model": None, **{name: value for name, value in defaults.items() if value is not None}},
        # Not traffic: a drafter that remembers earlier results would find each text in the one before.
        top={"purpose": Purpose.PROBE.value, "deadline": None, "decoding": "auto"},
    )
    reader = JobReader(settings.model_copy(update={"tasks": {}}), task=task or NO_TASK, overrides=overrides)
    with reading(file, max_bytes=MAX_FILE_BYTES, say=say) as source:
        items = list(reader.read(source.lines, source.name))
    if wrong := [item for item in items if isinstance(item, BadLine)]:
        raise _refusal([(bad.where, bad.error) for bad in wrong], len(items))
    return [item for item in items if isinstance(item, JobLine)]


def draw(lines: Sequence[JobLine], at_most: int, rng: random.Random) -> tuple[list[JobLine], list[str]]:
    """Distinct prompts, `at_most` of them at random, and what a person should know of it. Raises ConfigError.

    The same body twice is one prompt: bounds rest on prompts being independent of each other.
    """
    distinct = list({line.job.body.model_dump_json(): line for line in reversed(lines)}.values())[::-1]
    notes = []
    if len(distinct) < len(lines):
        notes.append(f"lines that repeat an earlier prompt, left out: {len(lines) - len(distinct)}")
    if len(distinct) < MIN_PROMPTS:
        raise ConfigError(
            f"expected at least {MIN_PROMPTS} different prompts, found {len(distinct)}",
            hint="30 to 100 of the prompts that you serve tell whether speculation pays for them",
        )
    if len(distinct) > at_most:
        notes.append(f"{at_most} of {len(distinct)} prompts, drawn at random; --num takes more")
        distinct = rng.sample(distinct, at_most)
    elif len(distinct) < FEW_PROMPTS:
        notes.append(f"{len(distinct)} prompts leave wide bounds; 30 to 100 tell more")
    return distinct, notes


def prepare(lines: Sequence[JobLine], engine: Engine, tasks: Mapping[str, TaskSettings]) -> list[PreparedJob]:
    """Every job tokenized, with its task's settings where it says nothing itself. Raises ConfigError."""
    prepared: list[PreparedJob] = []
    wrong: list[tuple[str, MessageError]] = []
    for number, line in enumerate(lines):
        # Draws follow from the job_id, so it must not change from run to run.
        job = line.job.model_copy(update={"job_id": f"measured-{number}"})
        try:
            task = engine.sampling_defaults.applied_to(tasks.get(job.task, TaskSettings()))
            prepared.append(engine.prepare(job, sampling_of(job, task)))
        except MessageError as error:
            error.field = line.named_in_line(error.field)
            wrong.append((line.where, error))
    if wrong:
        raise _refusal(wrong, len(lines))
    return prepared


def _refusal(wrong: Iterable[tuple[str, MessageError]], num_lines: int) -> ConfigError:
    problems = [
        f"{where}: {error.field}: {error.message}" if error.field else f"{where}: {error.message}"
        for where, error in wrong
    ]
    shown = "\n  ".join(problems[:NUM_SHOWN])
    more = f"\n  and {len(problems) - NUM_SHOWN} more" if len(problems) > NUM_SHOWN else ""
    return ConfigError(
        f"{len(problems)} of {num_lines} prompts cannot be measured:\n  {shown}{more}",
        hint='a line is {"prompt": …}, a job, or a line of an OpenAI batch file; see ' + page("guides/enqueue.md"),
    )


@dataclass(frozen=True, slots=True)
class MeasuringPlan:
    """What is measured on what."""

    prepared: Sequence[PreparedJob]
    candidates: Sequence[Candidate]
    batch: int
    num_repeats: int
    bar: float
    seed: int

    @property
    def num_turns(self) -> int:
        """How often every candidate has a batch to decode."""
        return -(-len(self.prepared) // self.batch) * self.num_repeats

    @property
    def num_texts(self) -> int:
        """Texts in all, vanilla's among them."""
        return len(self.prepared) * self.num_repeats * (len(self.candidates) + 1)


def refuse_few(num_prompts: int, batch: int, num_candidates: int) -> None:
    """Raise ConfigError where batches are too few for any bounds: prompts that share passes are one observation."""
    needed = min_values(num_candidates)
    if -(-num_prompts // batch) < needed:
        raise ConfigError(
            f"expected at least {needed} batches to bound {num_candidates} candidates, found "
            f"{-(-num_prompts // batch)}: {num_prompts} prompts at --batch {batch}",
            hint=f"give at least {(needed - 1) * batch + 1} prompts, or a smaller --batch",
        )


@dataclass(eq=False)
class MeasuringSession:
    """Runs a plan, and reports its stages and the texts done."""

    engine: Engine
    plan: MeasuringPlan
    _: KW_ONLY
    should_stop: Callable[[], bool]
    tell: Tell = lambda event: None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._runner = Runner(self.engine, self.plan.prepared, should_stop=self.should_stop, clock=self.clock)
        self.measured = Measurements([VANILLA, *self.plan.candidates])
        self.failure: DecodeFailed | None = None  #: what ended it early

    def run(self) -> None:
        """Warm up and measure, until done, stopped, or a step fails; `measured` holds what was finished."""
        plan = self.plan
        rng = random.Random(plan.seed)
        blocks = divide(len(plan.prepared), plan.batch, rng)
        try:
            self.tell(StageEvent(name="warming up"))
            self._runner.warm_up(blocks[0], plan.candidates)
            self.tell(StageEvent(name="measuring", total=plan.num_texts))
            order = turns(blocks, plan.candidates, plan.num_repeats, rng)
            self._runner.run(order, self.measured, lambda num: self.tell(AdvanceEvent(num=num)))
        except Stopped:
            self.measured.is_interrupted = True
        except DecodeFailed as error:
            self.measured.is_interrupted = True
            self.failure = error

    def report(self, records: DrafterRecords, footprint: Callable[[], Footprint], notes: Sequence[str]) -> Report:
        """Compare the texts, look into temperature where prompts are sampled, and judge. There must be a turn."""
        self.tell(StageEvent(name="comparing texts"))
        plan, measured, identity = self.plan, self.measured, self.engine.identity
        check, truths = ExactnessCheck(self._runner, plan.prepared, identity.dtype), measured.generations(VANILLA)
        exactness = {c: check.compare(truths, measured.generations(c)) for c in plan.candidates}
        setup = Setup(
            identity=identity,
            num_prompts=len(plan.prepared),
            prompt_tokens=statistics.median(job.num_prompt_tokens for job in plan.prepared),
            max_tokens=max(job.sampling.max_tokens for job in plan.prepared),
            temperature=max(job.sampling.temperature for job in plan.prepared),
            batch=plan.batch,
            num_repeats=plan.num_repeats,
            bar=plan.bar,
            seed=plan.seed,
        )

        def made(greedy: Mapping[str, GreedySample]) -> Report:
            return report_of(
                setup,
                measured,
                exactness=exactness,
                greedy=greedy,
                records=records,
                footprint=footprint(),
                notes=notes,
                num_turns_planned=plan.num_turns,
            )

        report = made({})
        greedy = self._greedy(report)
        return made(greedy) if greedy else report

    def _greedy(self, report: Report) -> dict[str, GreedySample]:
        """By drafter with nothing to ship, some of the sampled prompts decoded greedy at its best k."""
        seen = dict.fromkeys(number for number, _ in self.measured.generations(VANILLA))
        prepared = self.plan.prepared
        sampled = [number for number in seen if prepared[number].sampling.temperature > 0][:NUM_GREEDY]
        if not sampled or self.measured.is_interrupted:
            return {}
        self.tell(StageEvent(name="sampling against greedy"))
        jobs = [
            replace(prepared[number], sampling=replace(prepared[number].sampling, temperature=0.0))
            for number in sampled
        ]
        samples = {}
        for drafter in dict.fromkeys(row.candidate.drafter or "" for row in report.rows):
            best = best_of(report.rows, drafter)
            if best.judgement.verdict is ShipVerdict.SHIP:
                continue
            try:
                generations, _, _ = self._runner.decode(jobs, best.candidate)
            except Stopped:
                break
            greedy = [(n, text.counts) for n, text in zip(sampled, generations, strict=True) if text.is_counted]
            texts = self.measured.generations(best.candidate)
            own = [(n, text.counts) for n, text in texts if n in sampled and text.is_counted]
            samples[drafter] = GreedySample(Acceptance.of(greedy), Acceptance.of(own))
        return samples
