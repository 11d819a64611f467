"""What the experiment is told of a request that a server decoded, and how requests are assigned.

A server cannot change how a running request drafts. So an arm is drawn when a request starts, and holds to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from alphaloop.switchback.expectation import Expected
from alphaloop.switchback.slices import Stratum, Treatment


class Trial(NamedTuple):
    """Requests that are compared with each other: of one subject, decided for the same drafter and k."""

    subject: str
    treatment: Treatment


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """A request, after it ended. Its rounds are passes of the target for it, whatever else shared them."""

    started_at: datetime
    num_rounds: int  #: behind the one that read the prompt; 0 where the text has one token
    num_tokens: int  #: that these put out
    num_proposed: int  #: draft tokens that the target read in them
    decode_s: float  #: that these took
    prompt_s: float | None  #: to the first token, without waiting; None where `decode_s` and the counts include it
    num_beside: float  #: requests in flight at its endpoint meanwhile, whoever sent them, the mean, itself included
    num_elsewhere: float  #: the same at the other endpoints
    mean_context_tokens: float
    expected: Expected | None = None  #: of its decision

    @property
    def stratum(self) -> Stratum:
        """Of this request alone."""
        return Stratum.of(self.num_beside, self.mean_context_tokens)
