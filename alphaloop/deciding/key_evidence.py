"""The evidence of a key: all of it, and its recent window.

Two sums are kept, because it is not known how long old evidence stays valid:

* `all`: fades with time alone (`worker.history_half_life_days`). Precise, slow to notice a change.
* `recent`: the recent window, part of `all`. Fades faster, by half every 6 hours and by half every 16 jobs added.

    all    = all · 2^(-Δt/half_life)                  + job      (… _w2 columns: the factor squared)
    recent = recent · 2^(-Δt/6 h) · 2^(-jobs/16)      + job      (likewise)

Where the recent window contradicts older evidence beyond three standard errors, older evidence is dropped as far as
contradicted (trust.py). From two standard errors on, `current` discounts older evidence while it is contradicted.

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

#: After so many jobs, or so long, `KeyEvidence.recent` weighs a job half.
RECENT_JOBS: Final = 16.0
RECENT_WINDOW: Final = timedelta(hours=6)
#: Least share of the recent window that outlives a contradiction.
_KEPT_RECENT: Final = 0.25
#: A contradiction counts beyond so many standard errors: when evidence is read, and when it is stored.
_READING_Z: Final = 2.0
_FORGETTING_Z: Final = 3.0


@dataclass(frozen=True, slots=True)
class KeyEvidence:
    """The weighted sums of a key: all jobs, and the recent window, which is part of them."""

    all: EvidenceSums
    recent: EvidenceSums

    @classmethod
    def empty(cls, as_of: datetime) -> KeyEvidence:
        """Without any job."""
        return cls(EvidenceSums(as_of), EvidenceSums(as_of))

    def with_job(self, job: EvidenceSums, half_life: timedelta) -> KeyEvidence:
        """Also this job (or several, added up), which ended at `job.as_of`."""
        now = max(self.all.as_of, job.as_of)
        job = job.faded(now, half_life)
        before = self.faded(now, half_life)
        recent = before.recent.scaled(0.5 ** (job.jobs / RECENT_JOBS))
        evidence = KeyEvidence(before.all + job, recent + job)
        kept = kept_of_older([(evidence.recent, evidence.all)], design_effect([evidence.all]), _FORGETTING_Z)
        if kept == 1:
            return evidence
        # Part of the recent window is from before the change. Left whole, it would inflate the variance between jobs.
        recent = recent.scaled(max(kept, _KEPT_RECENT)) + job
        return KeyEvidence(recent + (evidence.all - evidence.recent).scaled(kept), recent)

    def faded(self, now: datetime, half_life: timedelta) -> KeyEvidence:
        """The same at a later moment."""
        return KeyEvidence(self.all.faded(now, half_life), self.recent.faded(now, min(half_life, RECENT_WINDOW)))

    def __add__(self, other: KeyEvidence) -> KeyEvidence:
        return KeyEvidence(self.all + other.all, self.recent + other.recent)


def current(leaves: Mapping[EvidenceKey, KeyEvidence]) -> tuple[dict[EvidenceKey, EvidenceSums], float]:
    """Each leaf's sums, older evidence discounted where the recent window contradicts it, and the share kept."""
    deff = design_effect([evidence.all for evidence in leaves.values()])
    kept = kept_of_older([(evidence.recent, evidence.all) for evidence in leaves.values()], deff, _READING_Z)
    return {
        key: evidence.all if kept == 1 else evidence.recent + (evidence.all - evidence.recent).scaled(kept)
        for key, evidence in leaves.items()
    }, kept
