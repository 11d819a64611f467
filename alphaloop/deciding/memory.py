"""What is remembered of an evidence key, and when the past is forgotten.

A key is remembered twice, because nobody knows beforehand how long the past stays true:

* `all`: fades with time alone (`worker.history_half_life_days`). Precise, slow to notice a change.
* `lately`: fades faster, by half every 6 hours and by half every 16 jobs that are added. Part of `all`.

    all    = all · 2^(-Δt/half_life)                  + job      (… _w2 columns: the factor squared)
    lately = lately · 2^(-Δt/6 h) · 2^(-jobs/16)      + job      (likewise)

Where the last jobs contradict what is older beyond three standard errors, the older part is forgotten as far as they
do (trust.py); while they do at two, whoever reads discounts it.

A job that ended before the row's `as_of` (two workers, two clocks) is faded to `as_of` before it is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.trust import design_effect, kept_of_older

#: After so many jobs, or so long, `Memory.lately` weighs a job half.
LATELY_JOBS: Final = 16.0
LATELY: Final = timedelta(hours=6)
#: Least share of it that outlives a contradiction.
_KEPT_LATELY: Final = 0.25
#: A contradiction counts as far as it is larger than so many standard errors: while it is seen, and for good.
_READING_Z: Final = 2.0
_FORGETTING_Z: Final = 3.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered of a key: everything, and what came lately, which is part of it."""

    all: EvidenceSums
    lately: EvidenceSums

    @classmethod
    def empty(cls, as_of: datetime) -> Memory:
        """Nothing yet."""
        return cls(EvidenceSums(as_of), EvidenceSums(as_of))

    def with_job(self, job: EvidenceSums, half_life: timedelta) -> Memory:
        """Also this job (or several, added up), which ended at `job.as_of`."""
        now = max(self.all.as_of, job.as_of)
        job = job.faded(now, half_life)
        before = self.faded(now, half_life)
        recent = before.lately.scaled(0.5 ** (job.jobs / LATELY_JOBS))
        memory = Memory(before.all + job, recent + job)
        kept = kept_of_older([(memory.lately, memory.all)], design_effect([memory.all]), _FORGETTING_Z)
        if kept == 1:
            return memory
        # What came lately is in part from before the change; left whole, it would look like jobs that differ wildly.
        lately = recent.scaled(max(kept, _KEPT_LATELY)) + job
        return Memory(lately + (memory.all - memory.lately).scaled(kept), lately)

    def faded(self, now: datetime, half_life: timedelta) -> Memory:
        """The same at a later moment."""
        return Memory(self.all.faded(now, half_life), self.lately.faded(now, min(half_life, LATELY)))

    def __add__(self, other: Memory) -> Memory:
        return Memory(self.all + other.all, self.lately + other.lately)


def current(leaves: Mapping[EvidenceKey, Memory]) -> tuple[dict[EvidenceKey, EvidenceSums], float]:
    """Each leaf's sums, the older part discounted where the last jobs contradict it, and the share that was kept."""
    deff = design_effect([memory.all for memory in leaves.values()])
    kept = kept_of_older([(memory.lately, memory.all) for memory in leaves.values()], deff, _READING_Z)
    return {
        key: memory.all if kept == 1 else memory.lately + (memory.all - memory.lately).scaled(kept)
        for key, memory in leaves.items()
    }, kept
