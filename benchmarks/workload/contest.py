"""The workload's blocks, decoded with every setting in turn, and what the settings come to.

One of them is what a worker decides, from its own runs alone. Ratios are of whole blocks, with bounds.
"""

from __future__ import annotations

import random
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count, cycle
from pathlib import Path
from statistics import fmean
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.decision import Decision, DraftSetting, Reason
from alphaloop.deciding.evidence import HALF_LIFE, EvidenceSums
from alphaloop.engine import Engine, Generation, PreparedJob, Sampling
from alphaloop.kafka.offsets import Record
from alphaloop.settings import TaskSettings
from alphaloop.store.acceptance_state import StateRow, with_jobs
from benchmarks.jobs import PromptJob, forced, prompts_of, sample
from benchmarks.paired import bootstrap
from worker import recording
from worker.admission import lane_of
from worker.claims import ClaimedJob
from worker.deciding.decider import Deciding
from worker.intake.partitions import Delivery
from worker.intake.validation import ReadyJob

FILE: Final = Path(__file__).with_name("phases.toml")
_MOST_PROMPTS: Final = 200


class Phase(BaseModel):
    """Blocks of one load."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    batch: int = Field(ge=1)
    blocks: int = Field(ge=1)
    tasks: tuple[str, ...] = Field(min_length=1)
    prompts: Mapping[str, str] = {}  #: task → whose prompts, where they are not its own


@dataclass(frozen=True, slots=True)
class Block:
    """One batch of one task."""

    number: int
    phase: str
    task: str
    prompts: tuple[str, ...] = field(repr=False)


def read_phases(file: Path) -> list[Phase]:
    """The phases in their order. Raises OSError, and ValueError for what is no workload."""
    return [Phase.model_validate(phase) for phase in tomllib.loads(file.read_text("utf-8"))["phase"]]


def blocks(phases: list[Phase], folder: Path, *, seed: int, max_characters: int) -> Iterator[Block]:
    """Every block, tasks in turn; prompts in an order drawn by `seed`, from the start again when all were used."""
    rng = random.Random(seed)
    prompts = prompts_of(folder, seed=seed, max_characters=max_characters)
    sources: dict[str, Iterator[str]] = {}
    number = 0
    for phase in phases:
        for task in (phase.tasks[i % len(phase.tasks)] for i in range(phase.blocks)):
            source = phase.prompts.get(task, task)
            if source not in sources:
                if source not in prompts:
                    raise ValueError(f"expected prompts of at most {max_characters} characters of {source}, found none")
                drawn = sample(prompts[source], _MOST_PROMPTS, seed=seed)
                sources[source] = cycle(rng.sample(drawn, len(drawn)))
            yield Block(number, phase.name, task, tuple(next(sources[source]) for _ in range(phase.batch)))
            number += 1


class LedgerInMemory:
    """Evidence fades by `half_life`."""

    def __init__(self, half_life: timedelta) -> None:
        self._half_life = half_life
        self._ledger_ids = count(1)
        self._folded: dict[EvidenceKey, StateRow] = {}

    def record(self, jobs: Iterable[tuple[EvidenceKey, EvidenceSums]]) -> list[StateRow]:
        """Add jobs that are recorded together; returns the rows that changed."""
        rows: dict[EvidenceKey, list[tuple[int, EvidenceSums]]] = {}
        for key, evidence in jobs:
            rows.setdefault(key, []).append((next(self._ledger_ids), evidence))
        changed = {key: with_jobs(key, self._folded.get(key), its, self._half_life) for key, its in rows.items()}
        self._folded |= changed
        return [*changed.values()]


ADAPTIVE: Final = "alphaloop"


def setting_of(text: str) -> DraftSetting:
    """`vanilla`, or `DRAFTER:K`."""
    drafter, _, k = text.partition(":")
    return DraftSetting() if text == "vanilla" else DraftSetting(drafter, int(k))


def named(setting: DraftSetting) -> str:
    """The same the other way round."""
    return "vanilla" if setting.drafter is None else f"{setting.drafter}:{setting.num_draft_tokens}"


@dataclass(frozen=True, slots=True)
class Played:
    """What one setting made of one block. `seconds` are whole: deciding, reading the prompts, decoding, learning."""

    setting: str
    block: int
    phase: str
    task: str
    num_tokens: int
    seconds: float
    choice: str
    reason: str
    deciding_s: float = 0.0  #: of them, deciding and learning


class Contest:
    """One engine; settings take turns on it.

    Whoever is first meets the new shapes (1 to 2 % slower), so in the blocks of a task and load each setting is first,
    second and so on equally often, in orders that are drawn anew for each round of them.
    """

    def __init__(
        self,
        engine: Engine,
        deciding: Deciding,
        statics: Sequence[DraftSetting],
        *,
        max_tokens: int,
        rng: random.Random,
    ) -> None:
        self._engine = engine
        self._decider = deciding.decider
        self._costs = deciding.costs
        self._evidence = deciding.evidence_cache
        self._ledger = LedgerInMemory(HALF_LIFE)
        self._statics = statics
        self._max_tokens = max_tokens
        self._rng = rng
        self._revisions = {drafter.name: drafter.revision for drafter in engine.drafters}
        self._num_decoded = 0
        self._orders: dict[tuple[str, int], list[list[DraftSetting | None]]] = {}

    def play(self, block: Block) -> list[Played]:
        """The block, decoded by all."""
        turns = self._orders.setdefault((block.task, len(block.prompts)), [])
        if not turns:
            names: list[DraftSetting | None] = [None, *self._statics]
            self._rng.shuffle(names)
            turns += [names[shift:] + names[:shift] for shift in range(len(names))]
            self._rng.shuffle(turns)
        return [self.play_adaptive(block) if one is None else self._static(block, one) for one in turns.pop()]

    def _static(self, block: Block, setting: DraftSetting) -> Played:
        jobs = self._jobs(block)
        began = time.perf_counter()
        revision = self._revisions.get(setting.drafter or "") or ""
        decision = forced(setting.drafter, setting.num_draft_tokens, revision=revision)
        generations = self._decode(jobs, [decision] * len(jobs), is_ours=False)
        seconds = time.perf_counter() - began
        return self._played(block, named(setting), generations, seconds, named(setting), Reason.FORCED)

    def play_adaptive(self, block: Block) -> Played:
        """The block, decoded as the worker decides, who learns from it."""
        jobs = self._jobs(block)
        key = lane_of(jobs[0].job, jobs[0].sampling)
        began = time.perf_counter()
        decisions = self._decider.decide_each(key, jobs, TaskSettings())
        decided = time.perf_counter()
        generations = self._decode(jobs, decisions, is_ours=True)
        decoded = time.perf_counter()
        self._learn(jobs, generations, decisions)
        seconds = time.perf_counter() - began
        choices = dict.fromkeys(named(one.setting) for one in decisions)
        played = self._played(block, ADAPTIVE, generations, seconds, " and ".join(choices), decisions[0].reason)
        return replace(played, deciding_s=seconds - (decoded - decided))

    def _jobs(self, block: Block) -> list[PreparedJob]:
        made = []
        for prompt in block.prompts:
            self._num_decoded += 1
            job = PromptJob(f"benchmark-{self._num_decoded}", block.task, prompt, self._max_tokens)
            made.append(self._engine.prepare(job.as_job(), Sampling(max_tokens=self._max_tokens, temperature=0.0)))
        return made

    def _decode(self, jobs: Sequence[PreparedJob], decisions: Sequence[Decision], *, is_ours: bool) -> list[Generation]:
        for job, decision in zip(jobs, decisions, strict=True):
            self._engine.admit(job, decision)
        finished: list[Generation] = []
        while self._engine.load().num_running:
            step = self._engine.step()
            finished += step.finished
            if is_ours:
                self._costs.observe(step)
        return finished

    def _learn(
        self, jobs: Sequence[PreparedJob], generations: Sequence[Generation], decisions: Sequence[Decision]
    ) -> None:
        by_id = {job.job.job_id: (job, decision) for job, decision in zip(jobs, decisions, strict=True)}
        now = datetime.now(UTC)
        ended = [
            recording.succeeded(_claimed(job), generation, decision, self._engine.identity, queue_s=0.0, now=now)
            for generation in generations
            for job, decision in [by_id[generation.job_id]]
        ]
        self._evidence.take(self._ledger.record(one for outcome in ended for one in outcome.counted.evidence))
        self._decider.count_scored(ended)

    @staticmethod
    def _played(
        block: Block, setting: str, generations: Sequence[Generation], seconds: float, choice: str, reason: Reason
    ) -> Played:
        num_tokens = sum(generation.counts.num_tokens for generation in generations)
        return Played(setting, block.number, block.phase, block.task, num_tokens, seconds, choice, reason.value)


def _claimed(job: PreparedJob) -> ClaimedJob:
    record = Record(f"jobs.{job.job.task}", 0, 0, None, None, (), None)
    return ClaimedJob(ReadyJob(Delivery(record, 0), job, b"", lane_of(job.job, job.sampling)), 1)


@dataclass(frozen=True, slots=True)
class Compared:
    """The adaptive worker against the best static setting of the same blocks."""

    best_static: str
    tokens_per_s: float  #: ours
    ratio: float
    low: float  #: 95 % bounds
    high: float
    num_blocks: int

    def __str__(self) -> str:
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"


def rate(played: Iterable[Played]) -> float:
    """Tokens a second of all these blocks together."""
    pairs = [(one.num_tokens, one.seconds) for one in played]
    return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)


def rates(played: Sequence[Played], wanted: Callable[[Played], bool]) -> dict[str, float]:
    """Tokens a second by setting, over the blocks that are `wanted`."""
    by_setting: dict[str, list[Played]] = {}
    for one in played:
        if wanted(one):
            by_setting.setdefault(one.setting, []).append(one)
    return {setting: rate(its) for setting, its in by_setting.items()}


def compare(played: Sequence[Played], wanted: Callable[[Played], bool], *, against: str | None = None) -> Compared:
    """Ratio of total tokens a second; bounds by resampling whole blocks, every setting's share of a block together.

    `against` names the static setting; without it, it is the best over these very blocks, which is chosen with
    hindsight. Percentile bootstrap of a ratio of totals (Efron 1979).
    """
    found = rates(played, wanted)
    best = against or max((name for name in found if name != ADAPTIVE), key=lambda name: found[name])
    pairs = _by_block(played, wanted, best)
    low, high = bootstrap(pairs, _ratio)
    return Compared(best, found[ADAPTIVE], _ratio(pairs), low, high, len(pairs))


def timed_once(played: Sequence[Played]) -> list[Played]:
    """Every turn with the mean time of all turns that decoded its block with its setting, beside its own deciding.

    Texts are greedy, so such turns are one computation, and what they differ by is the machine's noise: a block where
    the adaptive worker chose the very static setting says nothing but what deciding costs. Common random numbers, as
    simulations call it; what remains uncertain are the blocks where choices differ.
    """
    decoding: dict[tuple[int, str], list[float]] = {}
    for one in played:
        decoding.setdefault((one.block, one.choice), []).append(one.seconds - one.deciding_s)
    return [replace(one, seconds=fmean(decoding[one.block, one.choice]) + one.deciding_s) for one in played]


def _by_block(played: Sequence[Played], wanted: Callable[[Played], bool], static: str) -> list[tuple[Played, Played]]:
    ours = {one.block: one for one in played if one.setting == ADAPTIVE and wanted(one)}
    theirs = {one.block: one for one in played if one.setting == static and wanted(one)}
    return [(ours[block], theirs[block]) for block in sorted(ours)]


def _ratio(pairs: Sequence[tuple[Played, Played]]) -> float:
    return rate(ours for ours, _ in pairs) / rate(theirs for _, theirs in pairs)
