"""Where a decision session reads evidence: a worker's cache over the database, or a snapshot in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple, Protocol

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
from alphaloop.deciding.expectation_error import NO_ERROR, ExpectationError
from alphaloop.deciding.goodput import DrafterState
from alphaloop.deciding.key_evidence import KeyEvidence


class Place(NamedTuple):
    """One drafter revision in one task; both names empty are vanilla decoding."""

    task: str
    drafter: str = ""
    draft_revision: str = ""


#: Texts that ended so long ago that they weigh less are none.
_LEAST_ENDS: Final = 1e-9


@dataclass(frozen=True, slots=True)
class JobLengths:
    """How long a task's texts are; means are None without any."""

    jobs: float  #: weighted, each once; 0 where no text ended by itself
    output_tokens: float | None
    prompt_tokens: float | None

    @classmethod
    def of(cls, sums: Iterable[tuple[float, EvidenceSums]]) -> JobLengths:
        """From sums with their weights.

        A text that a limit cut is longer than what was seen of it. The mean length is estimated as with a constant
        chance of an end at each token: all tokens over the texts that ended by themselves. So a cut text never makes it
        shorter, and without cut texts it is their mean. Until one has ended, nothing is known.
        """
        texts = ends = output = prompt = 0.0
        for weight, its in sums:
            texts += weight * its.texts
            ends += weight * its.ends
            output += weight * its.output_tokens
            prompt += weight * its.prompt_tokens
        known = ends > _LEAST_ENDS
        return cls(texts if known else 0.0, output / ends if known else None, prompt / texts if texts > 0 else None)


class Standing(NamedTuple):
    """The evidence of a place at one moment."""

    leaves: Mapping[EvidenceKey, KeyEvidence]
    error: ExpectationError = NO_ERROR


class EvidenceSource(Protocol):
    """Evidence for one target and one engine."""

    def version(self, place: Place) -> int:
        """A number that grows by the number of jobs whenever evidence is added there."""

    def standing(self, place: Place, now: datetime) -> Standing:
        """The evidence there, by key, faded to `now`."""

    def of_tasks(self, drafter: DrafterState, now: datetime) -> Sequence[EvidenceSums]:
        """The drafter's sums in each task that used it recently, faded to `now`."""

    def lengths(self, task: str, drafters: Iterable[DrafterState], now: datetime) -> JobLengths:
        """How long the task's jobs are, vanilla ones and those with these drafters together."""
