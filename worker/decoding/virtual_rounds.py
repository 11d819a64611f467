"""The rounds in which look-up would have decoded a text that others are writing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from alphaloop.acceptance import AcceptanceCounts
from worker.decoding.proposal import Proposal
from worker.decoding.verification.tree import tree_depths

#: Output tokens of a text in which a virtual round may begin. Bounds what one text takes: 10 to 30 ms.
MAX_TOKENS: Final = 512


class VirtualRounds:
    """The counts of decoding a text at k = `num_draft_tokens` with `propose`, which looks at `seen`.

    `seen` is the prompt and grows by the tokens of each round. `max_tokens` is the job's own limit: a round never
    proposes past that. The round that ends the text is cropped like a real one. Rounds that would begin behind
    MAX_TOKENS are left out.
    """

    def __init__(
        self, propose: Callable[[int], Proposal], seen: list[int], num_draft_tokens: int, max_tokens: int
    ) -> None:
        self._propose = propose
        self._seen = seen
        self._num_prompt = len(seen)
        self._num_draft_tokens = num_draft_tokens
        self._max_tokens = max_tokens
        #: (depth, accepted, emitted, tested) of each round
        self._rounds: Counter[tuple[int, int, int, int]] = Counter()

    def take_round(self, text: Sequence[int], *, has_ended: bool, is_first_drafted: bool = False) -> bool:
        """Count the next round over `text`, prompt and output; False where no round is left to count for now.

        While the text is being written, a round waits until as many tokens stand as it could accept, and one more. The
        first round is the prefill, which gives a token without a proposal, unless `is_first_drafted`.
        """
        seen = self._seen
        begin = len(seen)
        num_done = begin - self._num_prompt
        if num_done >= MAX_TOKENS or begin >= len(text):
            return False
        if not num_done and not is_first_drafted:
            self._rounds[0, 0, 1, 0] += 1
            seen.append(text[begin])
            return True
        room = min(self._num_draft_tokens, self._max_tokens - num_done - 1)
        following = text[begin : begin + room + 1]
        if len(following) <= room and not has_ended:
            return False
        depth, num_accepted, num_tested = _agreement(self._propose(room), following)
        num_emitted = min(num_accepted + 1, len(following))
        self._rounds[depth, num_accepted, num_emitted, num_tested] += 1
        seen += following[:num_emitted]
        return True

    @property
    def counts(self) -> AcceptanceCounts:
        """Of all rounds taken."""
        total = AcceptanceCounts()
        for (depth, num_accepted, num_emitted, num_tested), times in self._rounds.items():
            one = AcceptanceCounts().with_round(depth, num_accepted, num_emitted=num_emitted, num_tested=num_tested)
            total += _times(one, times)
        return total


def _agreement(proposal: Proposal, following: Sequence[int]) -> tuple[int, int, int]:
    """(depth of the proposal, tokens of it that follow, depths at which one was tried)."""
    tokens = proposal.tokens
    if proposal.parents is None:
        num_agreeing = 0
        for token, real in zip(tokens, following, strict=False):
            if token != real:
                break
            num_agreeing += 1
        return len(tokens), num_agreeing, min(len(tokens), num_agreeing + 1)
    depths = tree_depths(proposal.parents)
    parent, num_agreeing, num_tested = -1, 0, 0
    # Siblings differ and children come behind their parents, so one walk finds the path.
    for place, (token, of) in enumerate(zip(tokens, proposal.parents, strict=True)):
        if of != parent:
            continue
        num_tested = num_agreeing + 1
        if num_agreeing < len(following) and token == following[num_agreeing]:
            parent, num_agreeing = place, num_agreeing + 1
    return max(depths, default=0), num_agreeing, num_tested


def _times(counts: AcceptanceCounts, times: int) -> AcceptanceCounts:
    return AcceptanceCounts(
        times * counts.rounds,
        times * counts.num_empty_rounds,
        times * counts.num_cropped,
        tuple(times * count for count in counts.proposed),
        tuple(times * count for count in counts.trials),
        tuple(times * count for count in counts.accepts),
    )
