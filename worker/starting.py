"""Which claimed jobs start decoding now: those that fit, in the order of the feed, decided lane by lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from uuid import uuid4

from alphaloop.errors import DecodeFailed
from worker.claims import ClaimedJob, EndedUndecoded
from worker.components import Components
from worker.ended_jobs import EndedJobs
from worker.jobs.running import RunningJob, RunningJobs
from worker.lane_decisions import decide_lane


class Starting:
    """Fills the engine's free slots. One thread uses it, the loop's."""

    def __init__(
        self, components: Components, running: RunningJobs, ended: EndedJobs, learn: Callable[[], None]
    ) -> None:
        """`learn` takes in what was recorded meanwhile; it is called before decisions are taken."""
        self._c = components
        self._running = running
        self._ended = ended
        self._learn = learn

    def start(self, timeout_s: float) -> int:
        """Start jobs; returns how many. Waits up to `timeout_s` seconds for the first.

        A job that has to run alone starts when nothing else runs.
        """
        if (alone := self._running.next_alone()) is not None:
            return self._start_alone(alone)
        limit = self._running.num_free()
        taken = self._c.feed.ready.take(limit, timeout_s) if limit else []
        if not taken:
            return 0
        self._learn()  # what was recorded while the loop waited for these jobs
        startable = self._startable(taken)
        num_started = 0
        if not self._running.num_to_run_alone:
            for _, jobs in groupby(startable, key=lambda claimed: claimed.ready.lane):
                lane = list(jobs)
                num_running = self._num_beside(len(lane), num_startable=len(startable) - num_started)
                num_begun = self._start_lane(lane, num_running=num_running)
                num_started += num_begun
                if num_begun < len(lane):
                    break
        # No job overtakes one for which memory is short, because that job could wait for ever behind smaller ones.
        self._c.feed.ready.put_back(startable[num_started:])
        self._c.feed.started()
        return num_started

    def again(self, interrupted: Sequence[RunningJob]) -> None:
        """Have jobs whose server went away start again, before others."""
        claimed = [ours for job in interrupted if (ours := self._claim_again(job.claimed)) is not None]
        if claimed:
            self._c.feed.ready.put_back(claimed)

    def _start_alone(self, claimed: ClaimedJob) -> int:
        ours = self._claim_again(claimed)
        return 0 if ours is None else self._start_lane([ours], num_running=1, alone=True)

    def _claim_again(self, claimed: ClaimedJob) -> ClaimedJob | None:
        """The claim to decode with; None if the job has ended."""
        match self._c.claiming.claim_again(claimed):
            case ClaimedJob() as ours:
                return ours
            case EndedUndecoded() as found:
                self._ended.found_ended(found)
                return None

    def _startable(self, taken: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        """The jobs that are not cancelled or expired and may share the engine."""
        asked, now = self._c.leases.cancelled(), self._c.now()
        cancelled, expired, startable = [], [], []
        for claimed in taken:
            if claimed.job_id in asked:
                cancelled.append(claimed)
            elif claimed.ready.job.is_expired(now):
                expired.append(claimed)
            elif claimed.num_crashes or claimed.num_failures:
                self._running.run_alone_later([claimed])
            else:
                startable.append(claimed)
        self._ended.cancelled(cancelled)
        self._ended.expired(expired)
        return startable

    def _num_beside(self, num_jobs: int, num_startable: int) -> int:
        """Sequences that will run beside jobs of one lane, these included.

        A sequence that can draft in another way later is decided for what runs at its start. A request stays where it
        began, so jobs that start right behind it count too: the other startable ones, and those in line.
        """
        num_running = self._running.num_decoding + num_jobs
        if self._c.engine.can_redraft:
            return num_running
        num_soon = self._running.num_decoding + num_startable + self._c.feed.num_in_turn
        return max(num_running, min(num_soon, self._c.engine.load().num_slots))

    def _start_lane(self, jobs: Sequence[ClaimedJob], *, num_running: int, alone: bool = False) -> int:
        """Decide for jobs of one lane together and start them until memory is short; returns how many wait no longer.

        A job that the engine refuses waits no longer either: beside others it runs alone later, alone it has failed. An
        empty engine is not asked for room, because a job that does not fit there never fits.
        """
        if len(self._running) and not self._running.has_room(jobs[0]):
            return 0
        decided_together = uuid4()
        decisions = decide_lane(self._c, jobs, num_running=num_running, decision_id=decided_together)
        started_at = self._c.now()
        for number, (claimed, decision) in enumerate(zip(jobs, decisions, strict=True)):
            if len(self._running) and not self._running.has_room(claimed):
                return number
            setting = decision.setting
            if not alone:
                setting = self._c.steering.begin(claimed.job_id, claimed.ready.lane, decision, self._running)
            is_control = setting != decision.setting and not self._c.engine.can_redraft
            job = RunningJob(claimed, decision, decided_together, started_at, setting, is_control)
            try:
                self._running.start(job, alone=alone)
                self._c.presence.started(job.job_id)
            except DecodeFailed as error:
                if len(self._running):
                    self._running.run_alone_later([claimed])
                else:
                    self._ended.failed([(job, error)])
        return len(jobs)
