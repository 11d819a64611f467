"""What is asked about a batch: whose evidence speaks for it, how many jobs, and how long they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from alphaloop.acceptance import EvidenceKey, prompt_bucket
from alphaloop.deciding.decision import DecisionContext
from alphaloop.messages import Decoding, Purpose
from alphaloop.settings import TaskSettings
from worker.deciding.evidence_cache import JobLengths
from worker.engine import EngineIdentity, PreparedJob
from worker.jobs.lanes import LaneKey


def evidence_key(key: LaneKey, jobs: Sequence[PreparedJob], identity: EngineIdentity) -> EvidenceKey:
    """Whose evidence speaks for jobs taken together, but for the drafter: of their mean prompt, of most's segment."""
    num_prompt_tokens = fmean(len(job.token_ids) for job in jobs)
    segments = Counter(job.job.segment or "" for job in jobs)
    return EvidenceKey(
        key.task,
        identity.target_revision,
        identity.engine,
        key.sampling_bucket,
        prompt_bucket(round(num_prompt_tokens)),
        max(segments, key=lambda name: (segments[name], name)),
    )


def alike(jobs: Sequence[PreparedJob], *, by_segment: bool) -> list[list[int]]:
    """Indices of the jobs about which the same is believed: by prompt bucket, and by segment where these differ."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, job in enumerate(jobs):
        segment = (job.job.segment or "") if by_segment else ""
        found.setdefault((prompt_bucket(len(job.token_ids)), segment), []).append(index)
    return list(found.values())


def question(
    key: LaneKey,
    jobs: Sequence[PreparedJob],
    task: TaskSettings,
    lengths: JobLengths,
    *,
    control_jobs: float,
    draw: float,
) -> DecisionContext:
    """The batch as the policy sees it. `lengths` and `control_jobs` are what is remembered of its task."""
    limit = fmean(job.sampling.max_tokens for job in jobs)
    usual = lengths.output_tokens
    asked = Decoding(key.decoding)
    return DecisionContext(
        task=key.task,
        batch=len(jobs),
        expected_tokens=limit if usual is None else min(limit, usual),
        draw=draw,
        purpose=Purpose(key.purpose),
        decoding=task.decoding if asked is Decoding.AUTO else asked,
        probe_drafter=key.probe_drafter or None,
        probe_num_draft_tokens=key.probe_num_draft_tokens or None,
        prompt_tokens=fmean(len(job.token_ids) for job in jobs),
        control_jobs=control_jobs,
        known_output_jobs=lengths.jobs,
    )
