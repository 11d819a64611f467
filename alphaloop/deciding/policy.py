"""Speculative or vanilla, with which drafter, how far ahead, and why. Pure: same inputs, same decision.

The choice maximises measured goodput, expected tokens a round over the measured milliseconds of such a round, not α:
the α at which speculation breaks even is .20 for a cheap drafter and .62 for a dear one, and it moves with load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from alphaloop.cost import CostTable
from alphaloop.deciding.goodput import Alternative, DrafterState, Evidence, JobSize, PolicyLimits, evidence_of, weigh
from alphaloop.messages import Decoding, Mode, Purpose


class Reason(StrEnum):
    """Why a batch is decoded the way it is; one short word for tables, metrics and SQL."""

    FASTER = "faster"  #: the best alternative's expected goodput is above vanilla's
    NOT_FASTER = "not_faster"  #: no alternative is expected to beat vanilla by the required margin
    UNCERTAIN = "uncertain"  #: an alternative looks faster, but no lower bound does
    NO_HISTORY = "no_history"  #: a cold task: vanilla until explored
    NO_COSTS = "no_costs"  #: nothing was calibrated for this batch size
    NO_DRAFTER = "no_drafter"  #: no drafter is configured, or none is fit to serve
    EXPLORING = "exploring"  #: speculative from the exploration budget
    CONTROL = "control"  #: vanilla from the exploration budget, or a control job
    PROBE = "probe"  #: a probe measures the drafter it names
    FORCED = "forced"  #: the job, or its task's configuration, fixed the mode
    STALE_DRAFT = "stale_draft"  #: every drafter that could serve is flagged stale
    SHORT_OUTPUT = "short_output"  #: too few tokens to gain anything


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """The batch to decide for. `draw` is uniform on [0, 1) and comes from the worker's seeded generator."""

    task: str
    batch: int
    expected_tokens: float
    draw: float
    purpose: Purpose = Purpose.TRAFFIC
    decoding: Decoding = Decoding.AUTO
    probe_drafter: str | None = None
    probe_num_draft_tokens: int | None = None
    prompt_tokens: float | None = None  #: mean of the batch; None: prompts and their reading are left out

    @property
    def size(self) -> JobSize | None:
        """A usual job of the batch."""
        return None if self.prompt_tokens is None else JobSize(self.prompt_tokens, self.expected_tokens)


@dataclass(frozen=True, slots=True)
class Decision:
    """How a batch is decoded, and why."""

    mode: Mode
    drafter: str | None
    draft_revision: str | None
    num_draft_tokens: int
    reason: Reason
    explanation: str
    alternatives: tuple[Alternative, ...] = ()


def decide(
    history: Mapping[str, Evidence],
    drafters: Sequence[DrafterState],
    costs: CostTable,
    context: DecisionContext,
    limits: PolicyLimits,
) -> Decision:
    """Choose how to decode one batch. `history` is by drafter name; a drafter without an entry is cold."""
    usable = [drafter for drafter in drafters if not drafter.is_stale]
    if fixed := _fixed_by_caller(drafters, usable, context, limits, history, costs):
        return fixed
    if not usable:
        return _vanilla(Reason.STALE_DRAFT if drafters else Reason.NO_DRAFTER, "no drafter is fit to serve")
    if context.expected_tokens < limits.short_output_tokens:
        return _vanilla(
            Reason.SHORT_OUTPUT,
            f"about {context.expected_tokens:.0f} tokens expected, fewer than {limits.short_output_tokens}",
        )
    alternatives = weigh(history, usable, costs, context.batch, limits, context.size)
    cold = [drafter for drafter in usable if evidence_of(history, drafter).num_jobs < limits.min_jobs]
    if cold and context.draw < limits.cold_explore_share:
        k = min(limits.cold_num_draft_tokens, cold[0].max_draft_tokens)
        seen = evidence_of(history, cold[0]).num_jobs
        return _speculative(
            cold[0], k, Reason.EXPLORING, f"{seen} of {limits.min_jobs} jobs seen with {cold[0].name}", alternatives
        )
    if not alternatives:
        return _vanilla(Reason.NO_COSTS, f"no cost was measured for a batch of {context.batch}")
    chosen = _choose([a for a in alternatives if a.drafter not in {d.name for d in cold}], limits, bool(cold))
    return _explore(chosen, usable, alternatives, context, limits)


