"""A stream whose jobs come from several segments: one test of all of them, and one of each.

A mean over segments can stay while every segment moves (Simpson 1951), and a small segment moves the mean too little
to be seen. So each segment has windows and a reference of its own, from the moment on at which the stream has two.
Every job is then in two tests. Each of them gets half of the job's share of false alarms, so that the stated rate holds
for all tests together (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from alphaloop.errors import StoreError
from alphaloop.measurements import DriftSubject, WatchedJob
from scheduler.drift.memory import NUM_JOBS
from scheduler.drift.phases import Rules
from scheduler.drift.stream import WatchedStream
from scheduler.drift.verdict import WITHOUT_SEGMENT, verdicts
from scheduler.verdicts import State, TrafficVerdict

#: Segments with a test of their own; later ones are in the test of all. A memory takes some 26 kB as JSON.
MOST_SEGMENTS: Final = 8
_MOVED: Final = (State.FELL, State.ROSE)


@dataclass(frozen=True, slots=True)
class Rates:
    """The rules of a test whose jobs are in no other, and of one of two tests that share their jobs."""

    alone: Rules
    shared: Rules

    @classmethod
    def of(cls, false_alarm_jobs: float, reference_jobs: int, margin: float) -> Self:
        """Rules under which all tests together raise one false alarm in `false_alarm_jobs` jobs."""
        return cls(*(Rules(number * false_alarm_jobs, reference_jobs, margin) for number in (1, 2)))


@dataclass(slots=True)
class SegmentedStream:
    """The memories of a stream."""

    whole: WatchedStream = field(default_factory=WatchedStream)
    parts: dict[str, WatchedStream] = field(default_factory=dict)  #: by segment; empty while there is only one

    @property
    def num_jobs(self) -> int:
        """Jobs that were added and tested a draft."""
        return int(self.whole.memory.clock[NUM_JOBS])

    def add(self, jobs: Sequence[WatchedJob], rates: Rates) -> None:
        """Add jobs in the order in which they were decoded. In how many calls they come changes nothing."""
        num_alone = self._num_alone(jobs)
        self.whole.add(jobs[:num_alone], rates.alone)
        self.whole.add(jobs[num_alone:], rates.shared)
        by_segment: dict[str, list[WatchedJob]] = {}
        for job in jobs[num_alone:]:
            by_segment.setdefault(job.segment, []).append(job)
        for segment, its in by_segment.items():
            if segment in self.parts or len(self.parts) < MOST_SEGMENTS:
                self.parts.setdefault(segment, WatchedStream()).add(its, rates.shared)

    def verdicts(self, subject: DriftSubject, margin: float) -> list[TrafficVerdict]:
        """Of all segments together first; then of each, where there are two or more.

        A segment whose own test is in alarm is told by that test, the others by what the alarm of all shows of them.
        """
        overall, *segments = verdicts(subject, self.whole, margin)
        own = {name or WITHOUT_SEGMENT: verdicts(subject, part, margin)[0] for name, part in self.parts.items()}
        found = [overall]
        for verdict in segments:
            its = own.get(verdict.segment)
            if its is not None and its.state in _MOVED:
                found.append(replace(its, segment=verdict.segment))
            elif {verdict.state, overall.state} == {State.FELL, State.ROSE}:
                # Alone, an interval of the alarm of all does not show that a segment moved against all.
                found.append(replace(verdict, state=State.TOO_LITTLE, changed_after=None, changed_before=None))
            else:
                found.append(verdict)
        return found

    def document(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {**self.whole.document(), "parts": {name: part.document() for name, part in self.parts.items()}}

    @classmethod
    def of(cls, document: Any) -> Self:
        """The inverse of `document`. Raises StoreError for anything else."""
        parts = document.get("parts", {}) if isinstance(document, Mapping) else None
        if not isinstance(parts, Mapping):
            raise StoreError("memory of a drift test: expected parts by segment")
        return cls(WatchedStream.of(document), {str(name): WatchedStream.of(part) for name, part in parts.items()})

    def _num_alone(self, jobs: Sequence[WatchedJob]) -> int:
        """How many of the first jobs come before the stream has two segments."""
        seen = set(self.whole.segments)
        for number, job in enumerate(jobs):
            seen.add(job.segment)
            if len(seen) > 1:
                return number
        return len(jobs)
