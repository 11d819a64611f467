"""What is known of one candidate that was measured: the figures that the reasons and the report rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alphaloop.payoff.figures import Acceptance, Figures
from alphaloop.payoff.rounds import RoundCosts


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What a draft's own record says of its acceptance elsewhere."""

    alpha_1: float
    where: str  #: `its 64 held-out texts`


@dataclass(frozen=True, slots=True)
class GreedySample:
    """Some of the sampled prompts at the same k: decoded greedy, and as they were."""

    greedy: Acceptance
    sampled: Acceptance


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of one candidate that does not ship."""

    own: Figures
    vanilla: Figures
    bar: float
    costs: RoundCosts | None
    siblings: Sequence[Figures] = ()  #: the same drafter at other lengths
    batch: int = 1
    temperature: float = 0.0  #: the highest of the prompts
    greedy: GreedySample | None = None
    findings: Sequence[tuple[str, str]] = field(default=())  #: check and sentence of what check-pair warns of
    held_out: HeldOut | None = None

    @property
    def k(self) -> int:
        """Its draft length."""
        return self.own.candidate.num_draft_tokens

    @property
    def drafter(self) -> str:
        """Its drafter's name."""
        return self.own.candidate.drafter or ""
