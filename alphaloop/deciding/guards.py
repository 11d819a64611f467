"""Guards: which drafters may draft for these jobs at all. Every refusal has its own reason. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphaloop.cost import CostTable
from alphaloop.deciding.decision import DecisionContext, Reason
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.limits import PolicyLimits
from alphaloop.deciding.objective import Aim


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a drafter, or speculation, is out."""

    reason: Reason
    explanation: str


def refused(context: DecisionContext, drafters: Sequence[DrafterState], limits: PolicyLimits) -> Refusal | None:
    """Why no drafter may draft for these jobs; None if the jobs allow drafts."""
    if not drafters:
        return Refusal(Reason.NO_DRAFTER, "no drafter is configured")
    if context.switched_off is not None:
        return Refusal(Reason.SWITCHED_OFF, f"an operator switched speculation off for {context.switched_off!r}")
    if context.expected_tokens < limits.short_output_tokens:
        known = f", learned from {context.known_output_jobs:.0f} jobs" if context.known_output_jobs > 0 else ""
        return Refusal(
            Reason.SHORT_OUTPUT,
            f"about {context.expected_tokens:.0f} tokens expected{known}, fewer than {limits.short_output_tokens:g}",
        )
    return None


def fit(
    context: DecisionContext, drafters: Sequence[DrafterState], costs: CostTable
) -> tuple[list[DrafterState], Refusal]:
    """The drafters that may serve, and why the last refused one may not."""
    able, refusal = [], Refusal(Reason.NO_DRAFTER, "no drafter is configured")
    for drafter in drafters:
        found = _refused(context, drafter, costs)
        if found is None:
            able.append(drafter)
        else:
            refusal = found
    return able, refusal


def _refused(context: DecisionContext, drafter: DrafterState, costs: CostTable) -> Refusal | None:
    if drafter.is_stale:
        return Refusal(Reason.STALE_DRAFT, f"{drafter.name} ({drafter.revision}) is flagged stale")
    if not drafter.revision:
        return Refusal(Reason.UNKNOWN_REVISION, f"the revision of {drafter.name} is not known")
    if setting := context.cannot_serve.get(drafter.name):
        return Refusal(Reason.CANNOT_SERVE, f"{drafter.name} cannot serve {setting}")
    return _no_memory(context, drafter) or _late(context, drafter, costs)


def _no_memory(context: DecisionContext, drafter: DrafterState) -> Refusal | None:
    longest = context.max_sequence_tokens
    free = context.free_elsewhere.get(drafter.name, context.free_cache_bytes)
    if free is None or longest is None or not drafter.cache_bytes_per_token:
        return None
    if context.max_output_tokens is not None:
        longest = min(longest, drafter.num_read(longest) + context.max_output_tokens)
    needed = context.num_running * longest * drafter.cache_bytes_per_token
    if needed <= free:
        return None
    where = "on its device" if drafter.name in context.free_elsewhere else "beside the target"
    return Refusal(
        Reason.NO_MEMORY,
        f"{drafter.name} needs {context.num_running} sequences x {longest:.0f} tokens x "
        f"{drafter.cache_bytes_per_token} bytes = {needed / 2**20:.0f} MiB, "
        f"{free / 2**20:.0f} MiB are free {where}",
    )


def _late(context: DecisionContext, drafter: DrafterState, costs: CostTable) -> Refusal | None:
    if context.objective.aim is not Aim.TIME_TO_FIRST_TOKEN or context.prompt_tokens is None:
        return None
    target_ms = context.num_jobs * costs.prefill_ms(None, context.prompt_tokens)
    draft_ms = context.num_jobs * drafter.reading_ms(costs, context.prompt_tokens)
    if costs.is_served(drafter.name) or draft_ms <= 0 or target_ms + draft_ms <= context.objective.target_ms:
        return None  # on a server the prompt is read once, as it is where nothing drafts
    return Refusal(
        Reason.FIRST_TOKENS,
        f"with {drafter.name} the first token comes after {target_ms:.0f} + {draft_ms:.0f} ms of reading, "
        f"{context.objective.target_ms:.0f} ms are allowed",
    )
