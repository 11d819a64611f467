"""Counts of a request whose server told only sums: how many tokens were drafted and accepted, and how many came out.

Tokens a round at the server's one k follow exactly, up to the cut of the last round, because each round yields one
token more than it accepts. At which positions tokens were accepted does not follow. The accepted tokens are spread as
if each position were accepted with the same α: their sum is right, and so are tokens a round at k. Shorter drafts are
not known from them, but a server drafts no shorter ones.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Final

from alphaloop.acceptance import AcceptanceCounts

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
