"""Acceptance counts and what may be concluded from them.

Words (docs/glossary.md has them all):

* round: draft, one target pass, accept. It yields `accepted + 1` tokens. The prefill is a round without a proposal.
* proposed_i: rounds in which the drafter offered at least i tokens.
* trials_i: rounds in which position i was *tested*: all before it were accepted and a token stood there.
* accepts_i: of those, accepted. α_i = accepts_i / trials_i does not move when k changes; α = Σ accepts / Σ trials does.

Positions count from 1 in words and from 0 in tuples. A round that ends inside its accepted tokens (end of text, token
limit) is censored: positions behind the end count neither as proposed nor as trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import Final

from alphaloop.errors import AlphaloopError

Z95: Final = 1.959963984540054


class InconsistentCounts(AlphaloopError, ValueError):
    """Counts that no sequence of rounds can produce."""


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Counts of one job, or of many added up. Tuples hold one integer a draft position."""

    rounds: int = 0
    num_empty_rounds: int = 0
    num_cropped: int = 0
    proposed: tuple[int, ...] = ()
    trials: tuple[int, ...] = ()
    accepts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.proposed) == len(self.trials) == len(self.accepts):
            raise InconsistentCounts(
                f"expected as many positions in proposed, trials and accepts, found "
                f"{len(self.proposed)}, {len(self.trials)}, {len(self.accepts)}"
            )
        if not 0 <= self.num_empty_rounds <= self.rounds:
            raise InconsistentCounts(f"expected 0 to {self.rounds} empty rounds, found {self.num_empty_rounds}")
        offered, reached = self.rounds - self.num_empty_rounds, self.rounds
        for i, (proposed, trials, accepts) in enumerate(zip(self.proposed, self.trials, self.accepts, strict=True)):
            if not (offered >= proposed >= trials >= accepts >= 0 and reached >= trials):
                raise InconsistentCounts(
                    f"position {i + 1}: expected {offered} ≥ proposed ≥ trials ≥ accepts ≥ 0 and trials ≤ {reached}, "
                    f"found {proposed}, {trials}, {accepts}"
                )
            offered, reached = proposed, accepts
        if not 0 <= self.num_cropped <= self.rounds + self.num_accepted:
            raise InconsistentCounts(
                f"expected 0 to {self.rounds + self.num_accepted} cropped tokens, found {self.num_cropped}"
            )

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(self.accepts)

    @property
    def num_trials(self) -> int:
        """Draft positions tested."""
        return sum(self.trials)

    @property
    def num_tokens(self) -> int:
        """Tokens these rounds put out."""
        return self.rounds + self.num_accepted - self.num_cropped

    def alpha_at(self, position: int) -> float | None:
        """α_i for `position` i ≥ 1; None where it was never tested."""
        if position < 1:
            raise InconsistentCounts(f"expected a position from 1, found {position}")
        if position > len(self.trials) or not self.trials[position - 1]:
            return None
        return self.accepts[position - 1] / self.trials[position - 1]

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return AcceptanceCounts(
            self.rounds + other.rounds,
            self.num_empty_rounds + other.num_empty_rounds,
            self.num_cropped + other.num_cropped,
            _add(self.proposed, other.proposed),
            _add(self.trials, other.trials),
            _add(self.accepts, other.accepts),
        )

    def with_round(
        self, num_proposed: int, num_accepted: int, *, num_emitted: int, num_tested: int | None = None
    ) -> AcceptanceCounts:
        """These counts and one more round: `num_emitted` of its `num_accepted + 1` tokens belong to the text.

        A round that ends inside its accepted tokens is censored there. Of a tree, `num_proposed` is its depth, and
        `num_tested` the depths at which a token was tested: the accepted path may end at a leaf.
        """
        reached = min(num_proposed, num_accepted + 1)
        tested = reached if num_tested is None else num_tested
        if not (0 <= num_accepted <= tested <= reached and 0 <= num_emitted <= num_accepted + 1):
            raise InconsistentCounts(
                f"expected 0 ≤ accepted ≤ tested ≤ proposed, tested and emitted ≤ accepted + 1, "
                f"found {num_accepted}, {tested}, {num_proposed}, and emitted {num_emitted}"
            )
        cut = num_emitted <= num_accepted
        accepted = min(num_accepted, num_emitted)
        offered = accepted if cut else num_proposed
        trials = accepted if cut else tested
        return self + AcceptanceCounts(
            rounds=1,
            num_empty_rounds=0 if offered else 1,
            num_cropped=accepted + 1 - num_emitted,
            proposed=(1,) * offered,
            trials=(1,) * trials + (0,) * (offered - trials),
            accepts=(1,) * accepted + (0,) * (offered - accepted),
        )


