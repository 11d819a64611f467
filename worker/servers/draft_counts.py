"""Acceptance counts of one request, from what its server reported about drafts.

A server says how many tokens a text has, and of the rounds with a draft how many tokens each accepted. The rounds
without a draft are the rest, since every round yields one token more than it accepts. Where fewer tokens came out than
rounds yield, the last round was cut, at the end of the text or at its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from alphaloop.acceptance import AcceptanceCounts, InconsistentCounts
from alphaloop.server_identity import Granularity


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Draft tokens of one request, as finely as the server reported them."""

    granularity: Granularity
    num_proposed: int = 0
    num_accepted: int = 0
    counts: AcceptanceCounts | None = None  #: by position; None where the server does not tell enough for them
    longest_draft: int = 0  #: lower bound of the longest draft of a round; 0 where that is not reported
    doubt: str | None = None  #: why the counts cannot be believed, in words; the text may be right all the same


NOTHING = DraftCounts("nothing")


def of_vanilla(granularity: Granularity, num_tokens: int, num_texts: int = 1) -> DraftCounts:
    """Texts of `num_tokens` together without a draft: a round a token, and the first pass of one without a token."""
    num_rounds = max(num_texts, num_tokens)
    return DraftCounts(
        granularity, counts=AcceptanceCounts(num_rounds, num_rounds, num_cropped=num_rounds - num_tokens)
    )


def from_rounds(drafted: Sequence[int], accepted: Sequence[int], num_tokens: int) -> DraftCounts:
    """Exact counts by position, from the rounds that drafted, in their order."""
    if len(drafted) != len(accepted):
        return DraftCounts("rounds", doubt=f"{len(drafted)} rounds drafted, {len(accepted)} were verified")
    if not drafted:
        return of_vanilla("rounds", num_tokens)
    num_vanilla, num_cut = _rest(len(accepted), sum(accepted), num_tokens)
    counts = AcceptanceCounts(rounds=num_vanilla, num_empty_rounds=num_vanilla)
    try:
        if num_cut > accepted[-1]:
            raise InconsistentCounts(f"the last round accepted {accepted[-1]} tokens, and {num_cut} are missing")
        for number, (proposed, taken) in enumerate(zip(drafted, accepted, strict=True), start=1):
            cut = num_cut if number == len(accepted) else 0
            counts = counts.with_round(proposed, taken, num_emitted=taken + 1 - cut)
    except InconsistentCounts as error:
        return DraftCounts("rounds", doubt=f"for {num_tokens} tokens: {error.message}")
    return DraftCounts("rounds", sum(drafted), sum(accepted), counts, max(drafted))


def from_lengths(histogram: Sequence[int], num_proposed: int, num_tokens: int, num_rounds: int) -> DraftCounts:
    """From how many rounds accepted 0, 1, 2 … tokens.

    The counts are by position only where every round drafted as many tokens as the histogram has places after the
    first: then a round that accepted i tokens was tested at position i + 1. Which round was cut is not known, so a cut
    one counts whole.
    """
    longest = len(histogram) - 1
    num_accepted = sum(length * rounds for length, rounds in enumerate(histogram))
    if sum(histogram) != num_rounds or num_accepted > num_proposed:
        why = f"{num_rounds} rounds drafted {num_proposed} tokens, but {sum(histogram)} accepted {num_accepted} of them"
        return DraftCounts("lengths", doubt=why)
    if not num_rounds:
        return of_vanilla("lengths", num_tokens)
    num_vanilla, num_cut = _rest(num_rounds, num_accepted, num_tokens)
    drafted = max(-(-num_proposed // num_rounds), *(i for i, rounds in enumerate(histogram) if rounds))
    if num_cut > longest:
        return DraftCounts("lengths", doubt=f"{num_cut} of the tokens that {num_rounds} rounds yield are missing")
    if num_proposed != num_rounds * longest:
        return DraftCounts("lengths", num_proposed, num_accepted, longest_draft=drafted)
    reached = tuple(accumulate(reversed(histogram)))[::-1]  # rounds that accepted at least 0, 1, 2 … tokens
    try:
        counts = AcceptanceCounts(
            rounds=num_vanilla + num_rounds,
            num_empty_rounds=num_vanilla,
            num_cropped=num_cut,
            proposed=(num_rounds,) * longest,
            trials=reached[:-1],
            accepts=reached[1:],
        )
    except InconsistentCounts as error:
        return DraftCounts("lengths", doubt=f"for {num_tokens} tokens: {error.message}")
    return DraftCounts("lengths", num_proposed, num_accepted, counts, drafted)


def from_sums(num_proposed: int, num_accepted: int, num_tokens: int) -> DraftCounts:
    """From the tokens alone: nothing is known about positions."""
    if not num_proposed:
        return of_vanilla("sums", num_tokens)
    if num_accepted > num_proposed or num_accepted > num_tokens:
        return DraftCounts(
            "sums", doubt=f"{num_accepted} of {num_proposed} drafted tokens were accepted, for {num_tokens} tokens"
        )
    return DraftCounts("sums", num_proposed, num_accepted)


def _rest(num_rounds: int, num_accepted: int, num_tokens: int) -> tuple[int, int]:
    """Rounds without a draft, the first pass among them, and tokens that were cut off."""
    yielded = num_rounds + num_accepted + 1
    return (1, yielded - num_tokens) if yielded > num_tokens else (num_tokens - num_rounds - num_accepted, 0)
