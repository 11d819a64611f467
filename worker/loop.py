"""The worker, top to bottom: what happens to a job between Kafka and Kafka.

`Worker.run_once` is one turn of the loop; its steps are the methods after it, in their order. How a worker ends, and
what `/healthz` and `/readyz` say of it, follow.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Final
from uuid import UUID, uuid4

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.engine import AsksServers, Generation
from alphaloop.errors import BrokerError, DecodeFailed, EngineSick, StoreError, StoreUnavailable, reason_of
from alphaloop.experiment.observe import Slice
from alphaloop.kafka.topics import RESULTS
from alphaloop.liveness import beat
from alphaloop.messages import Failure, Mode, Status
from worker import recording
from worker.admission import Line
from worker.background import Threads
from worker.candidates import Candidates
from worker.claims import ClaimedJob, Claiming, cancelled, expired
from worker.dead_letters import Forwarder, JobRetries
from worker.deciding.decider import Deciding
from worker.feed import JobFeed
from worker.foundation import Foundation
from worker.intake.polling import Intake
from worker.intake.validation import Validation
from worker.presence import Presence
from worker.publishing import Publisher
from worker.recording import OUTCOME_REFUSED, EndedJob, Recorder
from worker.running import Blame, RunningJob, RunningJobs, Stepped
from worker.steering import SliceRecorder, Steering

log = logging.getLogger(__name__)

_IDLE_WAIT_S: Final = 0.2
#: At the end: how long the feed may take for its turn in hand.
_TURN_S: Final = 2.0
#: At the end: between two looks at what is still to be recorded and published.
_WAIT_S: Final = 0.05


@dataclass(kw_only=True, eq=False)
class Worker:
    """One GPU process. Threads of their own feed it, record what ended and publish the results."""

    base: Foundation
    threads: Threads
    # On a job's way to the engine.
    intake: Intake
    validation: Validation
    feed: JobFeed
    claiming: Claiming
    # How it is decoded.
    deciding: Deciding
    steering: Steering
    # On its way from there.
    recorder: Recorder
    retries: JobRetries
    publisher: Publisher
    forwarder: Forwarder
    # What other processes read of it.
    presence: Presence
    slices: SliceRecorder
    # What it drafts with beside its settings.
    candidates: Candidates

    end_reason: str | None = field(init=False, default=None)  #: why the worker ends by itself

    def __post_init__(self) -> None:
        base, deciding = self.base, self.deciding
        self.engine, self.stop, self.retry, self.hurry = base.engine, base.stop, base.retry, base.retry.hurry
        self.now, self.metrics, self.background = base.now, base.metrics, base.background
        self.drain_s = base.settings.worker.drain_s  # most time for what is left to do at the end
        self.leases = self.claiming.leases
        self.decider, self.costs = deciding.decider, deciding.costs
        self.running = RunningJobs(self.engine)
        self._blame = Blame(self.engine, self.running, self.retries, gone=self.feed.ended, now=self.now)
        self._assignment = -1  # the number of the last one that was looked at
        self._until = math.inf  # when the end waits no longer

    @property
    def num_waiting(self) -> int:
        """Jobs taken from Kafka and not yet decoding."""
        return self.feed.num_waiting + self.running.num_to_run_alone

    @property
    def num_unpublished(self) -> int:
        """Outcomes and messages that the threads still have in hand."""
        return len(self.retries) + len(self.recorder) + self.publisher.queue.num_unsettled + len(self.forwarder)

    def run(self) -> None:
        """Run until stopped; then decode running jobs to their end and give back all others.

        Raises EngineSick after every job was given back, none of them counted as tried.
        """
        self.threads.start()
        try:
            while not self.stop.is_set():
                self.run_once()
            self.drain()
        except EngineSick as error:
            self._give_up(error.message)
            raise
        except (StoreError, BrokerError):
            # A server refused: no job caused that, so none may count a crash. Outcomes not recorded yet are dropped.
            self.running.give_back()
            self._release_attempts(self.leases.held())
            raise
        except BaseException:
            # A running job may have caused this, so its claim is left to count as a crash; a job that never started
            # did not.
            self.release(self.feed.ready.take_all())
            raise
        finally:
            self._save()

    def run_once(self, timeout_s: float = _IDLE_WAIT_S) -> None:
        """One turn. With nothing to decode it waits up to `timeout_s` for a job.

        1. learn     outcomes that were recorded meanwhile are evidence for the next decision; a drafter that was
                     trained anew and fetched meanwhile is loaded
        2. give back jobs whose partition goes to another worker
        3. drop      running jobs whose cancellation came or whose deadline passed
        4. set aside jobs whose servers are all away, so that no other job waits for their end
        5. report    every two seconds, what this worker decodes and holds
        6. start     claimed jobs that fit, decided lane by lane
        7. costs     what rounds and requests took is fitted, and stored when it is time: no job waits for it here
        8. steer     drafter and k of each sequence in this round: by load, and by the switchback experiment
        9. step      one round of the engine
        10. hand over what ended, and streamed text

        Before the loop, `JobFeed` takes messages, validates, orders and claims them. After the loop, `Recorder` commits
        outcomes, and `Publisher` publishes them and finishes their deliveries. After a crash Kafka delivers unfinished
        messages again: a recorded outcome is then published again, and any other job is decoded again.
        """
        beat()
        self.threads.check()
        self._blame.check()
        self._learn()
        self.candidates.load_fetched()
        self._give_back_moved()
        self._drop_unwanted()
        self._set_aside_absent()
        self.presence.say_when_due(
            lambda: list(self.running.by_id()),
            num_slots=self.engine.load().num_slots,
            num_waiting=lambda: self.num_waiting,
        )
        self._start(0.0 if len(self.running) else timeout_s)
        self.costs.save_when_due()
        if len(self.running):
            self.steering.steer(self.running)
            self._hand_over(self.running.step())

    # 1. Learn.

    def _learn(self) -> None:
        if recorded := self.recorder.take_recorded():
            self.decider.count_scored(recorded)

    # 2. Give back.

    def _give_back_moved(self) -> None:
        """After a change of the assignment, give back jobs whose partition goes to another worker.

        Those that have not started go back at once, and so do running jobs that took too long to end; none of them
        counts as tried.
        """
        if self.intake.assignment_number == self._assignment:
            return
        self._assignment = self.intake.assignment_number
        staying, moved = self._split(self.feed.ready.take_all())
        self.feed.ready.put_back(staying)
        staying_alone, moved_alone = self._split(self.running.take_waiting_alone())
        self.running.run_alone_later(staying_alone)
        moved += moved_alone
        overdue = self.intake.handing_over.take_overdue()
        running = self.running.by_id().items()
        moved += self.running.drop([job_id for job_id, job in running if job.claimed.ready.delivery.key in overdue])
        if moved:
            extra = {"action": "jobs_moved", "num_jobs": len(moved)}
            log.info("jobs of partitions that another worker takes over are given back", extra=extra)
            self.release(moved)
            self.feed.ended([claimed.ready.line for claimed in moved])

    def _split(self, claimed: Iterable[ClaimedJob]) -> tuple[list[ClaimedJob], list[ClaimedJob]]:
        """Jobs of partitions that stay, and jobs of partitions that leave.

        The intake is asked once for each job: the thread that polls may change the answer at any moment, and a job
        that is neither kept nor given back would be lost until its lease runs out.
        """
        staying: list[ClaimedJob] = []
        moved: list[ClaimedJob] = []
        for job in claimed:
            (staying if self.intake.is_current(job.ready.delivery) else moved).append(job)
        return staying, moved

    # 3. Drop.

    def _drop_unwanted(self) -> None:
        """End the jobs that were cancelled or are past their deadline, without a text."""
        asked = self.leases.cancelled()
        unwanted = self.running.drop(asked) if asked else []
        self._end_unwanted(unwanted, self.running.drop(self.running.overdue(self.now())))

    # 4. Set aside.

    def _set_aside_absent(self) -> None:
        """Tell the feed of jobs in the engine whose servers are all away.

        While a job with which a worker died waits until this worker has no other claim, they go back; none of them
        counts as tried.
        """
        absent = self.running.absent()
        self.feed.set_aside({job.job_id: job.line for job in absent})
        if not absent or not len(self.feed.suspects):
            return
        left = self.running.drop([job.job_id for job in absent])
        self.feed.set_aside({})
        self.release(left)
        self.feed.put_back([job.ready for job in left if self.intake.is_current(job.ready.delivery)])
        self.feed.ended([job.ready.line for job in left])

    # 6. Start.

    def _start(self, timeout_s: float) -> None:
        """Start jobs that fit, in the order of the feed. Waits up to `timeout_s` for the first.

        A job that has to run alone starts when nothing else runs.
        """
        if (alone := self.running.next_alone()) is not None:
            if (ours := self._claim_again(alone)) is not None:
                self._start_lane([ours], num_running=1, alone=True)
            return
        limit = self.running.num_free()
        taken = self.feed.ready.take(limit, timeout_s) if limit else []
        if not taken:
            return
        self._learn()  # what was recorded while the loop waited for these jobs
        startable = self._startable(taken)
        num_started = 0
        if not self.running.num_to_run_alone:
            for _, jobs in groupby(startable, key=lambda claimed: claimed.ready.lane):
                lane = list(jobs)
                num_running = self._num_beside(lane, num_startable=len(startable) - num_started)
                num_begun = self._start_lane(lane, num_running=num_running)
                num_started += num_begun
                if num_begun < len(lane):
                    break
        # No job overtakes one for which memory is short, because that job could wait for ever while smaller ones start.
        self.feed.ready.put_back(startable[num_started:])
        self.feed.started()

    def _startable(self, taken: Sequence[ClaimedJob]) -> list[ClaimedJob]:
        """The jobs that are not cancelled or expired and may share the engine."""
        asked, now = self.leases.cancelled(), self.now()
        unwanted, overdue, startable = [], [], []
        for claimed in taken:
            if claimed.job_id in asked:
                unwanted.append(claimed)
            elif claimed.ready.job.is_expired(now):
                overdue.append(claimed)
            elif claimed.num_crashes or claimed.num_failures:
                self.running.run_alone_later([claimed])
            else:
                startable.append(claimed)
        self._end_unwanted(unwanted, overdue)
        return startable

    def _num_beside(self, jobs: Sequence[ClaimedJob], num_startable: int) -> int:
        """Sequences that will run beside jobs of one lane, these included.

        A sequence that can draft in another way later is decided for what runs at its start. A request stays where it
        began, so jobs that start right after it count too: the other startable ones, and those in line. A job of
        several texts is as many sequences, as far as there are slots.
        """
        if self.engine.can_redraft:
            load, num_texts = self.engine.load(), sum(job.ready.prepared.sampling.n for job in jobs)
            return min(load.num_decoding + num_texts, load.num_slots)
        load, num_decoding = self.engine.load(), self.running.num_decoding
        num_soon = num_decoding + num_startable + self.feed.num_in_turn
        # Slots of jobs that are held stand for places that others have.
        return max(num_decoding + len(jobs), min(num_soon, load.num_slots - len(load.held)))

    def _start_lane(self, jobs: Sequence[ClaimedJob], *, num_running: int, alone: bool = False) -> int:
        """Decide for jobs of one lane together and start them until memory is short; returns how many wait no longer.

        A job that the engine refuses waits no longer either: beside others it runs alone later, alone it has failed. An
        empty engine is not asked for room, because a job that does not fit there never fits.
        """
        if len(self.running) and not self.running.has_room(jobs[0]):
            return 0
        decided_together = uuid4()
        decisions = self._decide(jobs, num_running=num_running, decision_id=decided_together)
        started_at = self.now()
        for number, (claimed, decision) in enumerate(zip(jobs, decisions, strict=True)):
            if len(self.running) and not self.running.has_room(claimed):
                return number
            decided = decision.setting
            lane = claimed.ready.lane
            setting = decided if alone else self.steering.begin(claimed.job_id, lane, decision, self.running)
            is_control = not alone and self.steering.is_control(claimed.job_id)
            job = RunningJob(claimed, decision, decided_together, started_at, setting, is_control)
            try:
                self.running.start(job, alone=alone)
                self.presence.started(job.job_id)
            except DecodeFailed as error:
                if len(self.running):
                    self.running.run_alone_later([claimed])
                else:
                    self._end(self._failed(self._blame.failed_for_good([(job, error)])))
        return len(jobs)

    def _decide(self, jobs: Sequence[ClaimedJob], *, num_running: int, decision_id: UUID) -> Sequence[Decision]:
        """A decision for each of these jobs, which share a lane; the database is waited for.

        If deciding raises, the jobs are decoded vanilla, because their texts do not depend on the decision. Raises
        StoreUnavailable in a hurry only.
        """
        lane = jobs[0].ready.lane
        prepared = [claimed.ready.prepared for claimed in jobs]
        task = self.validation.tasks[lane.task]
        decide = partial(
            self.decider.decide_each, lane, prepared, task, num_running=num_running, decision_id=decision_id
        )
        try:
            decisions: Sequence[Decision] = self.retry.until_done("decide", decide)
        except StoreUnavailable:
            raise
        except Exception as error:
            extra = {"action": "decide_failed", "task": lane.task}
            log.error("not decided, so decoded vanilla", exc_info=error, extra=extra)
            why = f"deciding failed: {reason_of(error)}"
            decisions = [Decision(Mode.VANILLA, None, None, 0, Reason.UNDECIDED, why)] * len(jobs)
        most = decisions[0] if len(set(map(id, decisions))) == 1 else max(decisions, key=list(decisions).count)
        self.metrics.decisions.labels(lane.task, most.mode.value, most.reason_said).inc()
        return decisions

    def _claim_again(self, claimed: ClaimedJob) -> ClaimedJob | None:
        """The claim to decode a job with from its start; None if the job has ended."""
        ours = self.claiming.claim_again(claimed)
        if isinstance(ours, ClaimedJob):
            return ours
        self._end([self._undecoded(ours.claimed, ours.status, ours.failure)])
        return None

    # 10. Hand over.

    def _hand_over(self, stepped: Stepped) -> None:
        """Hand over the step's outcomes, texts, times and slices."""
        if (step := stepped.step) is not None:
            self.metrics.stepped(step)
            self.presence.stepped(step)
            self.costs.observe(step)
            self._keep(self.steering.observe(step))
            self._charge(stepped.lines, step.wall_s)
            self._stream(stepped)
        else:
            self._keep(self.steering.close())
        # Jobs whose server went away start again, before others.
        if again := [ours for job in stepped.interrupted if (ours := self._claim_again(job.claimed)) is not None]:
            self.feed.ready.put_back(again)
        self.feed.served((job.claimed, generation) for job, generation in stepped.finished)
        for job, _ in stepped.finished:
            self._blame.worked(job.claimed.ready.prepared)
        now = self.now()
        ended = [self._succeeded(job, generation, now) for job, generation in stepped.finished]
        self._end([*ended, *self._failed(self._blame.failed_for_good(stepped.failed))])
        self._end(self._failed(self._blame.refused_for_good(stepped.refused)))

    def _keep(self, slices: Sequence[Slice]) -> None:
        if slices:
            self.background.put("switchback slices", partial(self.slices.store, slices))

    def _charge(self, lines: Sequence[Line], wall_s: float) -> None:
        share_s = wall_s / len(lines) if lines else 0.0
        self.feed.charge({line: number * share_s for line, number in Counter(lines).items()})

    def _stream(self, stepped: Stepped) -> None:
        gone = [*(job for job, _ in (*stepped.finished, *stepped.refused)), *stepped.interrupted]
        ended = {job.job_id: job for job in gone}
        for delta in stepped.step.deltas if stepped.step else ():
            job = ended.get(delta.job_id) or self.running.by_id()[delta.job_id]
            if stream := job.claimed.stream:
                created, model = int(job.started_at.timestamp()), self.engine.identity.target
                self.publisher.queue.put([stream.add(delta, created=created, model=model)])

    # How a job ends: its outcome goes to the recorder, and the feed gets its place back.

    def _end(self, ended: Sequence[EndedJob]) -> None:
        if ended:
            self.recorder.put(ended)
            self.feed.ended([job.claimed.ready.line for job in ended])

    def _end_unwanted(self, unwanted: Sequence[ClaimedJob], overdue: Sequence[ClaimedJob]) -> None:
        self._end([self._undecoded(job, Status.CANCELLED, cancelled()) for job in unwanted])
        self._end([self._undecoded(job, Status.EXPIRED, expired(job)) for job in overdue])

    def _succeeded(self, job: RunningJob, generation: Generation, now: datetime) -> EndedJob:
        identity, together = self.engine.identity, job.decided_together
        try:
            outcome = recording.succeeded(
                job.claimed, generation, job.recorded, identity, queue_s=job.queue_s, now=now, decode_batch_id=together
            )
        except Exception as error:  # what is wrong with one answer must not end the worker, and with it other jobs
            log.error("an outcome cannot be written", exc_info=error, extra={"action": "outcome_refused"})
            message = f"the answer cannot be written: {reason_of(error)}"
            return self._undecoded(job.claimed, Status.FAILED, Failure(code=OUTCOME_REFUSED, message=message))
        return EndedJob(job.claimed, outcome)

    def _failed(self, failed: Sequence[tuple[RunningJob, Failure]]) -> list[EndedJob]:
        return [self._undecoded(job.claimed, Status.FAILED, failure) for job, failure in failed]

    def _undecoded(self, claimed: ClaimedJob, status: Status, failure: Failure) -> EndedJob:
        return recording.ended(claimed, status, failure, now=self.now())

    def release(self, claimed: Sequence[ClaimedJob]) -> None:
        """Give claims back, none of them counted as tried."""
        self._release_attempts({job.job_id: job.attempt for job in claimed})
        self.intake.handing_over.settle(job.ready.delivery for job in claimed)

    def _release_attempts(self, attempts: Mapping[str, int]) -> None:
        """Give claims back, attempt by job_id; if the database stays away, their leases run out instead."""
        if not attempts:
            return
        try:
            self.claiming.release(attempts)
        except StoreError as error:
            log.warning("%d jobs not released: %s", len(attempts), error.message, extra={"action": "release_failed"})
        self.leases.let_go(attempts)

    # How the worker ends.

    def drain(self) -> None:
        """Decode running jobs to their end, or give them back in a hurry; then wait until outcomes are published.

        Jobs that wait for a server go back once nothing else is decoded.
        """
        self._take_no_more()
        self.release(self.feed.ready.take_all() + self.running.take_waiting_alone())
        while self.running.num_decoding and not self.hurry.is_set():
            self.run_once(0.0)
        self._leave()

    def _give_up(self, reason: str) -> None:
        """Give every job back at once, because the engine cannot decode; `/readyz` shows `reason` meanwhile.

        What was decoded before is still recorded and published, as far as that takes no longer than `drain_s`.
        """
        log.error("giving every job back: %s", reason, extra={"action": "engine_sick"})
        self.end_reason = reason
        self._until = time.monotonic() + self.drain_s
        self.stop.set()
        self._take_no_more()
        self.release(self.feed.ready.take_all())
        self._leave()

    def _take_no_more(self) -> None:
        self.intake.stop_taking()
        self.threads.end("feed", _TURN_S)

    def _leave(self) -> None:
        self.release(self.running.give_back())
        self._wait_until(lambda: not self.num_unpublished)
        self._keep(self.steering.close())
        self._wait_until(lambda: not len(self.background))
        self.threads.end_neighbours()
        self.release(self.feed.ready.take_all())  # claimed by a feed that was slow to end
        self._learn()

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        while not self.hurry.is_set() and not is_done() and time.monotonic() < self._until:
            self.threads.check()
            beat()
            self.hurry.wait(_WAIT_S)

    def _save(self) -> None:
        """Write down what the worker learnt: costs, budgets, decisions."""
        self.costs.save()
        self.decider.session.save()
        self.background.put("decisions", self.deciding.journal.write)
        self.presence.leave()
        self.background.turn(0.0)  # what these have written in the background, whose thread may have ended

    def close(self, timeout_s: float) -> None:
        """End everything: commit what is finished, leave the group. May be called at any time.

        Whatever a thread still waits for, room or a server, it gives up.
        """
        self.stop.set()
        self.hurry.set()
        self.threads.close(timeout_s)
        self.forwarder.close()

    # What is seen from outside. Any thread may ask.

    def unready(self) -> str | None:
        """Why this process takes no jobs; None while it does."""
        if self.end_reason is not None:
            return f"ending, jobs are given back: {self.end_reason}"
        if (wrong := self.threads.unhealthy()) is not None:
            return wrong
        if self.stop.is_set():
            return "draining"
        if (reason := self.forwarder.topics.reason(RESULTS)) is not None:
            return f"no result can be published: {reason}"
        if isinstance(self.engine, AsksServers) and (reason := self.engine.unavailable()) is not None:
            return reason
        if self.intake.is_assigned:
            return None
        if not self.intake.listed:
            return f"no task is bound to {self.engine.identity.target}, so there is no topic to read"
        return "no partitions assigned yet"

    def give_back_unstarted(self) -> None:
        """Give back what no step has touched. What is in the engine may be what hangs, so that counts as a crash."""
        self.threads.end("leases", _TURN_S)
        self.release(self.feed.ready.take_all())
