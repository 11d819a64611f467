"""From what became of a job to the Result that is recorded and published. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from alphaloop.acceptance import EvidenceKey, prompt_bucket
from alphaloop.deciding.policy import Decision
from alphaloop.errors import AlphaloopError
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import DecodingReport, Failure, Result, Status, Timings, Usage
from alphaloop.store.outcomes import DecodeRun, Outcome, ShadowRun
from worker.engine import EngineIdentity, Generation, ShadowCounts
from worker.jobs.claiming import ClaimedJob


def succeeded(
    claimed: ClaimedJob,
    generation: Generation,
    decision: Decision,
    identity: EngineIdentity,
    *,
    queue_s: float,
    now: datetime,
    decode_batch_id: UUID | None = None,
) -> Outcome:
    """The outcome of a decoded job, with its counts."""
    counts = generation.counts
    result = Result(
        **_addressed(claimed, now),
        status=Status.SUCCEEDED,
        text=generation.text,
        finish_reason=generation.finish_reason,
        usage=Usage(
            prompt_tokens=generation.num_prompt_tokens,
            completion_tokens=counts.num_tokens,
            total_tokens=generation.num_prompt_tokens + counts.num_tokens,
        ),
        timings=Timings(
            queue_s=queue_s,
            time_to_first_token_s=generation.time_to_first_token_s,
            wall_s=generation.wall_s,
            device_s=generation.device_s,
        ),
        decoding=DecodingReport(
            mode=decision.mode,
            drafter=decision.drafter,
            draft_revision=decision.draft_revision,
            target_revision=identity.target_revision,
            engine=identity.engine,
            num_draft_tokens=decision.num_draft_tokens,
            reason=decision.reason.value,
            explanation=decision.explanation,
            rounds=counts.rounds,
            num_empty_rounds=counts.num_empty_rounds,
            proposed=counts.proposed,
            trials=counts.trials,
            accepts=counts.accepts,
            num_cropped=counts.num_cropped,
            batch_size=generation.batch_size,
        ),
    )
    run = _run(claimed, generation, decision, identity, queue_s=queue_s, now=now, decode_batch_id=decode_batch_id)
    shadows = tuple(_shadow(run, counts) for counts in generation.shadows)
    return _outcome(claimed, result, run, shadows)


def ended(claimed: ClaimedJob, status: Status, failure: Failure, *, now: datetime) -> Outcome:
    """The outcome of a job that was not decoded to its end."""
    return _outcome(claimed, Result(**_addressed(claimed, now), status=status, error=failure), None)


def expired(claimed: ClaimedJob) -> Failure:
    """What the result of a job says that was not started by its deadline."""
    return Failure(code="expired", message=f"not started by its deadline, {claimed.ready.job.deadline}")


def failure_of(error: AlphaloopError) -> Failure:
    """What a result says of an error."""
    return Failure(code=error.code, message=error.message, hint=error.hint)


def _addressed(claimed: ClaimedJob, now: datetime) -> dict[str, Any]:
    job = claimed.ready.job
    return {
        "job_id": job.job_id,
        "task": job.task,
        "custom_id": job.custom_id,
        "batch_id": job.batch_id,
        "segment": job.segment,
        "purpose": job.purpose,
        "attempt": claimed.attempt,
        "recorded_at": now,
    }


def _outcome(
    claimed: ClaimedJob, result: Result, run: DecodeRun | None, shadows: tuple[ShadowRun, ...] = ()
) -> Outcome:
    return Outcome(
        job_id=claimed.job_id,
        attempt=claimed.attempt,
        status=result.status.value,
        result=result.encode(),
        topic=RESULTS,
        headers=_headers(claimed),
        run=run,
        shadows=shadows,
    )


def _headers(claimed: ClaimedJob) -> Mapping[str, str]:
    """The trace of the producer goes on in the result; everything else about the job is in the value."""
    carried = {}
    for name, value in claimed.ready.delivery.record.headers:
        if name in ("traceparent", "tracestate"):
            carried[name] = (value or b"").decode("utf-8", "replace")
    return {"content-type": "application/json", **carried}


def _run(
    claimed: ClaimedJob,
    generation: Generation,
    decision: Decision,
    identity: EngineIdentity,
    *,
    queue_s: float,
    now: datetime,
    decode_batch_id: UUID | None,
) -> DecodeRun:
    job, sampling = claimed.ready.job, claimed.ready.prepared.sampling
    key = EvidenceKey(
        task=job.task,
        segment=job.segment or "",
        target_revision=identity.target_revision,
        drafter=decision.drafter or "",
        draft_revision=decision.draft_revision or "",
        engine=identity.engine,
        sampling_bucket=sampling.bucket,
        prompt_bucket=prompt_bucket(generation.num_prompt_tokens),
    )
    return DecodeRun(
        key=key,
        decode_batch_id=decode_batch_id or uuid4(),
        purpose=job.purpose.value,
        mode=decision.mode.value,
        num_draft_tokens=decision.num_draft_tokens,
        reason=decision.reason.value,
        device=identity.device,
        counts=generation.counts,
        chances=generation.chances,
        num_prompt_tokens=generation.num_prompt_tokens,
        num_tokens=generation.counts.num_tokens,
        batch_size=generation.batch_size,
        queue_s=queue_s,
        time_to_first_token_s=generation.time_to_first_token_s,
        wall_s=generation.wall_s,
        device_s=generation.device_s,
        decoded_at=now,
    )


def _shadow(run: DecodeRun, shadow: ShadowCounts) -> ShadowRun:
    """The same job under the key of a drafter that did not decode it."""
    return ShadowRun(
        key=replace(run.key, drafter=shadow.drafter, draft_revision=shadow.draft_revision),
        num_draft_tokens=shadow.num_draft_tokens,
        counts=shadow.counts,
        chances=shadow.chances,
        num_prompt_tokens=run.num_prompt_tokens,
        num_output_tokens=run.num_tokens,
        decoded_at=run.decoded_at,
    )
