"""Decoding one batch to its end: a loop over the engine's steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from alphaloop.deciding.policy import Decision
from alphaloop.errors import DecodeFailed
from worker.engine import Engine, Generation, Step
from worker.jobs.claiming import ClaimedJob

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BatchOutcome:
    """What became of each job of a batch."""

    finished: list[tuple[ClaimedJob, Generation]] = field(default_factory=list)
    failed: list[tuple[ClaimedJob, DecodeFailed]] = field(default_factory=list)
    cancelled: list[ClaimedJob] = field(default_factory=list)
    unfinished: list[ClaimedJob] = field(default_factory=list)  #: told to hurry; given back without a burnt attempt


class BatchDecoding:
    """Drives the engine. `is_hurried` ends a batch between two steps; `cancelled` names jobs to drop."""

    def __init__(
        self,
        engine: Engine,
        *,
        is_hurried: Callable[[], bool],
        cancelled: Callable[[], set[str]],
        on_step: Callable[[Step], None],
    ) -> None:
        self._engine = engine
        self._is_hurried = is_hurried
        self._cancelled = cancelled
        self._on_step = on_step

    def decode(self, batch: Sequence[ClaimedJob], decisions: Mapping[str, Decision]) -> BatchOutcome:
        """Decode every job of the batch, each as `decisions` says of its id.

        A job whose earlier attempt died is decoded alone, so that it cannot take others down with it again; so is every
        job of a batch in which a step failed, so that one bad job fails alone.
        """
        outcome = BatchOutcome()
        fresh = [claimed for claimed in batch if claimed.attempt == 1]
        if fresh and (error := self._run(fresh, decisions, outcome)):
            log.warning(
                "batch of %d failed, decoding its jobs alone: %s", len(fresh), error, extra={"action": "batch_split"}
            )
            done = {c.job_id for c, _ in outcome.finished} | {
                c.job_id for c in (*outcome.cancelled, *outcome.unfinished)
            }
            self._run_alone([claimed for claimed in fresh if claimed.job_id not in done], decisions, outcome)
        self._run_alone([claimed for claimed in batch if claimed.attempt > 1], decisions, outcome)
        return outcome

    def _run_alone(self, batch: Sequence[ClaimedJob], decisions: Mapping[str, Decision], outcome: BatchOutcome) -> None:
        for claimed in batch:
            if error := self._run([claimed], decisions, outcome):
                outcome.failed.append((claimed, error))

    def _run(
        self, batch: Sequence[ClaimedJob], decisions: Mapping[str, Decision], outcome: BatchOutcome
    ) -> DecodeFailed | None:
        """Add to `outcome` what ends; on a failed step empty the engine and return the error."""
        running = {claimed.job_id: claimed for claimed in batch}
        waiting = list(batch)
        try:
            while running:
                if self._is_hurried():
                    self._engine.abandon()
                    outcome.unfinished += running.values()
                    return None
                for job_id in self._cancelled() & running.keys():
                    self._engine.cancel(job_id)
                    claimed = running.pop(job_id)
                    outcome.cancelled.append(claimed)
                    waiting = [other for other in waiting if other is not claimed]
                while waiting and self._engine.has_room(waiting[0].ready.prepared):
                    claimed = waiting.pop(0)
                    self._engine.admit(claimed.ready.prepared, decisions[claimed.job_id])
                if not running:
                    return None
                step = self._engine.step()
                self._on_step(step)
                outcome.finished += [(running.pop(generation.job_id), generation) for generation in step.finished]
        except DecodeFailed as error:
            self._engine.abandon()
            return error
        return None
