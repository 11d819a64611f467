"""The worker, top to bottom: what happens to a job between Kafka and Kafka."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Final
from uuid import uuid4

from alphaloop.errors import BrokerError, DecodeFailed, EngineSick, StoreError
from alphaloop.liveness import beat
from alphaloop.messages import Failure, Status
from alphaloop.store.outcomes import Outcome
from worker.blame import Blame
from worker.components import Components
from worker.ending import Ending
from worker.engine import Generation
from worker.jobs import outcomes
from worker.jobs.claiming import ClaimedJob, EndedUndecoded, cancelled
from worker.jobs.lanes import LaneKey
from worker.jobs.recording import EndedJob
from worker.jobs.running import RunningJob, RunningJobs, Stepped
from worker.jobs.steering import TaskSlice
from worker.lane_decisions import decide_lane
from worker.moved_jobs import MovedJobs

_IDLE_WAIT_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the loop did."""

    num_started: int = 0
    num_ended: int = 0
    num_running: int = 0


class Worker:
    """One GPU process. Neighbours with threads of their own feed it, record what ended and publish the results."""

    def __init__(self, components: Components) -> None:
        self._c = components
        self._running = RunningJobs(components.engine)
        self._blame = Blame(components, self._running)
        self._moved = MovedJobs(components, self._running)
        self.ending = Ending(components, self._running)

    @property
    def num_waiting(self) -> int:
        """Jobs taken from Kafka and not yet decoding."""
        return self._c.feed.num_waiting + self._running.num_to_run_alone

    def run(self) -> None:
        """Turn until told to stop; then decode running jobs to their end and give back all others.

        Raises EngineSick after every job was given back, none of them counted as tried.
        """
        self._c.start()
        try:
            while not self._c.stop.is_set():
                self.run_once()
            self.ending.drain(lambda: self.run_once(0.0))
        except EngineSick as error:
            self.ending.give_up(error.message)
            raise
        except (StoreError, BrokerError):
            self.ending.release_all()
            raise
        except BaseException:
            # A running job may have caused this, so its claim is left to count as a crash; a job that never started
            # did not.
            self.ending.release(self._c.feed.ready.take_all())
            raise
        finally:
            self.ending.save()

    def run_once(self, timeout_s: float = _IDLE_WAIT_S) -> Turn:
        """One turn. With nothing to decode it waits up to `timeout_s` for a job.

        1. learn     outcomes that were recorded meanwhile are evidence for the next decision
        2. give back jobs whose partition goes to another worker
        3. drop      running jobs whose cancellation came or whose deadline passed
        4. tell      every two seconds, what this worker decodes and holds
        5. start     claimed jobs that fit, decided lane by lane
        6. steer     drafter and k of each sequence in this round: by load, and by the switchback experiment
        7. step      one round of the engine
        8. hand over what ended, and streamed text

        Before the loop, `JobFeed` takes messages, validates, orders and claims them. After the loop, `Recorder` commits
        outcomes, and `Publisher` publishes them and finishes their deliveries. After a crash Kafka delivers unfinished
        messages again: a recorded outcome is then published again, and any other job is decoded again.
        """
        beat()
        self._c.check()
        self._blame.check()
        self._learn()
        self._moved.give_back()
        num_ended = self._drop_unwanted()
        self._c.presence.say_when_due(
            lambda: list(self._running.by_id()),
            num_slots=self._c.engine.load().num_slots,
            num_waiting=lambda: self.num_waiting,
        )
        num_started = self._start(0.0 if len(self._running) else timeout_s)
        if not len(self._running):
            return Turn(num_started, num_ended)
        self._c.steering.steer(self._running)
        stepped = self._running.step()
        num_ended += self._hand_over(stepped)
        return Turn(num_started, num_ended, len(self._running))

    def _learn(self) -> None:
        recorded = self._c.recorder.take_recorded()
        if recorded:
            self._c.decider.count_scored(recorded)
        self._c.costs.save_when_due()

    def _drop_unwanted(self) -> int:
        """End the jobs that nobody waits for any more, without a text; returns how many."""
        asked = self._c.leases.cancelled()
        dropped = self._running.drop(asked) if asked else []
        self._end([self._undecoded(claimed, Status.CANCELLED, cancelled()) for claimed in dropped])
        overdue = self._running.drop(self._running.overdue(self._c.now()))
        self._end([self._undecoded(claimed, Status.EXPIRED, outcomes.expired(claimed)) for claimed in overdue])
        return len(dropped) + len(overdue)

    def _start(self, timeout_s: float) -> int:
        """Fill free slots in the order of the feed; a job that has to run alone starts when nothing else runs."""
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
                num_begun = self._start_lane(lane := list(jobs))
                num_started += num_begun
                if num_begun < len(lane):
                    break
        # No job overtakes one for which memory is short, because that job could wait for ever behind smaller ones.
        self._c.feed.ready.put_back(startable[num_started:])
        self._c.feed.started()
        return num_started

    def _start_alone(self, claimed: ClaimedJob) -> int:
        match self._c.decoding_again.claim(claimed):
            case ClaimedJob() as ours:
                return self._start_lane([ours], alone=True)
            case EndedUndecoded() as gone:
                self._end([self._undecoded(gone.claimed, gone.status, gone.failure)])
                return 0

    def _startable(self, taken: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        """The jobs that are not cancelled or expired and may share the engine."""
        asked, now = self._c.leases.cancelled(), self._c.now()
        startable, ended = [], []
        for claimed in taken:
            if claimed.job_id in asked:
                ended.append(self._undecoded(claimed, Status.CANCELLED, cancelled()))
            elif claimed.ready.job.is_expired(now):
                ended.append(self._undecoded(claimed, Status.EXPIRED, outcomes.expired(claimed)))
            elif claimed.num_crashes or claimed.num_failures:
                self._running.run_alone_later([claimed])
            else:
                startable.append(claimed)
        self._end(ended)
        return startable

    def _start_lane(self, jobs: Sequence[ClaimedJob], *, alone: bool = False) -> int:
        """Decide for jobs of one lane together and start them until memory is short; returns how many wait no longer.

        A job that the engine refuses waits no longer either: beside others it runs alone later, alone it has failed. An
        empty engine is not asked for room, because a job that does not fit there never fits.
        """
        if len(self._running) and not self._running.has_room(jobs[0]):
            return 0
        decided_together = uuid4()
        num_running = len(self._running) + len(jobs)
        decisions = decide_lane(self._c, jobs, num_running=num_running, decision_id=decided_together)
        started_at = self._c.now()
        for number, (claimed, decision) in enumerate(zip(jobs, decisions, strict=True)):
            if len(self._running) and not self._running.has_room(claimed):
                return number
            job = RunningJob(claimed, decision, decided_together, started_at, decision.setting)
            try:
                self._running.start(job, alone=alone)
                self._c.presence.started(job.job_id)
            except DecodeFailed as error:
                if len(self._running):
                    self._running.run_alone_later([claimed])
                else:
                    self._end(self._blamed([(job, error)]))
        return len(jobs)

    def _hand_over(self, stepped: Stepped) -> int:
        """Hand over the step's outcomes, texts, times and slices; returns how many jobs ended."""
        now = self._c.now()
        if (step := stepped.step) is not None:
            self._c.metrics.stepped(step)
            self._c.presence.stepped(step)
            self._c.costs.observe(step)
            self._keep(self._c.steering.observe(step))
            self._charge(stepped.lanes, step.wall_s)
            self._stream(stepped)
        else:
            self._keep(self._c.steering.close())
        for job, _ in stepped.finished:
            self._blame.worked(job.claimed.ready.prepared)
        ended = [self._succeeded(job, generation, now) for job, generation in stepped.finished]
        ended += self._blamed(stepped.failed)
        self._end(ended)
        return len(ended)

    def _blamed(self, failed: Sequence[tuple[RunningJob, DecodeFailed]]) -> list[EndedJob]:
        for_good = self._blame.failed_for_good(failed)
        return [self._undecoded(job.claimed, Status.FAILED, failure) for job, failure in for_good]

    def _keep(self, slices: Sequence[TaskSlice]) -> None:
        if slices:
            self._c.background.put("switchback slices", partial(self._c.store_slices, slices))

    def _charge(self, lanes: Sequence[LaneKey], wall_s: float) -> None:
        share_s = wall_s / len(lanes) if lanes else 0.0
        num_by_task = Counter(lane.task for lane in lanes)
        self._c.feed.charge({task: number * share_s for task, number in num_by_task.items()})

    def _stream(self, stepped: Stepped) -> None:
        ended = {job.job_id: job for job, _ in stepped.finished}
        for delta in stepped.step.deltas if stepped.step else ():
            job = ended.get(delta.job_id) or self._running.by_id()[delta.job_id]
            if stream := job.claimed.stream:
                created, model = int(job.started_at.timestamp()), self._c.engine.identity.target
                self._c.publishing.put(stream.add(delta.text, created=created, model=model))

    def _end(self, ended: Sequence[EndedJob]) -> None:
        if ended:
            self._c.recorder.put(ended)
            self._c.feed.ended([one.claimed.ready.lane for one in ended])

    def _undecoded(self, claimed: ClaimedJob, status: Status, failure: Failure) -> EndedJob:
        return EndedJob(claimed, outcomes.ended(claimed, status, failure, now=self._c.now()))

    def _succeeded(self, job: RunningJob, generation: Generation, now: datetime) -> EndedJob:
        outcome: Outcome = outcomes.succeeded(
            job.claimed,
            generation,
            job.decision,
            self._c.engine.identity,
            queue_s=job.queue_s,
            now=now,
            decode_batch_id=job.decided_together,
        )
        return EndedJob(job.claimed, outcome)
