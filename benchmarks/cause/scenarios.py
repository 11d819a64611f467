"""Which histories are played, and the cause that is true of each.

"Too little evidence" is the truth only where no reader of the evidence could know better: no probes after the change,
no probe set, no shared prompt, two changes at once, or four prompts that disagree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.cause.histories import faults, jobs, setups, thin
from benchmarks.cause.histories.draw import Draw
from scheduler.causes import Cause, DrafterEvidence


@dataclass(frozen=True, slots=True)
class Scenario:
    """Evidence, and the causes that are true of it; none where nothing is wrong."""

    kind: str
    expected: frozenset[Cause]
    evidence: DrafterEvidence


def scenarios(kinds: Sequence[str], per_kind: int, first: int = 0) -> list[Scenario]:
    """`per_kind` draws of each kind, numbered from `first`; the same every time."""
    return [make(kind, first + number) for number in range(per_kind) for kind in kinds]


def make(kind: str, number: int) -> Scenario:
    """One draw of a kind."""
    expected, build = KINDS[kind]
    seed = f"{kind} {number}"
    return Scenario(kind, frozenset(expected), build(Draw(random.Random(seed), seed)))


_JOBS, _MIX, _STALE, _BAD = (
    (Cause.TRAFFIC_CHANGED,),
    (Cause.MIX_SHIFT,),
    (Cause.DRAFT_STALE,),
    (Cause.BAD_DRAFT,),
)
_SETUP, _FAULT, _THIN = (Cause.SETUP_CHANGED,), (Cause.FAULT,), (Cause.TOO_LITTLE_EVIDENCE,)
Kind = tuple[tuple[Cause, ...], Callable[[Draw], DrafterEvidence]]
#: By name; the kinds without a cause are the last ones.
KINDS: Final[dict[str, Kind]] = {
    "other jobs": (_JOBS, jobs.other_jobs),
    "easier jobs": (_JOBS, jobs.easier_jobs),
    "other jobs of a segment": (_JOBS, jobs.other_jobs_of_a_segment),
    "other jobs after a fault that healed": (_JOBS, jobs.other_jobs_after_a_fault_that_healed),
    "Simpson: every segment's jobs are harder": (_JOBS, jobs.simpson_jobs),
    "other mix": (_MIX, jobs.other_mix),
    "other mix of thin segments": (_MIX, jobs.other_mix_of_thin_segments),
    "Simpson: every segment rises": (_MIX, jobs.simpson_mix),
    "new target": (_STALE, setups.new_target),
    "new target, probe set registered again": (_STALE, setups.new_target_and_registered_again),
    "new target and probe set at once": (_STALE, setups.registered_again_with_the_target),
    "new target, and a fault later": ((*_STALE, *_FAULT), setups.new_target_and_a_later_fault),
    "worse draft": (_BAD, setups.worse_draft),
    "worse draft and probe set at once": (_BAD, setups.worse_draft_and_registered_again),
    "worse draft after a harmless target": (_BAD, setups.worse_draft_after_a_harmless_target),
    "new engine": (_SETUP, setups.new_engine),
    "new dtype": (_SETUP, setups.new_dtype),
    "fault": (_FAULT, faults.fault),
    "fault of .088": (_FAULT, faults.small_fault),
    "fault after a harmless target": (_FAULT, faults.harmless_target_and_a_later_fault),
    "fault that grows": (_FAULT, faults.slow_fault),
    "fault after the last probe, then a probe": (_FAULT, faults.fault_after_the_last_probe_and_one_at_once),
    "fault, probe set registered again": (_FAULT, faults.fault_and_registered_again),
    "fault seen as an incident": (_FAULT, faults.fault_seen_as_an_incident),
    "fault seen in other tasks": (_FAULT, faults.fault_seen_in_other_tasks),
    "Simpson: every segment falls, and the probes": (_FAULT, faults.simpson_fault),
    "change after the last probe": (_THIN, thin.change_after_the_last_probe),
    "no probe set": (_THIN, thin.no_probe_set),
    "four prompts that disagree": (_THIN, thin.four_prompts_that_disagree),
    "target and engine at once": (_THIN, thin.target_and_engine_at_once),
    "no shared prompt": (_THIN, thin.no_shared_prompt),
    "nothing": ((), jobs.nothing),
    "harmless changes": ((), setups.harmless_changes),
}
