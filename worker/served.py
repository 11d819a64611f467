"""What an engine tells of jobs that servers decode."""

from __future__ import annotations

from dataclasses import dataclass

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.errors import AlphaloopError
from alphaloop.server_identity import Granularity


@dataclass(frozen=True, slots=True)
class SliceCounts:
    """What a server's own counters moved by while some requests of one evidence key, and no others, ran there."""

    num_requests: int
    num_prompt_tokens: int  #: of all
    num_tokens: int  #: of all texts
    counts: AcceptanceCounts  #: all rounds behind the prompts', and one for the prompts

    def num_passes(self, num_tokens: int) -> int:
        """Passes of the target for one of its texts, if each had as many tokens a round."""
        behind = max(1, self.num_tokens - self.num_requests)
        return 1 + round((num_tokens - 1) * (self.counts.rounds - 1) / behind)


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Requests in flight while one was, the means: ours, and those of others as far as servers told of them."""

    num_beside: float  #: at its endpoint, itself included
    num_elsewhere: float  #: at all other endpoints of the fleet together
    is_whole: bool  #: whether every endpoint told of all its requests, all the time


@dataclass(frozen=True, slots=True)
class Served:
    """Where a server decoded a text, and how fast; costs are learned from it, because no server tells of its passes."""

    endpoint: str  #: its name in the settings
    drafter: str | None  #: what drafts there; None: nothing does
    draft_revision: str  #: empty without a drafter
    num_draft_tokens: int  #: the k that decoded it; 0 without a drafter
    num_beside: float  #: our requests in flight at that endpoint while this one was, the mean, itself included
    num_rounds: int | None  #: passes of the target, the one that read the prompt included; None where not told
    prefill_s: float | None  #: from the start of work to the first token; None where not known
    decode_s: float | None  #: from the first token to the last; None where not known
    queue_s: float | None = None  #: in the server's queue; None where not known
    granularity: Granularity = "rounds"  #: how finely the server told what was drafted
    num_proposed: int = 0  #: draft tokens, as the server told
    num_accepted: int = 0
    is_counted: bool = True  #: whether the job's counts are known; if not, they say only how many tokens it has
    slice_counts: SliceCounts | None = None  #: of all requests of the slice that this one ended
    load: ServerLoad | None = None  #: of the whole fleet meanwhile; None of a request that was no job's

    def num_passes(self, num_tokens: int) -> int | None:
        """Passes of the target for a text of `num_tokens`; None where not even sums are told.

        Each pass yields one token more than it accepts; the last one may have been cut.
        """
        if self.num_rounds is not None:
            return self.num_rounds
        if self.drafter is None:
            return num_tokens
        return max(1, num_tokens - self.num_accepted) if self.num_proposed else None


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A job that a server refused or failed to decode while the server itself was well."""

    job_id: str
    error: AlphaloopError
    is_final: bool  #: whether the same request would fail for ever
