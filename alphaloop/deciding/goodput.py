"""What each way to decode a batch is worth: expected tokens a second, with bounds, from counts and costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from alphaloop.acceptance import Z95, AcceptanceCounts
from alphaloop.cost import CostTable, expected_tokens_per_round


@dataclass(frozen=True, slots=True)
class DrafterState:
    """A drafter that this worker could use now."""

    name: str
    revision: str
    max_draft_tokens: int
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """What history says about one drafter under the evidence key of a batch; decayed counts, jobs as clusters."""

    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    num_jobs: int = 0
    tokens_per_round_se: float | None = None  #: standard error over jobs; None with fewer than two
    #: Rounds in which position i could have been proposed: accepted through i - 1, in runs with k ≥ i, prefills left
    #: out. Empty where every run had the same k: then it follows from the counts.
    chances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """The dials of the decision; configs/worker.toml explains each."""

    explore_share: float = 0.02
    cold_explore_share: float = 0.25
    min_jobs: int = 4
    min_speedup: float = 1.02
    short_output_tokens: int = 20
    cold_num_draft_tokens: int = 3
    prior_alpha: float = 0.5
    prior_trials: float = 8.0


@dataclass(frozen=True, slots=True)
class JobSize:
    """A usual job of the batch: what is read before its first round, and how long its rounds go on."""

    num_prompt_tokens: float
    num_tokens: float

    @property
    def context(self) -> float:
        """Tokens before a round, on average over the job."""
        return self.num_prompt_tokens + self.num_tokens / 2


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to decode the batch, with what is expected of it. Vanilla is k = 0.

    The speed-up is of whole jobs where their size is known: prompts are read in every mode, and draft models read them
    too. Otherwise it is of the rounds alone.
    """

    drafter: str | None
    num_draft_tokens: int
    tokens_per_round: float
    round_ms: float
    speedup: float
    speedup_low: float
    speedup_high: float

    @property
    def tokens_per_s(self) -> float:
        """Expected tokens a second of one sequence of the batch."""
        return 1000 * self.tokens_per_round / self.round_ms


def weigh(
    history: Mapping[str, Evidence],
    drafters: Sequence[DrafterState],
    costs: CostTable,
    batch: int,
    limits: PolicyLimits,
    size: JobSize | None = None,
) -> tuple[Alternative, ...]:
    """Every alternative whose cost is known, the fastest expected first; empty where vanilla was never measured."""
    context = size.context if size else None
    vanilla_ms = costs.round_ms(None, batch, 0, context=context)
    if vanilla_ms is None:
        return ()
    # A batch reads its prompts one after the other, and shares its rounds.
    reading_ms = batch * costs.prefill_ms(None, size.num_prompt_tokens) if size else 0.0
    num_tokens = size.num_tokens if size else 1.0
    found = [Alternative(None, 0, 1.0, vanilla_ms, 1.0, 1.0, 1.0)]
    for drafter in drafters:
        evidence = evidence_of(history, drafter)
        drafts_reading_ms = batch * costs.prefill_ms(drafter.name, size.num_prompt_tokens) if size else 0.0

        def speedup(tokens: float, round_ms: float, more_ms: float = drafts_reading_ms) -> float:
            job_ms = reading_ms + more_ms + num_tokens * round_ms / tokens
            return (reading_ms + num_tokens * vanilla_ms) / job_ms

        for k in range(1, drafter.max_draft_tokens + 1):
            tokens, error, proposed = _expected_round(evidence, k, limits)
            round_ms = costs.round_ms(
                drafter.name, batch, k, proposing=proposed[0], mean_proposed=sum(proposed), context=context
            )
            if round_ms is None:
                continue
            low, high = max(1.0, tokens - Z95 * error), min(k + 1.0, tokens + Z95 * error)
            found.append(
                Alternative(
                    drafter.name, k, tokens, round_ms,
                    speedup(tokens, round_ms), speedup(low, round_ms), speedup(high, round_ms),
                )
            )  # fmt: skip
    return tuple(sorted(found, key=lambda a: (-a.speedup, a.num_draft_tokens)))


def _expected_round(evidence: Evidence, k: int, limits: PolicyLimits) -> tuple[float, float, list[float]]:
    """Expected tokens of a round at draft length k, their standard error, and how likely each position is proposed.

    The last is the product of the reaches up to a position. Reach is seen where all before was accepted, and drafters
    go further where they are right, so the product takes proposals to be a little longer, and dearer, than they are.

    α_i and the reach of each position are Beta posterior means around the prior, the prior's weight counted in trials.
    A position past every trial so far falls back on the prior; so does the reach of a position that no run's k allowed,
    or a history of short drafts would speak against long ones. The error is the one seen over jobs, or, with fewer than
    two jobs, that of a single draw at the prior's spread.
    """
    counts = evidence.counts
    reach, acceptance = [], []
    # Every job's prefill is a round in which nothing can be proposed.
    through = max(counts.rounds - evidence.num_jobs, 0)
    for i in range(k):
        trials = counts.trials[i] if i < len(counts.trials) else 0
        accepts = counts.accepts[i] if i < len(counts.accepts) else 0
        if evidence.chances:
            through = evidence.chances[i] if i < len(evidence.chances) else 0
        # Decayed counts are rounded one by one, so a few more trials than chances are possible.
        seen = (trials + limits.prior_trials * 0.5) / (through + limits.prior_trials)
        allowed = i == 0 or bool(evidence.chances) or i < len(counts.trials)
        reach.append(min(seen, 1.0) if allowed and through else 0.5)
        acceptance.append((accepts + limits.prior_trials * limits.prior_alpha) / (trials + limits.prior_trials))
        through = accepts
    tokens = expected_tokens_per_round(reach, acceptance)
    proposed = list(accumulate(reach, mul))
    if evidence.tokens_per_round_se is not None:
        return tokens, evidence.tokens_per_round_se, proposed
    return tokens, math.sqrt(k) / max(1.0, math.sqrt(evidence.num_jobs)), proposed


def evidence_of(history: Mapping[str, Evidence], drafter: DrafterState) -> Evidence:
    """What is known of a drafter; nothing, for one without an entry."""
    return history.get(drafter.name, Evidence())
