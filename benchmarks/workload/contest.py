"""Decoding every block with every setting; one of them is what a worker decides, from its own runs alone."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.kafka.offsets import Record
from alphaloop.messages import Mode, Origin, parse_job
from alphaloop.settings import Settings, TaskSettings
from benchmarks.workload.blocks import Block
from benchmarks.workload.ledger import LedgerInMemory
from worker import recording
from worker.admission import lane_of
from worker.claims import ClaimedJob
from worker.deciding.decider import Deciding
from worker.engine import Engine, Generation, PreparedJob, Sampling
from worker.intake.partitions import Delivery
from worker.intake.validation import ReadyJob

ADAPTIVE: Final = "alphaloop"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to decode everything; k = 0 is vanilla."""

    drafter: str | None
    num_draft_tokens: int

    @classmethod
    def parse(cls, text: str) -> Setting:
        """`vanilla`, or `DRAFTER:K`."""
        if text == "vanilla":
            return cls(None, 0)
        drafter, _, k = text.partition(":")
        return cls(drafter, int(k))

    def __str__(self) -> str:
        return "vanilla" if self.drafter is None else f"{self.drafter}:{self.num_draft_tokens}"

    def decision(self, revision: str | None) -> Decision:
        """As a worker would be told."""
        mode = Mode.VANILLA if self.drafter is None else Mode.SPECULATIVE
        return Decision(mode, self.drafter, revision, self.num_draft_tokens, Reason.FORCED, "a static setting")


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
        statics: Sequence[Setting],
        *,
        max_tokens: int,
        rng: random.Random,
    ) -> None:
        self._engine = engine
        self._decider = deciding.decider
        self._costs = deciding.costs
        self._evidence = deciding.evidence_cache
        self._ledger = LedgerInMemory(timedelta(days=Settings().worker.history_half_life_days))
        self._statics = statics
        self._max_tokens = max_tokens
        self._rng = rng
        self._revisions = {drafter.name: drafter.revision for drafter in engine.drafters}
        self._num_decoded = 0
        self._orders: dict[tuple[str, int], list[list[Setting | None]]] = {}

    def play(self, block: Block) -> list[Played]:
        """The block, decoded by all."""
        turns = self._orders.setdefault((block.task, len(block.prompts)), [])
        if not turns:
            names: list[Setting | None] = [None, *self._statics]
            self._rng.shuffle(names)
            turns += [names[shift:] + names[:shift] for shift in range(len(names))]
            self._rng.shuffle(turns)
        return [self.play_adaptive(block) if one is None else self._static(block, one) for one in turns.pop()]

    def _static(self, block: Block, setting: Setting) -> Played:
        jobs = self._jobs(block)
        began = time.perf_counter()
        decision = setting.decision(self._revisions.get(setting.drafter or ""))
        generations = self._decode(jobs, [decision] * len(jobs), is_ours=False)
        seconds = time.perf_counter() - began
        return self._played(block, str(setting), generations, seconds, str(setting), Reason.FORCED)

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
        choices = dict.fromkeys(str(Setting(one.drafter, one.num_draft_tokens)) for one in decisions)
        played = self._played(block, ADAPTIVE, generations, seconds, " and ".join(choices), decisions[0].reason)
        return replace(played, deciding_s=seconds - (decoded - decided))

    def _jobs(self, block: Block) -> list[PreparedJob]:
        made = []
        for prompt in block.prompts:
            self._num_decoded += 1
            body = {"messages": [{"role": "user", "content": prompt}]}
            value = json.dumps({"task": block.task, "body": body}).encode()
            topic = f"jobs.{block.task}"
            job = parse_job(value, Origin("benchmark", topic, 0, self._num_decoded), task=block.task)
            made.append(self._engine.prepare(job, Sampling(max_tokens=self._max_tokens, temperature=0.0)))
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
        self._evidence.take(self._ledger.record(one for outcome in ended for one in outcome.evidence))
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
