"""The weight of counts: jobs are the unit of variance, and contradicted older evidence is discounted.

* Trials inside a job are correlated. The intraclass correlation ρ is estimated from the second-order sums (Cochran
  1977, §6.4) around a prior, and counts are divided by the design effect 1 + (m - 1)·ρ at m chances a job (Kish 1965).
* Older evidence that the recent window contradicts is cut to the information that a change of that size would leave:
  a power prior (Ibrahim and Chen 2000), its power taken from the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.profile import Counts

#: Prior intraclass correlation of jobs, and the weight of that prior in jobs.
_PRIOR_CORRELATION: Final = 0.05
_PRIOR_CORRELATION_JOBS: Final = 8.0


def kept_of_older(leaves: Iterable[tuple[EvidenceSums, EvidenceSums]], deff: float, z: float) -> float:
    """The share of older evidence that the recent window leaves; each leaf (recent, all) is compared within itself.

    So a new mix of leaves is no contradiction. With d the difference in logits and v its variance, older evidence of
    information H keeps 1 / (1 + H · max(0, d² - z²·v)).
    """
    score = information = before = 0.0
    for recent, everything in leaves:
        jobs, jobs_w2 = everything.jobs - recent.jobs, everything.jobs_w2 - recent.jobs_w2
        if jobs <= 1e-9 or jobs_w2 <= 1e-12 or recent.jobs <= 0:
            continue
        newer = recent.effective_jobs / recent.jobs / deff
        older = jobs / jobs_w2 / deff
        counts = zip(recent.accepts, recent.chances, everything.accepts, everything.chances, strict=False)
        for a, n, x, m in counts:
            m -= n
            if n <= 0 or m <= 1e-9:
                continue
            rate = ((x - a) * older + 0.5) / (m * older + 1.0)
            score += newer * (a - n * rate)
            information += newer * n * rate * (1 - rate)
            before += older * m * rate * (1 - rate)
    if information <= 0 or before <= 0:
        return 1.0
    # Beyond 1.5 logits the linear step overshoots; older evidence is dropped there in any case.
    excess = (score / information) ** 2 - z**2 * (1 / information + 1 / before)
    return 1 / (1 + before * max(0.0, excess))


def design_effect(leaves: Iterable[EvidenceSums]) -> float:
    """The factor by which differences between jobs inflate the variance; each leaf is compared within itself.

    Residuals are taken by position, so that a different k adds no variance: the residuals Σ w²(a - s·c)² exceed the
    binomial Σ w²·c·s(1 - s) by (m_i - 1)·ρ at m_i chances a job.
    """
    beyond = binomial = weight = chances = chances_w2 = 0.0
    for leaf in leaves:
        jobs = leaf.effective_jobs
        fade = leaf.jobs_w2 / leaf.jobs if leaf.jobs > 0 else 0.0
        chances += sum(leaf.chances) * fade
        chances_w2 += _all_chances_w2(leaf)
        if jobs < 1.5:
            continue
        for a, c, aa, cc, ac in zip(
            leaf.accepts, leaf.chances, leaf.accepts_w2, leaf.chances_w2, leaf.accepts_chances_w2, strict=True
        ):
            if c <= 0:
                continue
            s = a / c
            expected = c * fade * s * (1 - s)
            if expected <= 0:
                continue
            residual = max(0.0, aa - 2 * s * ac + s * s * cc) * jobs / (jobs - 1)
            beyond += residual - expected
            binomial += expected * max(0.0, cc / (c * fade) - 1)
        weight += jobs - 1
    seen = beyond / binomial if binomial > 0 else 0.0
    correlation = (_PRIOR_CORRELATION_JOBS * _PRIOR_CORRELATION + weight * min(1.0, max(0.0, seen))) / (
        _PRIOR_CORRELATION_JOBS + weight
    )
    size = chances_w2 / chances if chances > 0 else 1.0
    return 1 + max(0.0, size - 1) * correlation


def effective(sums: EvidenceSums, deff: float) -> Counts:
    """Counts with the variance of independent trials: fading and the design effect taken out."""
    factor = sums.effective_jobs / sums.jobs / deff if sums.jobs > 0 else 0.0
    return Counts(tuple(a * factor for a in sums.accepts), tuple(c * factor for c in sums.chances))


def _all_chances_w2(leaf: EvidenceSums) -> float:
    """Σ w²·C² with C = Σ_i c_i of a job, taking a job's chances to fall with i as they do on the whole."""
    total = sum(math.sqrt(cc) for cc in leaf.chances_w2)
    return total * total
