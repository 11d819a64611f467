"""Evidence of a text of which the server told what was drafted and accepted, but not in which rounds."""

from __future__ import annotations

from dataclasses import replace

from alphaloop.acceptance_sums import counts_from_sums
from alphaloop.messages import Purpose
from alphaloop.store.decode_runs import DecodeRun, ShadowRun
from worker.engine import Generation


def evidence_of_sums(run: DecodeRun, generation: Generation) -> list[ShadowRun]:
    """One row under the drafter's key, none where the server told nothing; the run's own counts are no evidence."""
    served = generation.served
    if served is None or not served.drafter or not served.num_proposed or run.purpose == Purpose.CONTROL:
        return []
    k = served.num_draft_tokens
    counts = counts_from_sums(run.num_tokens, served.num_proposed, served.num_accepted, k)
    if counts is None:
        return []
    return [
        ShadowRun(
            key=replace(run.key, drafter=served.drafter, draft_revision=served.draft_revision),
            num_draft_tokens=k,
            counts=counts,
            num_prompt_tokens=run.num_prompt_tokens,
            num_output_tokens=run.num_tokens,
            decoded_at=run.decoded_at,
            is_drafted=True,
        )
    ]
