"""Jobs that cannot be claimed yet, because their claim is held: by another worker, or by their own first delivery."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from worker.intake.validation import ReadyJob


class HeldJobs:
    """Jobs, each with the time at which it is asked for again, in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._held: list[tuple[float, ReadyJob]] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Of the jobs."""
        return sum(job.num_bytes for _, job in self._held)

    def add(self, jobs: Iterable[tuple[float, ReadyJob]]) -> None:
        """Hold these jobs until their times."""
        self._held += jobs

    def take_due(self, now: float, is_ours: Callable[[str], bool]) -> list[ReadyJob]:
        """Take out the jobs whose time has come. A job of which `is_ours` holds runs here and goes on waiting."""
        held, self._held, due = self._held, [], list[ReadyJob]()
        for at, job in held:
            if at > now or is_ours(job.job.job_id):
                self._held.append((at, job))
            else:
                due.append(job)
        return due

    def discard(self, unwanted: Callable[[ReadyJob], bool]) -> None:
        """Drop the jobs for which `unwanted` holds."""
        self._held = [(at, job) for at, job in self._held if not unwanted(job)]
