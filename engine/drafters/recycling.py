"""Recycling: propose the target's own likeliest tokens after the last pass over the same token.

Luo et al., arXiv 2408.08696 (Token Recycling). Every pass gives the target's likeliest tokens after each token that it
reads, also after drafts that it rejects. A token's latest ones are proposed after it, theirs after them, and so on: a
tree. That is the pool of pairs that lookahead decoding (Fu et al., arXiv 2402.02057) fills from its own Jacobi
branches, without rows of the pass that only fill it.

What is proposed follows from earlier rounds, so its draft distribution is one-hot, whatever a job draws.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence
from itertools import count
from typing import Final

from alphaloop.engine import Sampling
from alphaloop.settings.models import RecyclingDrafterSettings
from engine.proposal import NOTHING, Ask, Drafter, Proposal
from engine.states import NUM_SAID, SAID

#: Version of what is kept and of the order of the tree, part of the revision.
_VERSION: Final = 1
#: Tokens of a text whose followers are known at most: the latest ones.
MOST_KNOWN: Final = 4096
#: How often the target chooses the token that was its n-th likeliest the time before: SmolLM2, 13 tasks.
_RIGHT: Final = (0.46, 0.11, 0.05, 0.04, 0.03, 0.02, 0.01, 0.01)

_Followers = dict[int, list[int]]


class RecyclingDrafter(Drafter):
    """Drafts without a model. A text begins with nothing known, and shares nothing."""

    taps = (SAID,)

    def __init__(self, name: str, settings: RecyclingDrafterSettings, end_tokens: Container[int]) -> None:
        self._num_branches = settings.num_branches
        self._end_tokens = end_tokens
        self._known: dict[str, _Followers] = {}
        self.state = settings.state(name, f"recycling{_VERSION}-n{NUM_SAID}-b{settings.num_branches}")

    def open(self, job_id: str, text: Sequence[int], sampling: Sampling, task: str, segment: str = "") -> None:
        """The sequence wants drafts from now on."""
        self._known[job_id] = {}

    def close(self, job_id: str) -> None:
        """Forget what was said in a text."""
        self._known.pop(job_id, None)

    def clear(self) -> None:
        """Forget every text."""
        self._known.clear()

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """One proposal an ask, in order; none after a token that the target has not read yet."""
        proposals = []
        for ask in asks:
            known = self._known[ask.job_id]
            if ask.states is not None and SAID in ask.states.by_tap:
                _take(known, ask.states.by_tap[SAID].tolist())
            elif ask.is_timed:  # the target has read none of a scratch text
                latest = ask.text[: -1 - NUM_SAID : -1]
                _take(known, [[token, *latest] for token in ask.text[-1 - ask.num_tokens :]])
            proposals.append(self._tree(known, ask.text[-1], min(ask.num_tokens, self.state.max_draft_tokens)))
        return proposals

    def _tree(self, known: _Followers, last: int, num_tokens: int) -> Proposal:
        """The tokens that are likeliest to be accepted, each after its parent."""
        tokens: list[int] = []
        parents: list[int] = []
        numbers = count()  # among equally likely tokens the first wins
        open_: list[tuple[float, int, int, int]] = []

        def grow(parent: int, token: int, chance: float) -> None:
            for follower, right in zip(known.get(token, ())[: self._num_branches], _RIGHT, strict=False):
                heapq.heappush(open_, (-chance * right, next(numbers), parent, follower))

        grow(-1, last, 1.0)
        while open_ and len(tokens) < num_tokens:
            chance, _, parent, token = heapq.heappop(open_)
            tokens.append(token)
            parents.append(parent)
            if token not in self._end_tokens:
                grow(len(tokens) - 1, token, -chance)
        return Proposal(tuple(tokens), tuple(parents)) if tokens else NOTHING


def _take(known: _Followers, said: Sequence[Sequence[int]]) -> None:
    """Keep each token's latest followers; the tokens that were read longest ago are forgotten first."""
    for token, *followers in said:
        known.pop(token, None)
        known[token] = followers
    while len(known) > MOST_KNOWN:
        del known[next(iter(known))]
