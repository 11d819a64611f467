"""Where a decision session reads evidence: a worker's cache over the database, or a snapshot in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

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


@dataclass(frozen=True, slots=True)
class JobLengths:
    """Of a task's weighted jobs; means are None without jobs."""

    jobs: float
    output_tokens: float | None
    prompt_tokens: float | None


class Standing(NamedTuple):
    """The evidence of a place at one moment."""

    leaves: Mapping[EvidenceKey, KeyEvidence]
    #: Of each leaf, in order, the last row of the ledger that it includes (`ledger_id`). The row names the key too.
    #: Empty where evidence does not come from the database.
    positions: tuple[int, ...] = ()
    error: ExpectationError = NO_ERROR


class TaskSums(NamedTuple):
    """A drafter's sums in each task that used it, in the order of the tasks."""

    sums: Sequence[EvidenceSums]
    positions: tuple[int, ...] = ()  #: as those of a `Standing`, of all leaves


class EvidenceSource(Protocol):
    """Evidence for one target and one engine."""

    def version(self, place: Place) -> int:
        """A number that grows by the number of jobs whenever evidence is added there."""

    def standing(self, place: Place, now: datetime) -> Standing:
        """The evidence there, by key, faded to `now`."""

    def of_tasks(self, drafter: DrafterState, now: datetime) -> TaskSums:
        """The drafter's sums in each task that used it recently, faded to `now`."""

    def lengths(self, task: str, drafters: Iterable[DrafterState], now: datetime) -> JobLengths:
        """How long the task's jobs are, vanilla ones and those with these drafters together."""
