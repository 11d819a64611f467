"""Acceptance counts of one request, from what its server reported about drafts.

A server says how many tokens a text has, and of the rounds with a draft how many tokens each accepted. The rounds
without a draft are the rest, since every round yields one token more than it accepts. Where fewer tokens came out than
rounds yield, the last round was cut, at the end of the text or at its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from alphaloop.acceptance import AcceptanceCounts, InconsistentCounts, counts_from_sums
from alphaloop.server_identity import Granularity


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Draft tokens of one request, as finely as the server reported them."""

    granularity: Granularity
    num_proposed: int = 0
    num_accepted: int = 0
    #: By position, estimated where the granularity is `sums`; None where the server does not report enough for them.
    counts: AcceptanceCounts | None = None
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

    What was accepted at each position is exact. So is what was tested there, where every round drafted as many tokens
    as the histogram has places after the first: a round that accepted i tokens was tested at position i + 1. Elsewhere
    only the sum of what was drafted is known. Which round was cut is not known, so a cut one counts whole.
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
    reached = tuple(accumulate(reversed(histogram)))[::-1]  # rounds that accepted at least 0, 1, 2 … tokens
    try:
        proposed = proposed_by_position(num_rounds, num_proposed, reached[1:])
        if proposed is None:
            raise InconsistentCounts(f"{num_rounds} rounds drafted {num_proposed} tokens of at most {longest} each")
        counts = AcceptanceCounts(
            rounds=num_vanilla + num_rounds,
            num_empty_rounds=num_vanilla,
            num_cropped=num_cut,
            proposed=proposed,
            trials=tuple(map(min, reached[:-1], proposed)),
            accepts=reached[1:],
        )
    except InconsistentCounts as error:
        return DraftCounts("lengths", doubt=f"for {num_tokens} tokens: {error.message}")
    is_exact = num_proposed == num_rounds * longest
    return DraftCounts("lengths" if is_exact else "sums", num_proposed, num_accepted, counts, drafted)


def proposed_by_position(num_drafts: int, num_proposed: int, accepts: Sequence[int]) -> tuple[int, ...] | None:
    """Tokens drafted at each position, `num_proposed` in all; None where the numbers contradict each other.

    Where some of the `num_drafts` rounds drafted less than the longest, the last positions are taken to have lacked.
    """
    lacking = num_drafts * len(accepts) - num_proposed
    later: list[int] = []
    for accepted in reversed(accepts[1:]):
        lacks = min(lacking, num_drafts - accepted)
        later.insert(0, num_drafts - lacks)
        lacking -= lacks
    return (num_drafts, *later) if lacking == 0 else None


def from_reached(histogram: Sequence[int], num_tokens: int, num_rounds: int, longest: int) -> DraftCounts:
    """From how many rounds accepted 0, 1, 2 … tokens, where rounds drafted 0 to `longest`, it is not known how many.

    A round that accepted i tokens counts as tested at position i + 1, also where its draft ended there. So tokens a
    round are exact, and α by position is a lower bound.
    """
    if any(histogram[longest + 1 :]):
        why = f"a round accepted {len(histogram) - 1} tokens, where drafts have at most {longest}"
        return DraftCounts("reached", doubt=why)
    whole = (*histogram[: longest + 1], *(0,) * (longest + 1 - len(histogram)))
    return replace(from_lengths(whole, num_rounds * longest, num_tokens, num_rounds), granularity="reached")


def from_sums(num_proposed: int, num_accepted: int, num_tokens: int, num_draft_tokens: int | None) -> DraftCounts:
    """From the tokens alone: positions are estimated for drafts of `num_draft_tokens`, and not known without them."""
    if not num_proposed:
        return of_vanilla("sums", num_tokens)
    counts = counts_from_sums(num_tokens, num_proposed, num_accepted, num_draft_tokens or num_proposed)
    if counts is None:
        why = f"{num_accepted} of {num_proposed} drafted tokens were accepted, for {num_tokens} tokens"
        return DraftCounts("sums", doubt=why if num_draft_tokens is None else f"{why}, with k = {num_draft_tokens}")
    return DraftCounts("sums", num_proposed, num_accepted, counts if num_draft_tokens is not None else None)


def _rest(num_rounds: int, num_accepted: int, num_tokens: int) -> tuple[int, int]:
    """Rounds without a draft, the first pass among them, and tokens that were cut off."""
    yielded = num_rounds + num_accepted + 1
    return (1, yielded - num_tokens) if yielded > num_tokens else (num_tokens - num_rounds - num_accepted, 0)