#: The round that every job begins with: one token and no draft.
PREFILL: Final = AcceptanceCounts(rounds=1, num_empty_rounds=1)


@dataclass(frozen=True, slots=True)
class EvidenceKey:
    """What acceptance depends on: evidence under different keys is never pooled silently.

    `drafter` and `draft_revision` are empty for vanilla decoding. A drafter that ends its drafts early (a confidence
    gate) is a drafter of its own: its drafts reach only easy positions.
    """

    task: str
    target_revision: str
    engine: str
    sampling_bucket: str
    prompt_bucket: str
    segment: str = ""
    drafter: str = ""
    draft_revision: str = ""

    @property
    def columns(self) -> dict[str, str]:
        """The fields by name. `dataclasses.asdict` copies deeply, at 20 µs a key, and every job has several."""
        return {name: getattr(self, name) for name in EvidenceKey.__slots__}


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % bounds."""

    mean: float
    low: float
    high: float

    def is_within(self, margin: float) -> bool:
        """Whether all of it lies inside ±margin: the equivalence test of a change (Schuirmann 1987)."""
        return -margin <= self.low and self.high <= margin


def sampling_bucket(
    temperature: float, *, is_cut: bool = False, is_reproducible: bool = False, is_adjusted: bool = False
) -> str:
    """Which sampling settings share a history: greedy, or temperature in steps of .5, and what else changes acceptance.

    `cut`: improbable tokens are left out (top_p, top_k, min_p). `seeded`: drawn by the reproducible coupling, which
    accepts less than the maximal one. `adjusted`: scores carry a bias or a penalty.
    """
    if temperature == 0:
        parts = ["greedy"]
    else:
        parts = ["t<=0.5" if temperature <= 0.5 else "t<=1.0" if temperature <= 1.0 else "t>1.0"]
        parts += ["cut"] * is_cut + ["seeded"] * is_reproducible
    return ",".join([*parts, *["adjusted"] * is_adjusted])


def prompt_bucket(num_prompt_tokens: int) -> str:
    """Which prompt lengths (tokens) share a history."""
    for limit in (256, 1024, 4096):
        if num_prompt_tokens <= limit:
            return f"<={limit}"
    return ">4096"


def _add(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


_NUM_HALVINGS: Final = 50


def counts_from_sums(
    num_tokens: int, num_proposed: int, num_accepted: int, num_draft_tokens: int
) -> AcceptanceCounts | None:
    """The counts at k = `num_draft_tokens` ≥ 1, the round of the prompt among them; None for impossible sums.

    As few rounds as can hold the proposed tokens are taken to have drafted, because rounds draft k tokens or none.
    """
    if not (0 <= num_accepted <= num_proposed and num_accepted <= num_tokens) or num_tokens < 1:
        return None
    num_drafting = -(-num_proposed // num_draft_tokens)
    # Fewer rounds behind the prompt's than drafted mean that the last one was cut.
    rounds = max(num_tokens - num_accepted, num_drafting + 1)
    num_cropped = rounds + num_accepted - num_tokens
    if num_cropped > num_draft_tokens:
        return None
    accepts = _spread(num_accepted, num_drafting, num_draft_tokens)
    trials = (num_drafting, *accepts[:-1])
    last = num_proposed - num_drafting * (num_draft_tokens - 1)
    proposed = (*(num_drafting,) * (num_draft_tokens - 1), max(last, trials[-1]))
    return AcceptanceCounts(rounds, rounds - num_drafting, num_cropped, proposed, trials, accepts)


def _spread(num_accepted: int, num_drafting: int, k: int) -> tuple[int, ...]:
    """Whole numbers that never grow and add up to `num_accepted`, near num_drafting · α^i for i = 1..k."""
    low, high = 0.0, 1.0
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        is_short = num_drafting * sum(middle**i for i in range(1, k + 1)) < num_accepted
        low, high = (middle, high) if is_short else (low, middle)
    sums = [round(value) for value in accumulate(num_drafting * high**i for i in range(1, k + 1))]
    sums[-1] = num_accepted
    steps = [sums[0], *(after - before for before, after in pairwise(sums))]
    return tuple(sorted(steps, reverse=True))
