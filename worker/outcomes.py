"""From a job's end to what is recorded of it: its Result, its row, and evidence of every drafter. Pure.

A row names the drafter that most rounds belong to. Where a server told what was drafted and accepted, but not in which
rounds, the sums are the evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid4

from alphaloop.acceptance import PREFILL, AcceptanceCounts, EvidenceKey, counts_from_sums, prompt_bucket
from alphaloop.deciding.policy import Decision
from alphaloop.errors import AlphaloopError
from alphaloop.kafka.topics import RESULTS
from alphaloop.messages import Failure, Mode, Purpose, Result, Status
from alphaloop.messages.result import encode_fields
from alphaloop.near_ties import tolerance_of
from alphaloop.probes import ProbeText
from alphaloop.store.decode_runs import DecodeRun, ShadowRun
from alphaloop.store.outcomes import Outcome
from worker.claims import ClaimedJob
from worker.engine import EngineIdentity, Generation, ShadowCounts

_SUCCEEDED: Final = Status.SUCCEEDED.value
_MOST_KEYS: Final = 4096  #: that are remembered


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
    run = _run_of(claimed, generation, decision, identity, queue_s=queue_s, now=now, decode_batch_id=decode_batch_id)
    shadows = (*(_shadow(run, scored) for scored in generation.shadows), *_drafted(run, generation))
    return _outcome(
        claimed,
        _SUCCEEDED,
        {
            "target": identity.target,
            "target_revision": identity.target_revision,
            "text": generation.text,
            "finish_reason": generation.finish_reason,
            "usage": {
                "prompt_tokens": run.num_prompt_tokens,
                "completion_tokens": run.num_tokens,
                "total_tokens": run.num_prompt_tokens + run.num_tokens,
            },
            "timings": {
                "queue_s": queue_s,
                "time_to_first_token_s": generation.time_to_first_token_s,
                "wall_s": generation.wall_s,
                "device_s": generation.device_s,
            },
            "decoding": {
                "mode": run.mode,
                **({"drafter": run.key.drafter} if run.key.drafter else {}),
                **({"draft_revision": run.key.draft_revision} if run.key.draft_revision else {}),
                "target_revision": identity.target_revision,
                "engine": identity.engine,
                "num_draft_tokens": run.num_draft_tokens,
                "reason": run.reason,
                "explanation": decision.explanation,
                "rounds": counts.rounds,
                "num_empty_rounds": counts.num_empty_rounds,
                "proposed": counts.proposed,
                "trials": counts.trials,
                "accepts": counts.accepts,
                "num_cropped": counts.num_cropped,
                "batch_size": generation.batch_size,
            },
        },
        now=now,
        run=run,
        shadows=shadows,
        probe_text=_probe_text(claimed, generation, identity),
    )


def ended(claimed: ClaimedJob, status: Status, failure: Failure, *, now: datetime) -> Outcome:
    """The outcome of a job that was not decoded to its end."""
    return _outcome(claimed, status.value, {"error": failure.model_dump(exclude_none=True)}, now=now)


def with_unacknowledged(outcome: Outcome, num_chunks: int) -> Outcome:
    """The outcome with a result that says that so many chunks may be missing, so that the final one has the text."""
    result = Result.decode(outcome.result).model_copy(update={"num_unacknowledged_chunks": num_chunks})
    return replace(outcome, result=result.encode())


def expired(claimed: ClaimedJob) -> Failure:
    """The failure in the result of a job that had not ended by its deadline."""
    return Failure(code="expired", message=f"not ended by its deadline, {claimed.ready.job.deadline}")


def failure_of(error: AlphaloopError) -> Failure:
    """The failure in a result because of an error."""
    return Failure(code=error.code, message=error.message, hint=error.hint)


def _outcome(
    claimed: ClaimedJob,
    status: str,
    fields: Mapping[str, Any],
    *,
    now: datetime,
    run: DecodeRun | None = None,
    shadows: tuple[ShadowRun, ...] = (),
    probe_text: ProbeText | None = None,
) -> Outcome:
    """The outcome with its result, which has these `fields` and what every result repeats of its job.

    The result is written without the model, because validating and dumping it takes half of the time of an outcome.
    """
    job = claimed.ready.job
    labels = {
        "custom_id": job.custom_id,
        "batch_id": job.batch_id,
        "endpoint": "/v1/completions" if job.body.prompt is not None else None,
        "redrive_of": job.redrive_of,
        "segment": job.segment,
    }
    result = encode_fields(
        {
            "object": "alphaloop.result",
            "job_id": claimed.job_id,
            "status": status,
            "task": job.task,
            **{name: value for name, value in labels.items() if value is not None},
            "purpose": job.purpose.value,
            **fields,
            "attempt": claimed.attempt,
            **({"num_chunks": claimed.stream.num_chunks} if claimed.stream else {}),
            "recorded_at": now,
        }
    )
    return Outcome(
        job_id=claimed.job_id,
        attempt=claimed.attempt,
        status=status,
        result=result,
        topic=RESULTS,
        headers=claimed.carried,
        run=run,
        shadows=shadows,
        probe_text=probe_text,
    )


def _run_of(
    claimed: ClaimedJob,
    generation: Generation,
    decision: Decision,
    identity: EngineIdentity,
    *,
    queue_s: float,
    now: datetime,
    decode_batch_id: UUID | None,
) -> DecodeRun:
    """The row of a job. It names the drafter that most rounds belong to; of several the first."""
    job, sampling = claimed.ready.job, claimed.ready.prepared.sampling
    drafted = _drafted_most(generation)
    key = _key(
        job.task,
        identity.target_revision,
        identity.engine,
        sampling.bucket,
        prompt_bucket(generation.num_prompt_tokens),
        claimed.ready.prepared.segment,
        drafted.drafter if drafted else "",
        drafted.draft_revision if drafted else "",
    )
    return DecodeRun(
        key=key,
        decode_batch_id=decode_batch_id or uuid4(),
        purpose=job.purpose.value,
        mode=(Mode.SPECULATIVE if drafted else Mode.VANILLA).value,
        num_draft_tokens=drafted.num_draft_tokens if drafted else 0,
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
        is_counted=generation.is_counted,
        is_cut=generation.finish_reason == "length",
    )


class _Drafting(NamedTuple):
    """What drafted a job."""

    drafter: str
    draft_revision: str
    num_draft_tokens: int


def _drafted_most(generation: Generation) -> _Drafting | None:
    """The drafter that most rounds belong to; of several the first, and None where nothing drafted."""
    if most := max(generation.drafted, key=lambda one: one.counts.rounds, default=None):
        return _Drafting(most.drafter, most.draft_revision, most.num_draft_tokens)
    served = generation.served
    if served is None or served.drafter is None:
        return None
    return _Drafting(served.drafter, served.draft_revision, served.num_draft_tokens)


@lru_cache(maxsize=_MOST_KEYS)
def _key(*fields: str) -> EvidenceKey:
    """The key of these fields, made once: many jobs have it, and equal keys are compared fastest if they are one."""
    return EvidenceKey(*fields)


def _probe_text(claimed: ClaimedJob, generation: Generation, identity: EngineIdentity) -> ProbeText | None:
    """What is kept of a probe's or control's text, to compare both; None for traffic, and for what was sampled."""
    sampling = claimed.ready.prepared.sampling
    if claimed.ready.job.purpose is Purpose.TRAFFIC or sampling.temperature > 0 or sampling.is_adjusted:
        return None
    if not generation.token_ids:  # the server does not tell them
        return None
    return ProbeText(
        token_ids=generation.token_ids,
        finish_reason=generation.finish_reason,
        max_tokens=sampling.max_tokens,
        near_tie=tolerance_of(identity.dtype),
        second_ids=tuple(one.token_id for one in generation.second_choices),
        gaps=tuple(one.gap for one in generation.second_choices),
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


def _drafted(run: DecodeRun, generation: Generation) -> list[ShadowRun]:
    """Evidence of the job's own drafters, each of its rounds alone, where the run's counts are of other rounds too.

    If one drafter had every round behind the prefill, the run itself is the evidence; so is a vanilla run. Otherwise
    each drafter's rounds are counted under its own key, with their own chances and one round for the prefill, which
    evidence leaves out again. So tokens a round and acceptance come from the drafter's own rounds, and the round that
    ended the text is censored as in any run. Load or lot chooses these rounds before their tokens are known, so the
    choice causes no bias. A drafter that was scored on the whole text is left out, because the score has more counts.
    Where a server told only sums, they are the evidence.
    """
    if not generation.is_counted:
        return _evidence_of_sums(run, generation)
    drafted = generation.drafted
    is_whole = not drafted or (len(drafted) == 1 and generation.num_vanilla_rounds == 1)
    if is_whole or not run.is_evidence:
        return []
    scored = {shadow.drafter for shadow in generation.shadows if not shadow.chances}
    return [
        replace(
            _shadow(
                run,
                ShadowCounts(one.drafter, one.draft_revision, one.num_draft_tokens, PREFILL + one.counts, one.chances),
            ),
            is_drafted=True,
        )
        for one in drafted
        if one.drafter not in scored
    ]


def _evidence_of_sums(run: DecodeRun, generation: Generation) -> list[ShadowRun]:
    """One row under the drafter's key, none where the server told nothing; the run's own counts are no evidence.

    A slice of several requests is one row of the job that ended it, and counts as one job: jobs of a slice cannot be
    told apart, so their variance is taken from slice to slice. Its lengths are the mean of its jobs.
    """
    served = generation.served
    if served is None or not served.drafter or run.purpose == Purpose.CONTROL:
        return []
    k, found = served.num_draft_tokens, served.slice_counts
    num_prompt_tokens, num_tokens = run.num_prompt_tokens, run.num_tokens
    if found is not None:
        counts: AcceptanceCounts | None = found.counts
        num_prompt_tokens = round(found.num_prompt_tokens / found.num_requests)
        num_tokens = round(found.num_tokens / found.num_requests)
    else:
        is_told = served.num_proposed > 0
        counts = counts_from_sums(num_tokens, served.num_proposed, served.num_accepted, k) if is_told else None
    if counts is None:
        return []
    return [
        ShadowRun(
            key=replace(run.key, drafter=served.drafter, draft_revision=served.draft_revision),
            num_draft_tokens=k,
            counts=counts,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_tokens,
            decoded_at=run.decoded_at,
            is_drafted=True,
        )
    ]
