"""A drafter's question and answer. A chain is a tree without branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from alphaloop.deciding.goodput import DrafterState
from worker.engine import Sampling

if TYPE_CHECKING:
    from worker.decoding.sampling import TokenChooser


@dataclass(frozen=True, slots=True)
class Ask:
    """One running sequence that wants drafts this round."""

    job_id: str
    text: Sequence[int]  #: prompt and output so far, the live list: its last token is pending, in no cache yet
    num_tokens: int  #: most tokens wanted
    choice: TokenChooser  #: how this job's tokens are chosen
    is_timed: bool = False  #: as many as are asked for, however doubtful: what that takes is measured


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """Tokens for the target to verify; fewer than asked, or none, is an answer too."""

    tokens: tuple[int, ...] = ()
    #: None for a chain. Otherwise token i hangs on token parents[i] < i; -1 is the pending token. Siblings are
    #: verified in order.
    parents: tuple[int, ...] | None = None
    #: Of a chain, [len(tokens), vocabulary], float64: row i is the distribution that token i was drawn from. None: the
    #: proposal is deterministic, each distribution is one-hot. On the drafter's device.
    q: Tensor | None = None
    #: By the drafter's own estimate, the probability of the tokens up to and with each one; empty: not known.
    together: tuple[float, ...] = ()
    num_read: int = 0  #: tokens of the text that its drafter read for it first, beyond those of a usual round

    @property
    def depths(self) -> list[int]:
        """Depth of each token, 1 for a child of the pending token."""
        return list(range(1, len(self.tokens) + 1)) if self.parents is None else tree_depths(self.parents)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """No token, and then each with its ancestors before it: behind each of them the target chooses."""
        paths: list[tuple[int, ...]] = [()]
        for index, token in enumerate(self.tokens):
            paths.append((*paths[index if self.parents is None else self.parents[index] + 1], token))
        return paths


NOTHING = Proposal()


def tree_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each token, 1 for a child of the pending token; the greatest is the length of the proposal."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


class Drafter(Protocol):
    """Proposes tokens for many sequences at once. Deterministic in its asks and each job's own randomness."""

    @property
    def state(self) -> DrafterState:
        """Its name, revision and longest draft."""

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str) -> None:
        """A sequence wants drafts from now on, from its beginning or from the middle of its output.

        `text` is its prompt and its output so far, a live list that grows with every round.
        """

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """One proposal an ask, in order."""

    def close(self, job_id: str) -> None:
        """A sequence has ended, or drafts with another drafter; nothing happens if it was never opened."""

    def clear(self) -> None:
        """Forget every sequence, whatever state a failed round left."""
