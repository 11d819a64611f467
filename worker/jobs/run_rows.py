"""The row of a job that was decoded: how, with which drafter, and what it took. Pure."""

from __future__ import annotations
from alphaloop.acceptance import EvidenceKey
from alphaloop.acceptance import prompt_bucket
from alphaloop.deciding.policy import Decision
from alphaloop.messages import Mode
from alphaloop.store.decode_runs import DecodeRun
from datetime import datetime
from functools import lru_cache
from typing import Final
from typing import NamedTuple
from uuid import UUID
from uuid import uuid4
from worker.claims import ClaimedJob
from worker.engine import EngineIdentity
from worker.engine import Generation


_MOST_KEYS: Final = 4096  #: that are remembered


def run_of(
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


class _Drafted(NamedTuple):
    """What drafted a job."""

    drafter: str
    draft_revision: str
    num_draft_tokens: int


def _drafted_most(generation: Generation) -> _Drafted | None:
    """The drafter that most rounds belong to; of several the first, and None where nothing drafted."""
    if most := max(generation.drafted, key=lambda one: one.counts.rounds, default=None):
        return _Drafted(most.drafter, most.draft_revision, most.num_draft_tokens)
    served = generation.served
    if served is None or served.drafter is None:
        return None
    return _Drafted(served.drafter, served.draft_revision, served.num_draft_tokens)


@lru_cache(maxsize=_MOST_KEYS)
def _key(*fields: str) -> EvidenceKey:
    """The key of these fields, made once: many jobs have it, and equal keys are compared fastest if they are one."""
    return EvidenceKey(*fields)