def _choose(alternatives: Sequence[Alternative], limits: PolicyLimits, some_cold: bool) -> tuple[Alternative, Reason]:
    vanilla = next(a for a in alternatives if a.drafter is None)
    rivals = [a for a in alternatives if a.drafter is not None]
    if not rivals:
        return vanilla, Reason.NO_HISTORY if some_cold else Reason.NO_COSTS
    best = rivals[0]
    if best.speedup < limits.min_speedup:
        return vanilla, Reason.NOT_FASTER
    # Another drafter may be worth a little less and be certain all the same.
    certain = (a for a in rivals if a.speedup >= limits.min_speedup and a.speedup_low >= 1.0)
    if sure := next(certain, None):
        return sure, Reason.FASTER
    return vanilla, Reason.UNCERTAIN


def _explore(
    chosen: tuple[Alternative, Reason], usable: Sequence[DrafterState], alternatives: tuple[Alternative, ...],
    context: DecisionContext, limits: PolicyLimits,
) -> Decision:  # fmt: skip
    """Obey the choice, or spend the exploration budget on its opposite, so that a task can find its way back."""
    best, reason = chosen
    by_name = {drafter.name: drafter for drafter in usable}
    if best.drafter is not None:
        told = f"{_expected(best)} with {best.drafter}, k={best.num_draft_tokens}"
        if context.draw < limits.explore_share:
            return _vanilla(Reason.CONTROL, f"control against: {told}", alternatives)
        return _speculative(by_name[best.drafter], best.num_draft_tokens, Reason.FASTER, told, alternatives)
    rival = next((a for a in alternatives if a.drafter is not None), None)
    if rival is None or rival.drafter is None:
        return _vanilla(reason, "nothing to compare with", alternatives)
    told = f"best alternative {rival.drafter}, k={rival.num_draft_tokens}: {_expected(rival)}"
    # What looks faster, only not for sure, is expected to gain by being tried: as often as a cold drafter.
    share = limits.cold_explore_share if reason is Reason.UNCERTAIN else limits.explore_share
    if context.draw < share:
        return _speculative(by_name[rival.drafter], rival.num_draft_tokens, Reason.EXPLORING, told, alternatives)
    return _vanilla(reason, told, alternatives)


def _expected(alternative: Alternative) -> str:
    low, high = alternative.speedup_low, alternative.speedup_high
    return f"{alternative.speedup:.2f}x vanilla expected ({low:.2f} to {high:.2f})"


def _fixed_by_caller(
    drafters: Sequence[DrafterState], usable: Sequence[DrafterState], context: DecisionContext, limits: PolicyLimits,
    history: Mapping[str, Evidence], costs: CostTable,
) -> Decision | None:  # fmt: skip
    """Probes, controls and forced modes; None when the policy is free to choose. A probe may use a stale drafter."""
    if context.purpose is Purpose.CONTROL:
        return _vanilla(Reason.CONTROL, "a control job is decoded vanilla")
    if context.purpose is Purpose.PROBE:
        named = [d for d in drafters if context.probe_drafter in (None, d.name)]
        if not named:
            return _vanilla(Reason.NO_DRAFTER, f"this worker has no drafter {context.probe_drafter}")
        k = min(context.probe_num_draft_tokens or named[0].max_draft_tokens, named[0].max_draft_tokens)
        return _speculative(named[0], k, Reason.PROBE, f"a probe measures {named[0].name} at k={k}")
    if context.decoding is Decoding.VANILLA:
        return _vanilla(Reason.FORCED, "vanilla was asked for")
    if context.decoding is Decoding.SPECULATIVE and usable:
        weighed = weigh(history, usable, costs, context.batch, limits, context.size)
        best = next((a for a in weighed if a.drafter is not None), None)
        drafter = next((d for d in usable if best and d.name == best.drafter), usable[0])
        k = best.num_draft_tokens if best else min(limits.cold_num_draft_tokens, drafter.max_draft_tokens)
        return _speculative(drafter, k, Reason.FORCED, "speculative was asked for", weighed)
    return None


def _vanilla(reason: Reason, explanation: str, alternatives: tuple[Alternative, ...] = ()) -> Decision:
    return Decision(Mode.VANILLA, None, None, 0, reason, explanation, alternatives)


def _speculative(
    drafter: DrafterState, k: int, reason: Reason, explanation: str, alternatives: tuple[Alternative, ...] = ()
) -> Decision:
    return Decision(Mode.SPECULATIVE, drafter.name, drafter.revision, k, reason, explanation, alternatives)
