"""Where a decision session reads evidence: a worker's cache over the database, or a snapshot in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

from alphaloop.acceptance import EvidenceKey
from alphaloop.deciding.evidence import EvidenceSums
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


class EvidenceSource(Protocol):
    """Evidence for one target and one engine."""

    def version(self, place: Place) -> int:
        """A number that grows by the number of jobs whenever evidence is added there."""

    def leaves(self, place: Place, now: datetime) -> dict[EvidenceKey, KeyEvidence]:
        """The evidence there, by key, faded to `now`."""

    def of_tasks(self, drafter: DrafterState, now: datetime) -> list[EvidenceSums]:
        """The drafter's sums in each task that used it recently, faded to `now`."""

    def lengths(self, task: str, drafters: Iterable[DrafterState], now: datetime) -> JobLengths:
        """How long the task's jobs are, vanilla ones and those with these drafters together."""

    def add(self, jobs: Iterable[tuple[EvidenceKey, EvidenceSums]]) -> None:
        """Count jobs that were recorded together."""
