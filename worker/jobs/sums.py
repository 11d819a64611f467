"""Evidence of texts of which a server told what was drafted and accepted, but not in which rounds."""

from __future__ import annotations

from dataclasses import replace

from alphaloop.acceptance import AcceptanceCounts, counts_from_sums
from alphaloop.messages import Purpose
from alphaloop.store.decode_runs import DecodeRun, ShadowRun
from worker.engine import Generation


def evidence_of_sums(run: DecodeRun, generation: Generation) -> list[ShadowRun]:
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
