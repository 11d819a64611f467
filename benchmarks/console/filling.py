"""A day of a busy system, written by the store's own functions: what the pages show."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from alphaloop.costs import CostPoint
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.goodput import Alternative
from alphaloop.experiment.figures import SpeedupSubject
from alphaloop.experiment.observe import Phase, Slice, Treatment
from alphaloop.messages import Mode
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.decode_runs import JobCounts
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.outcomes import record_counts
from alphaloop.store.switchback import SliceRow, SwitchbackStore
from alphaloop.store.workers import WorkerLoad
from benchmarks.console.findings import find
from benchmarks.console.jobs import hold_jobs, run_of
from benchmarks.console.plans import (
    DEVICE,
    DRAFT,
    DRAFTER,
    ENGINE,
    HOST,
    ROUND_S,
    RUNNING,
    TARGET,
    WORKERS,
    TaskPlan,
)

_HALF_LIFE: Final = timedelta(days=3)


def fill(
    database: Database, tasks: Sequence[TaskPlan], *, now: datetime, seed: int = 1, has_drift: bool = True
) -> list[WorkerLoad]:
    """Write the day before `now`, and what runs at this moment. Returns what the workers say of themselves."""
    rng = random.Random(seed)
    _measured_engine(database)
    for plan in tasks:
        _traffic(database, plan, now, rng)
    _slices(database, [plan for plan in tasks[:6] if plan.speculates or plan.task == "translation"], now)
    SwitchbackStore(database).refresh(now)
    _choices(database, tasks, now)
    if has_drift:
        find(database, now)
    return hold_jobs(database, tasks[:6], now, rng)


def _measured_engine(database: Database) -> None:
    registry = DraftRegistry(database)
    registry.register(DRAFTER, DRAFT, TARGET)
    # Wider than six positions a pass of the target is no longer nearly free: k=5 is the best.
    points = [
        CostPoint(drafter, batch, width, base + 0.15 * batch + slope * (width + 4 * max(0, width - 6)), 9)
        for drafter, base, slope in ((None, 18.0, 1.0), (DRAFTER, 0.2, 0.01))
        for batch in (1, 8, 16)
        for width in (1, 4, 6, 9, 13)
    ]
    CostStore(database).save(HOST, DEVICE, ENGINE, TARGET, {DRAFTER: DRAFT}, points)


def _traffic(database: Database, plan: TaskPlan, now: datetime, rng: random.Random) -> None:
    """Jobs over the day, none for two hours in the middle of it."""
    hours = range(1, 24) if plan.task.startswith("customer") else [h / 3 for h in range(1, 72)]
    moments = [now - timedelta(hours=h, seconds=rng.uniform(0, 900)) for h in hours if not 11 < h < 13]
    if plan.task.startswith("customer"):
        moments = rng.sample(moments, 4)
    else:
        moments += [now - timedelta(seconds=rng.uniform(1, 55)) for _ in range(6)]
    jobs = [
        JobCounts(f"{plan.task}-{number}", 1, run_of(plan, at, now, rng)) for number, at in enumerate(sorted(moments))
    ]
    with database.begin() as connection:
        record_counts(connection, jobs, _HALF_LIFE, recorded_at=now)


def _slices(database: Database, tasks: Sequence[TaskPlan], now: datetime) -> None:
    rng, rows = random.Random(2), []
    for plan in tasks:
        subject = SpeedupSubject(plan.task, "greedy", TARGET, ENGINE, HOST, DEVICE, DRAFTER, DRAFT)
        for block in range(40 if plan.speculates else 5):
            begins = now - timedelta(minutes=30 * block + 5)
            for number, phase in enumerate((Phase.BETWEEN, Phase.BEFORE, Phase.CONTROL, Phase.AFTER)):
                is_control = phase is Phase.CONTROL
                num_rounds = 800 if phase is Phase.BETWEEN else 16
                num = num_rounds * RUNNING
                cost = 1.0 if is_control else 1.25 * rng.uniform(0.94, 1.06)
                one = Slice(
                    block_id=f"{plan.task}-{block}",
                    task=plan.task,
                    phase=phase,
                    treatment=Treatment(DRAFTER, 5),
                    started_at=begins + timedelta(seconds=number),
                    num_rounds=num_rounds,
                    num_sequence_rounds=num,
                    num_tokens=num if is_control else round(num * plan.tokens_per_round),
                    num_proposed=0 if is_control else num * 5,
                    sequence_s=num * ROUND_S * cost,
                    sum_running=num_rounds * RUNNING,
                    sum_context=num_rounds * 180.0,
                )
                rows.append(SliceRow(subject, one, WORKERS[0]))
    SwitchbackStore(database).add(rows)


def _choices(database: Database, tasks: Sequence[TaskPlan], now: datetime) -> None:
    log = DecisionLog(database)
    for plan in tasks:
        vanilla = Alternative(None, 0, 1.0, 20.0, 1.0, 1.0, 1.0)
        gain = plan.tokens_per_round / 1.25
        drafted = Alternative(DRAFTER, 5, plan.tokens_per_round, 25.0, gain, gain * 0.9, gain * 1.12)
        first = Decision(
            Mode.VANILLA,
            None,
            None,
            0,
            Reason.NO_HISTORY,
            "no job of this task yet",
            (vanilla, drafted),
        )
        log.record_change(plan.task, TARGET, DEVICE, "greedy", RUNNING, first, WORKERS[0])
        if plan.speculates:
            told = f"lookup, k=5 is expected at {gain:.2f}x vanilla ({gain * 0.9:.2f} to {gain * 1.12:.2f})"
            second = Decision(Mode.SPECULATIVE, DRAFTER, DRAFT, 5, Reason.FASTER, told, (drafted, vanilla))
        else:
            told = f"lookup, k=5 is expected at {gain:.2f}x vanilla, which is not faster beyond noise"
            second = Decision(Mode.VANILLA, None, None, 0, Reason.NOT_FASTER, told, (vanilla, drafted))
        log.record_change(plan.task, TARGET, DEVICE, "greedy", RUNNING, second, WORKERS[0])
