"""What a server counts of all its requests together, from its page for Prometheus. vLLM's names are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.acceptance import AcceptanceCounts, InconsistentCounts
from alphaloop.errors import ReplyInvalid
from worker.servers.prometheus_page import values

_DRAFTS: Final = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS: Final = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED_AT: Final = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_REQUESTS: Final = "vllm:request_success_total"  #: with every reason of an end, `abort` too
_TOKENS: Final = "vllm:generation_tokens_total"
_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_NAMES: Final = (_DRAFTS, _DRAFT_TOKENS, _ACCEPTED_AT, _REQUESTS, _TOKENS, _RUNNING, _WAITING)


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the server was started, of all requests, whoever sent them."""

    num_requests: int  #: that have ended
    num_tokens: int  #: of their texts
    num_drafts: int  #: rounds that drafted
    num_draft_tokens: int
    accepts: tuple[int, ...]  #: tokens accepted at each position
    num_present: int = 0  #: requests that run or wait now

    @classmethod
    def of_page(cls, page: str) -> Counters:
        """From the page. Raises ReplyInvalid where it lacks one of them."""
        found = values(page, _NAMES, by="position", hint="only a vLLM that drafts has all counters")
        at = found[_ACCEPTED_AT]
        try:
            accepts = tuple(at[position] for position in sorted(at, key=int))
        except ValueError:
            raise ReplyInvalid(f"expected a number as position of {_ACCEPTED_AT}, found none") from None
        return cls(
            num_requests=sum(found[_REQUESTS].values()),
            num_tokens=sum(found[_TOKENS].values()),
            num_drafts=sum(found[_DRAFTS].values()),
            num_draft_tokens=sum(found[_DRAFT_TOKENS].values()),
            accepts=accepts,
            num_present=sum(found[_RUNNING].values()) + sum(found[_WAITING].values()),
        )


def lags(before: Counters, after: Counters, num_requests: int, num_tokens: int) -> bool:
    """Whether so many requests of ours may not be in `after` yet: they ended a moment ago."""
    has_requests = after.num_requests - before.num_requests >= num_requests
    return not (has_requests and after.num_tokens - before.num_tokens >= num_tokens) or after.num_present > 0


def counts_between(
    before: Counters, after: Counters, num_requests: int, num_tokens: int, num_draft_tokens: int
) -> AcceptanceCounts | None:
    """Of `num_requests` texts with `num_tokens` together: their rounds behind the prompts', and one for all prompts.

    What was accepted at each position is the server's. What was tried there is too if every round drafted k =
    `num_draft_tokens`; where some drafted less, the last positions are taken to have lacked. None where the server did
    anything else meanwhile, was started again, or counts what cannot be.
    """
    # Counters that fell were not all of ours: a new server would have to begin at zero, as `before` then did too.
    is_ours = (after.num_requests - before.num_requests, after.num_tokens - before.num_tokens) == (
        num_requests,
        num_tokens,
    )
    if not is_ours or before.num_present or after.num_present or len(before.accepts) != len(after.accepts):
        return None
    accepts = tuple(now - then for then, now in zip(before.accepts, after.accepts, strict=True))
    num_drafts = after.num_drafts - before.num_drafts
    num_proposed = after.num_draft_tokens - before.num_draft_tokens
    if min(num_drafts, num_proposed, *accepts) < 0 or num_tokens < num_requests:
        return None
    behind = num_tokens - num_requests  # each text's first token is of the round that read its prompt
    if not num_drafts:
        return AcceptanceCounts(rounds=behind + 1, num_empty_rounds=behind + 1)
    proposed = _proposed(num_drafts, num_proposed, accepts)
    if proposed is None or len(accepts) != num_draft_tokens:
        return None
    num_vanilla = behind - num_drafts - sum(accepts)
    num_cropped = max(0, -num_vanilla)  # the last round of a text that was cut at its limit
    if num_cropped > num_requests * num_draft_tokens:
        return None
    num_vanilla = max(0, num_vanilla)
    try:
        return AcceptanceCounts(
            rounds=1 + num_vanilla + num_drafts,
            num_empty_rounds=1 + num_vanilla,
            num_cropped=num_cropped,
            proposed=proposed,
            trials=(num_drafts, *map(min, accepts[:-1], proposed[1:])),
            accepts=accepts,
        )
    except InconsistentCounts:
        return None


def _proposed(num_drafts: int, num_proposed: int, accepts: Sequence[int]) -> tuple[int, ...] | None:
    """Tokens drafted at each position, of `num_proposed` in all; None where they cannot be so many."""
    lacking = num_drafts * len(accepts) - num_proposed
    found: list[int] = []
    for accepted in reversed(accepts[1:]):
        lacks = min(lacking, num_drafts - accepted)
        found.insert(0, num_drafts - lacks)
        lacking -= lacks
    return (num_drafts, *found) if lacking == 0 else None
