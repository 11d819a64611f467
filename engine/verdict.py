"""What a round yields for one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from alphaloop.engine import SecondChoice


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the text, and the likeliest ones at its place, likeliest first, each with its logprob."""

    token_id: int
    logprob: float
    ranked: tuple[tuple[int, float], ...] = ()


class DraftVerdict(NamedTuple):
    """What a round yields for one sequence: `num_accepted` of its drafts, then `next_token` of the target."""

    num_accepted: int
    next_token: int
    #: For a tree: which tokens of the proposal were accepted, root first. None for a chain: the first `num_accepted`.
    branch: tuple[int, ...] | None = None
    #: For a tree: depths at which a token was tried. None for a chain: all it accepted and the one that was rejected.
    num_tested: int | None = None
    #: For a watched sequence: by token that the round yields.
    second_choices: tuple[SecondChoice, ...] = ()
    #: For a sequence that wants them: by token that the round yields.
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def path(self) -> tuple[int, ...]:
        """Indices of the accepted tokens in the proposal, root first."""
        return tuple(range(self.num_accepted)) if self.branch is None else self.branch
