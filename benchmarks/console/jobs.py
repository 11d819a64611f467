"""Jobs of a made-up system: what one counts, those that workers hold, and those that have ended."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from alphaloop.acceptance import AcceptanceCounts, EvidenceKey
from alphaloop.deciding.decision import Reason
from alphaloop.messages import Mode, Result, Status
from alphaloop.messages.result import DecodingReport, Failure, Timings, Usage
from alphaloop.store.database import Database
from alphaloop.store.decode_runs import DecodeRun
from alphaloop.store.jobs import ClaimRequest, JobStore
from alphaloop.store.outcomes import Outcome, OutcomeStore
from alphaloop.store.workers import WorkerLoad, WorkerStore
from benchmarks.console.plans import (
    DEVICE,
    DRAFT,
    DRAFTER,
    ENGINE,
    ROUND_S,
    RUNNING,
    TARGET,
    TARGET_NAME,
    WORKERS,
    TaskPlan,
)

_BATCH: Final = "batch-of-monday"


def run_of(plan: TaskPlan, at: datetime, now: datetime, rng: random.Random, k: int = 5) -> DecodeRun:
    """The counts of a job that was decoded at `at`."""
    is_spoken = plan.speculates or rng.random() < 0.3
    counts, alpha = (
        AcceptanceCounts().with_round(0, 0, num_emitted=1),
        plan.alpha_at(now - at) + 0.06 * rng.uniform(-1, 1),
    )
    while counts.num_tokens < 160:
        accepted = 0
        while is_spoken and accepted < k and rng.random() < alpha - 0.02 * accepted:
            accepted += 1
        counts = counts.with_round(k if is_spoken else 0, accepted, num_emitted=accepted + 1)
    wall_s = counts.rounds * ROUND_S * (1.1 if is_spoken else 1.0)
    return DecodeRun(
        key=EvidenceKey(
            task=plan.task,
            target_revision=TARGET,
            engine=ENGINE,
            sampling_bucket="greedy",
            prompt_bucket="<=256",
            drafter=DRAFTER if is_spoken else "",
            draft_revision=DRAFT if is_spoken else "",
        ),
        purpose="traffic",
        mode=Mode.SPECULATIVE if is_spoken else Mode.VANILLA,
        num_draft_tokens=k if is_spoken else 0,
        reason=Reason.FASTER if plan.speculates else Reason.EXPLORING if is_spoken else Reason.NOT_FASTER,
        device=DEVICE,
        counts=counts,
        num_prompt_tokens=rng.randint(80, 240),
        num_tokens=counts.num_tokens,
        batch_size=RUNNING,
        queue_s=rng.uniform(0.05, 0.8),
        time_to_first_token_s=0.05,
        wall_s=wall_s,
        device_s=wall_s / RUNNING,
        decoded_at=at,
    )


def hold_jobs(database: Database, tasks: Sequence[TaskPlan], now: datetime, rng: random.Random) -> list[WorkerLoad]:
    """Seventy claimed jobs of two workers; all but fifteen have ended. Returns what the workers say of themselves."""
    store, outcomes, loads = JobStore(database), OutcomeStore(database), list[WorkerLoad]()
    for owner in WORKERS:
        names = [(f"{rng.choice(tasks).task}-{rng.randrange(16**6):06x}", rng.choice(tasks)) for _ in range(35)]
        requests = [
            ClaimRequest(name, hashlib.sha256(name.encode()).digest(), plan.task, "", f"row-{i}", _BATCH, "traffic")
            for i, (name, plan) in enumerate(names)
        ]
        claims = {claim.job_id: claim for claim in store.claim(requests, owner=owner, lease_s=3600, max_attempts=3)}
        done = names[: 35 - rng.randint(5, 10)]
        ended = [ended_job(name, plan, claims[name].attempt, now, rng) for name, plan in done]
        outcomes.record(ended, owner=owner)
        running = [name for name, _ in names[len(done) :]][:RUNNING]
        tokens = {name: rng.randint(5, 150) for name in running}
        load = WorkerLoad(owner, DEVICE, TARGET_NAME, 8, 12, 35 - len(done), tokens, rng.uniform(600, 900))
        WorkerStore(database).say(load)
        loads.append(load)
    return loads


def ended_job(
    job_id: str, plan: TaskPlan, attempt: int, now: datetime, rng: random.Random, batch_id: str = _BATCH
) -> Outcome:
    """What a worker records of a job; a few have failed."""
    run = run_of(plan, now - timedelta(seconds=rng.uniform(0, 50)), now, rng)
    has_failed = rng.random() < 0.08
    counts = run.counts
    result = Result(
        job_id=job_id,
        status=Status.FAILED if has_failed else Status.SUCCEEDED,
        task=plan.task,
        batch_id=batch_id,
        text=None if has_failed else "The river keeps its own slow time.",
        finish_reason=None if has_failed else "stop",
        usage=Usage(
            prompt_tokens=run.num_prompt_tokens,
            completion_tokens=run.num_tokens,
            total_tokens=run.num_prompt_tokens + run.num_tokens,
        ),
        timings=Timings(queue_s=run.queue_s, time_to_first_token_s=0.05, wall_s=run.wall_s, device_s=run.device_s),
        decoding=DecodingReport(
            mode=Mode(run.mode),
            drafter=run.key.drafter or None,
            draft_revision=run.key.draft_revision or None,
            target_revision=TARGET,
            engine=ENGINE,
            num_draft_tokens=run.num_draft_tokens,
            reason=run.reason,
            explanation="lookup, k=5 is expected to be faster" if run.key.drafter else "vanilla is not slower",
            rounds=counts.rounds,
            num_empty_rounds=counts.num_empty_rounds,
            proposed=counts.proposed,
            trials=counts.trials,
            accepts=counts.accepts,
            num_cropped=counts.num_cropped,
            batch_size=RUNNING,
        ),
        error=Failure(code="decode_failed", message="a step of the engine failed three times") if has_failed else None,
        attempt=attempt,
        recorded_at=now,
    )
    return Outcome(job_id, attempt, result.status, result.encode(), "results", {}, run)
