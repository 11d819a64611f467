"""One history, three ways to a decision: the worker's decider, its snapshots and the simulator's rule."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Final, cast
from uuid import uuid4

import numpy as np
import pytest

from alphaloop.acceptance import EvidenceKey, prompt_bucket
from alphaloop.costs import CostPoint
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.evidence import EvidenceSnapshot, EvidenceSums, together
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.snapshot import SessionFacts, Snapshot, SnapshotEncoder, decode
from alphaloop.engine import PreparedJob, Sampling
from alphaloop.messages import Mode, Origin, parse_job
from alphaloop.settings import TaskSettings
from alphaloop.store.decision_inputs import AcceptanceStateStore, DraftRegistry, StateRow, with_jobs
from alphaloop.store.job_counts import DecodeRun
from benchmarks.policy.ours import HALF_LIFE, BudgetsInMemory, ChoicesInMemory, Ours
from benchmarks.policy.play import Batch, Choice, Decoded
from benchmarks.policy.scenario import Acceptance, Device, Phase, Scenario, Surface, Task
from benchmarks.policy.stream import Cell, Counts, Outcomes
from tests.fakes import FakeEngine
from tests.fixtures.runs import decode_run, simulated_counts, vanilla_counts
from worker.admission import lane_of
from worker.costs.learning import LiveCosts
from worker.deciding.decider import Decider
from worker.deciding.evidence_cache import EvidenceCache

BEGIN: Final = datetime(2026, 3, 1, tzinfo=UTC)
#: Longer than any of them keeps a posterior: they differ in that alone.
STEP: Final = timedelta(hours=7)
FACTS: Final = SessionFacts("w", "h", "d", "e", "t", 8, HALF_LIFE, 0.02)
DRAFTERS: Final = (DrafterState("lookup", "r1", 6), DrafterState("draft", "r1", 4))
NUM_JOBS: Final = 8
TASK_TOKENS: Final = 40
#: What the simulator allows a job of such a task.
MAX_TOKENS: Final = 100
DEVICE: Final = Device(
    target=Surface(widths=(1, 4, 8), by_batch={1: (10.0, 11.0, 14.0), 8: (12.0, 22.0, 40.0)}),
    drafters={
        "lookup": Surface(widths=(2, 8), by_batch={1: (0.1, 0.1), 8: (0.2, 0.2)}),
        "draft": Surface(widths=(2, 8), by_batch={1: (1.5, 9.0), 8: (2.0, 10.0)}),
    },
)


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
        changed = {key: with_jobs(key, self._folded.get(key), added, self._half_life) for key, added in rows.items()}
        self._folded |= changed
        return [*changed.values()]


@dataclass(frozen=True)
class Past:
    """Jobs that were decided together, and how history decoded them."""

    task: str
    at: datetime
    runs: tuple[DecodeRun, ...]


def histories(rng: random.Random, num_batches: int, *, is_mixed: bool) -> list[Past]:
    """Two tasks. Gold's drafts are accepted, free's are not. Mixed batches hold both segments and prompt lengths."""
    found = []
    for number in range(num_batches):
        task, at = rng.choice(["code", "chat"]), BEGIN + number * STEP
        drafter, k = rng.choice([("", 0), ("lookup", 3), ("lookup", 6), ("draft", 2)])
        same = rng.choice(["gold", "free"]), rng.choice([120, 600])
        runs = []
        for index in range(NUM_JOBS):
            segment, prompt = (("gold", "free")[index % 2], (120, 600)[index // 4]) if is_mixed else same
            alpha = (0.85 if segment == "gold" else 0.1) * (1.0 if task == "code" else 0.8)
            counts = simulated_counts(rng, [alpha] * k, 15) if drafter else vanilla_counts(30)
            run = decode_run(
                counts,
                task=task,
                drafter=drafter,
                revision="r1",
                mode=Mode.SPECULATIVE if drafter else Mode.VANILLA,
                segment=segment,
                prompt_bucket=prompt_bucket(prompt),
                at=at,
            )
            runs.append(replace(run, num_prompt_tokens=prompt, batch_size=NUM_JOBS))
        found.append(Past(task, at, tuple(runs)))
    return found


def by_worker(
    history: Sequence[Past], points: Sequence[CostPoint], note: Callable[[Snapshot], None] | None = None
) -> Iterator[tuple[Decision, ...]]:
    engine, now = FakeEngine(drafters=DRAFTERS, num_slots=NUM_JOBS), BEGIN
    cache = EvidenceCache(
        cast(AcceptanceStateStore, None),  # nobody else adds evidence, so the cache never reads
        cast(DraftRegistry, None),
        target_revision=history[0].runs[0].key.target_revision,
        engine=engine.identity.engine,
        drafters={drafter.name: drafter.revision for drafter in DRAFTERS},
        half_life=HALF_LIFE,
    )
    ledger = LedgerInMemory(HALF_LIFE)
    costs = LiveCosts(points, half_life=32, save=lambda _: None, clock=lambda: 0.0)
    budgets = BudgetsInMemory(EvidenceSnapshot(HALF_LIFE), lambda: DRAFTERS)
    decider = Decider(engine, cache, ChoicesInMemory(), budgets, costs=costs, now=lambda: now, note=note)
    for number, past in enumerate(history):
        now = past.at
        jobs = [prepared(run, number, index) for index, run in enumerate(past.runs)]
        key = lane_of(jobs[0].job, jobs[0].sampling)
        yield decider.decide_each(key, jobs, TaskSettings(max_tokens=MAX_TOKENS), decision_id=uuid4())
        cache.take(ledger.record((run.key, run.evidence) for run in past.runs))


def prepared(run: DecodeRun, number: int, index: int) -> PreparedJob:
    value = json.dumps({"task": run.key.task, "body": {"prompt": "x"}, "segment": run.key.segment}).encode()
    job = parse_job(value, Origin("test", f"jobs.{run.key.task}", 0, number * NUM_JOBS + index), task=run.key.task)
    return PreparedJob(job, (1,) * run.num_prompt_tokens, Sampling(max_tokens=MAX_TOKENS, temperature=0.0))


def from_snapshots(snapshots: Sequence[Snapshot]) -> Iterator[tuple[bool, tuple[Decision, ...]]]:
    """The decision of each group, taken again from the document that a worker stores."""
    encoder = SnapshotEncoder(FACTS)
    for one in snapshots:
        document = json.loads(encoder.encode(one))
        subject = one.subject
        again, facts = decode(
            document, one.decision_id, one.decided_at, subject.task, subject.sampling_bucket, one.context.num_running
        )
        assert facts == FACTS
        yield again.is_whole, again.decide()


def by_simulator(history: Sequence[Past]) -> Iterator[Decision]:
    scenario = Scenario(
        name="test",
        story="",
        kind="stationary",
        device="test",
        tasks={
            name: Task(drafters={d.name: Acceptance(alpha=(0.5,)) for d in DRAFTERS}, tokens=TASK_TOKENS)
            for name in ("code", "chat")
        },
        draft_tokens={drafter.name: drafter.max_draft_tokens for drafter in DRAFTERS},
        phases=(Phase(jobs=1),),
        scored_free=(),
    )
    rule = Ours(scenario, DEVICE.points(), seed=1)
    for past in history:
        run = past.runs[0]
        cell = Cell(past.task, run.key.segment, run.key.sampling_bucket, run.key.prompt_bucket, run.num_prompt_tokens)
        batch = Batch(cell, len(past.runs), past.at)
        yield rule.decide(batch)
        rule.observe(batch, Choice(run.key.drafter or None, run.num_draft_tokens), decoded(past))


def decoded(past: Past) -> Decoded:
    """Its evidence is the history's. Its times are not looked at: the simulator's costs are calibrated."""
    ones = np.ones((1, len(past.runs)), dtype=np.int64)
    by_position = ones[..., None]
    counts = Counts(ones, ones, ones, by_position, by_position, by_position)
    ms = np.ones(1)
    sums = together([run.evidence for run in past.runs], HALF_LIFE)

    def evidence(drafter: str | None, k: int, now: datetime) -> EvidenceSums:
        assert ((drafter or ""), k, now) == (past.runs[0].key.drafter, past.runs[0].num_draft_tokens, past.at)
        return sums

    return Decoded(Outcomes(ms, ms, ms, lambda: counts), 0, (1,) * len(past.runs), evidence)


def test_worker_and_simulator_decide_alike(rng: random.Random) -> None:
    history = histories(rng, 80, is_mixed=False)
    points = DEVICE.points()
    decisions = []
    for worker, simulator in zip(by_worker(history, points), by_simulator(history), strict=True):
        # Only a worker needs the settings by running sequences.
        assert [replace(one, settings_by_running=()) for one in worker] == [simulator] * NUM_JOBS
        decisions.append(simulator)
    assert {Reason.EXPLORING, Reason.FASTER} <= {decision.reason for decision in decisions}


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_decision_is_taken_again_from_its_snapshot(rng: random.Random, is_mixed: bool) -> None:
    """With everything that it says, up to the digits of a snapshot: groups, trials and changes of the incumbent."""
    history, snapshots = histories(rng, 80, is_mixed=is_mixed), list[Snapshot]()
    decided = list(by_worker(history, DEVICE.points(), snapshots.append))
    num_apart = num_cut = 0
    for one, (is_whole, again) in zip(snapshots, from_snapshots(snapshots), strict=True):
        num_cut += not is_whole
        if not is_whole:
            continue
        assert [(its.setting, its.reason, its.kept) for its in again] == [
            (its.setting, its.reason, its.kept) for its in one.decisions
        ]
        for its, before in zip(again, one.decisions, strict=True):
            for way, was in zip(its.alternatives, before.alternatives, strict=True):
                assert way.speedup == pytest.approx(was.speedup, rel=1e-3)
                assert way.speedup_low == pytest.approx(was.speedup_low, rel=2e-3)
        num_apart += len({its.setting for its in again}) > 1
    assert num_cut < len(snapshots) / 5, "four groups of two drafters fit, but for some"
    assert {Reason.EXPLORING, Reason.FASTER} <= {its.reason for decisions in decided for its in decisions}
    assert not is_mixed or num_apart > 10
