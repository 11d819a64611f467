"""A sequence's rounds, counted for the drafter that each of them belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.goodput import DrafterState
from worker.engine import DrafterCounts


@dataclass(slots=True)
class _Drafted:
    """The rounds of one drafter."""

    revision: str
    longest: int  #: most tokens that a round was allowed
    shortest: int  #: fewest that a round was allowed
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    chances: list[int] = field(default_factory=list)


class RoundCounts:
    """A round belongs to the drafter that it allowed at least one token; otherwise it is vanilla.

    A round in which the token limit left room for the target's token only still belongs to the allowed drafter,
    because every run of that drafter has such rounds.
    """

    def __init__(self) -> None:
        self.num_vanilla_rounds = 0
        self._drafters: dict[str, _Drafted] = {}

    def take_vanilla(self) -> None:
        """Count a round without a drafter: one token, and that token was not drafted."""
        self.num_vanilla_rounds += 1

    def take_drafted(
        self,
        drafter: DrafterState,
        num_allowed: int,
        *,
        num_asked: int,
        num_proposed: int,
        num_accepted: int,
        num_emitted: int,
        num_tested: int | None = None,
    ) -> None:
        """Count a round of `drafter`.

        `num_allowed` is its k > 0, `num_asked` what the token limit left of that. The other numbers are those of
        AcceptanceCounts.with_round. A position is a chance where it was asked for and all before it were accepted, as
        far as the text goes.
        """
        one = self._drafters.setdefault(drafter.name, _Drafted(drafter.revision, num_allowed, num_allowed))
        one.longest, one.shortest = max(one.longest, num_allowed), min(one.shortest, num_allowed)
        one.counts = one.counts.with_round(num_proposed, num_accepted, num_emitted=num_emitted, num_tested=num_tested)
        reached = min(num_asked, num_emitted)
        one.chances += [0] * (reached - len(one.chances))
        for position in range(reached):
            one.chances[position] += 1

    @property
    def total(self) -> AcceptanceCounts:
        """All rounds."""
        vanilla = AcceptanceCounts(rounds=self.num_vanilla_rounds, num_empty_rounds=self.num_vanilla_rounds)
        return sum((one.counts for one in self._drafters.values()), vanilla)

    @property
    def chances(self) -> tuple[int, ...]:
        """By position, all drafters together."""
        return tuple(map(sum, zip_longest(*(one.chances for one in self._drafters.values()), fillvalue=0)))

    @property
    def drafted(self) -> tuple[DrafterCounts, ...]:
        """The rounds of each drafter that had any, in the order in which the drafters began."""
        return tuple(
            DrafterCounts(name, one.revision, one.longest, one.counts, tuple(one.chances))
            for name, one in self._drafters.items()
        )

    def has_drafted_throughout(self, drafter: str, num_draft_tokens: int, *, num_prefill_rounds: int) -> bool:
        """Whether every round behind the prefill allowed `drafter` at least `num_draft_tokens`, and there was one."""
        one = self._drafters.get(drafter)
        is_alone = len(self._drafters) == 1 and self.num_vanilla_rounds <= num_prefill_rounds
        return one is not None and is_alone and one.shortest >= num_draft_tokens
