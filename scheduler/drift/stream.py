"""A stream as the test keeps it: its memory, and which draft lengths and segments the rows of its tables stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np

from alphaloop.errors import StoreError
from alphaloop.measurements import WatchedJob
from scheduler.drift.memory import POSITIONS, ROWS, SEGMENTS, Memory, empty_memory, from_document, to_document
from scheduler.drift.phases import Jobs, Rules, fold

Name = TypeVar("Name", int, str)


@dataclass(slots=True)
class WatchedStream:
    """The memory of a stream and the names of its rows; later names share the last row."""

    memory: Memory = field(default_factory=empty_memory)
    draft_lengths: list[int] = field(default_factory=list)  #: k, by row
    segments: list[str] = field(default_factory=list)  #: by row; empty is the jobs without one

    def add(self, jobs: Sequence[WatchedJob], rules: Rules) -> None:
        """Add jobs in the order in which they were decoded. In how many calls they come changes nothing."""
        fold(self.memory, rules, self._page(jobs))

    def document(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {
            "draft_lengths": self.draft_lengths,
            "segments": self.segments,
            "memory": to_document(self.memory),
        }

    @classmethod
    def of(cls, document: Any) -> Self:
        """The inverse of `document`. Raises StoreError for anything else."""
        try:
            lengths, segments = document["draft_lengths"], document["segments"]
            found = cls(from_document(document["memory"]), [int(k) for k in lengths], [str(name) for name in segments])
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError("memory of a drift test: expected draft_lengths, segments and memory") from error
        if len(found.draft_lengths) > ROWS or len(found.segments) > SEGMENTS:
            raise StoreError(f"memory of a drift test: expected at most {ROWS} draft lengths and {SEGMENTS} segments")
        return found

    def _page(self, jobs: Sequence[WatchedJob]) -> Jobs:
        trials, accepts = np.zeros((len(jobs), POSITIONS)), np.zeros((len(jobs), POSITIONS))
        for index, job in enumerate(jobs):
            width = min(len(job.trials), POSITIONS)
            trials[index, :width] = job.trials[:width]
            accepts[index, :width] = job.accepts[:width]
        return Jobs(
            rows=np.array([_row(self.draft_lengths, job.num_draft_tokens, ROWS) for job in jobs], dtype=np.int64),
            trials=trials,
            accepts=accepts,
            tokens=np.array([job.num_tokens for job in jobs], dtype=np.float64),
            at=np.array([job.decoded_at.timestamp() for job in jobs], dtype=np.float64),
            segments=np.array([_row(self.segments, job.segment, SEGMENTS) for job in jobs], dtype=np.int64),
        )


def _row(names: list[Name], name: Name, most: int) -> int:
    """The row of a name; a new name gets a new one while there are some."""
    if name in names:
        return names.index(name)
    if len(names) < most - 1:
        names.append(name)
        return len(names) - 1
    return most - 1
