"""The inputs of a run: decoded traffic by stream, probe results, and draft revisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from alphaloop.as_decoded import NextJob
from alphaloop.measurements import DecodedJob, DriftSubject, ProbeResult, Stream
from alphaloop.messages import Mode


@dataclass(frozen=True, slots=True)
class RunCounts:
    """The inputs of estimates and tests, read at `now`."""

    since: datetime
    now: datetime
    streams: Mapping[Stream, Sequence[DecodedJob]]  #: the newest jobs of each
    probes: Sequence[ProbeResult]
    num_jobs_by_task: Mapping[str, int]  #: all traffic jobs, however many are in `streams`

    @property
    def tasks(self) -> list[str]:
        """Every task that was decoded or probed, sorted."""
        return sorted({stream.task for stream in self.streams} | {probe.task for probe in self.probes})

    @property
    def num_jobs(self) -> int:
        """Traffic jobs of all tasks."""
        return sum(self.num_jobs_by_task.values())

    @property
    def last_decoded_at(self) -> datetime | None:
        """When the newest traffic job was decoded; None without one."""
        return max((jobs[-1].decoded_at for jobs in self.streams.values()), default=None)

    def current_streams(self) -> dict[Stream, Sequence[DecodedJob]]:
        """Speculative streams of the revisions that decoded last, by task and drafter."""
        seen = sorted((jobs[-1].decoded_at, subject_of(stream)) for stream, jobs in self.streams.items())
        current = {(subject.task, subject.drafter): subject for _, subject in seen}.values()
        return {s: jobs for s, jobs in self.streams.items() if s.drafter and subject_of(s) in current}

    def in_use(self) -> dict[tuple[str, str], DriftSubject]:
        """The draft and target that were decoded or probed last, by task and drafter."""
        seen = [(jobs[-1].decoded_at, subject_of(s)) for s, jobs in self.streams.items()]
        seen += [
            (p.scheduled_for, DriftSubject(p.task, p.drafter, p.draft_revision, p.target_revision)) for p in self.probes
        ]
        return {(subject.task, subject.drafter): subject for _, subject in sorted(seen)}

    def last_used(self, task: str) -> NextJob | None:
        """How the newest job of a task was decoded; None without one.

        It stands in for a choice where none is on record: settings or callers may leave nothing to choose.
        """
        newest = [(jobs[-1].decoded_at, stream) for stream, jobs in self.streams.items() if stream.task == task]
        if not newest:
            return None
        stream = max(newest)[1]
        job, mode = self.streams[stream][-1], Mode.SPECULATIVE if stream.drafter else Mode.VANILLA
        return NextJob(mode.value, stream.drafter or None, job.num_draft_tokens, job.reason, "")

    def latest_probes(self, task: str, drafter: str) -> list[ProbeResult]:
        """The results of the newest run that probed a task with a drafter."""
        results = [p for p in self.probes if (p.task, p.drafter) == (task, drafter)]
        newest = max((p.scheduled_for for p in results), default=None)
        return [p for p in results if p.scheduled_for == newest]


def subject_of(stream: Stream) -> DriftSubject:
    """The subject of a drift event about this stream."""
    return DriftSubject(stream.task, stream.drafter, stream.draft_revision, stream.target_revision)
