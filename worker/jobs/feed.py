"""From deliveries to jobs that the engine may start: validated, put in order, claimed ahead.

The feed has a thread of its own, so the device never waits for Kafka, a tokenizer or Postgres.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from alphaloop.errors import MessageError
from worker.dead_letters import DeadMessage, Forwarder
from worker.intake.buffer import Room
from worker.intake.fetching import Contents, Fetching
from worker.intake.polling import Delivery, Intake
from worker.intake.validation import ReadyJob, Validation
from worker.jobs.admission import AdmissionQueue, Waiting
from worker.jobs.ahead import Ahead
from worker.jobs.bounded_queue import BoundedQueue
from worker.jobs.claiming import ClaimedJob, Claiming, Claims
from worker.jobs.held import HeldJobs
from worker.jobs.lanes import LaneKey
from worker.jobs.leases import LeaseKeeper
from worker.jobs.line import JobLine
from worker.jobs.reading import Reading
from worker.jobs.suspects import Suspects
from worker.publishing import AnswerAgain, PublishingQueue
from worker.recording import Recorder, undecoded
from worker.retry import Retry

#: How long one turn waits for deliveries when there is nothing else to do.
IDLE_WAIT_S: Final = 0.1
#: Between two questions about a job whose claim another worker holds.
HELD_WAIT_S: Final = 0.02
MOST_CLAIMED_AT_ONCE: Final = 256  #: jobs in one transaction


class JobFeed:
    """Keeps `ready` filled with claimed jobs, in the order of admission.

    Claims run ahead of the engine by no more than `Ahead` wants, so that another worker can still take a waiting job.
    The next are claimed when half of that is used up, because a transaction costs the same for one job and for many.
    While a job waits with which a worker died, only such jobs are claimed, one by one.
    """

    def __init__(
        self,
        intake: Intake,
        validation: Validation,
        queue: AdmissionQueue[ReadyJob],
        claiming: Claiming,
        leases: LeaseKeeper,
        publishing: PublishingQueue,
        forwarder: Forwarder,
        recorder: Recorder,
        *,
        retry: Retry,
        is_ending: Callable[[], bool],
        num_ahead: int,
        max_waiting: int,
        max_waiting_bytes: int,
        now: Callable[[], datetime],
        rng: random.Random,
        suspect_delay_s: float,
        clock: Callable[[], float] = time.monotonic,
        contents: Contents | None = None,
        num_readers: int = 1,
        wake_engine: Callable[[], object] = lambda: None,
        prepare_decisions: Callable[[Iterable[LaneKey]], object] = lambda lanes: None,
    ) -> None:
        """`contents` is where prompts lie that are in no message; `num_readers` of them are read at once.

        `wake_engine` is called when jobs are ready, because the loop may be waiting for what runs. `prepare_decisions`
        is told which lanes are claimed next, so that what their first decision needs is read here and not by the loop.
        """
        self._intake = intake
        self._line = JobLine(queue, clock)
        self._claiming = claiming
        self._leases = leases
        self._publishing = publishing
        self._forwarder = forwarder
        self._recorder = recorder
        self._retry = retry
        self._is_ending = is_ending
        self._ahead = Ahead(num_ahead, clock)
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._clock = clock
        self._now = now
        self._fetching = Fetching(contents, validation, num_at_once=num_readers, retry=retry, wake=intake.wake)
        self._readings = self._reading_high, self._reading = (
            Reading(validation, clock, self._fetching),
            Reading(validation, clock, self._fetching),
        )
        self._held = HeldJobs()
        self._suspects = Suspects(leases, rng, delay_s=suspect_delay_s, clock=clock)
        self._assignment = -1
        self._wake_engine = wake_engine
        self._prepare_decisions = prepare_decisions
        self.ready: BoundedQueue[ClaimedJob] = BoundedQueue(
            max_items=self._ahead.most,
            max_bytes=max_waiting_bytes,
            num_bytes_of=lambda claimed: claimed.ready.num_bytes,
        )

    @property
    def num_waiting(self) -> int:
        """Jobs taken from Kafka and not given to the engine."""
        return self.num_in_turn + len(self._held) + len(self._suspects)

    @property
    def num_in_turn(self) -> int:
        """Of these, jobs that wait for their turn alone."""
        num_unread = sum(map(len, self._readings)) + len(self._fetching)
        return num_unread + len(self._line) + len(self.ready)

    def waiting(self) -> Mapping[str, Waiting]:
        """By task, how many jobs wait unclaimed, and the age of the oldest."""
        return self._line.by_task()

    def turn(self) -> None:
        """Take new deliveries, validate and order them, and claim the jobs that start next."""
        may_read = any(len(reading) and self._room(reading).num_bytes > 0 for reading in self._readings)
        wait_s = 0.0 if may_read else HELD_WAIT_S if self._held else IDLE_WAIT_S
        self._take(wait_s)
        for reading in self._readings:
            self._read(reading)
        if len(self._fetching):
            self._read_fetched()
        self._line.add(self._held.take_due(self._clock(), self._leases.holds))
        self._discard_revoked()
        self._claim_ahead()

    def charge(self, device_s_by_task: Mapping[str, float]) -> None:
        """Count the device time of an engine step, by task. Called by the loop."""
        self._line.charge(device_s_by_task)

    def ended(self, lanes: Sequence[LaneKey]) -> None:
        """Jobs of these lanes have ended or were given back. Called by the loop; makes room for claims."""
        self._line.ended(lanes)
        self._intake.wake()

    @property
    def num_suspects(self) -> int:
        """Jobs that wait until this worker has no other claim."""
        return len(self._suspects)

    def set_aside(self, absent: Mapping[str, LaneKey]) -> None:
        """These jobs wait for servers that are away, so that nobody has to wait for their end. Called by the loop."""
        self._suspects.absent = frozenset(absent)
        if self._line.set_aside(absent.values()):
            self._intake.wake()

    def put_back(self, jobs: Sequence[ReadyJob]) -> None:
        """These wait in line again: their claims were given back. Called by the loop."""
        self._line.add(jobs)
        self._intake.wake()

    def started(self) -> None:
        """The loop took jobs from `ready`: there may be room for more claims."""
        if self._is_claiming_due():
            self._intake.wake()

    def _room(self, reading: Reading) -> Room:
        """For jobs of that lane, beside those that wait. The lanes keep no room from each other."""
        high, others = self._line.loads()
        if reading is self._reading_high:
            return Room(self._max_waiting - high.num_jobs, self._max_waiting_bytes - high.num_bytes)
        num_jobs = others.num_jobs + len(self._held) + len(self._suspects)
        # More than the bytes of the messages, because a prompt is held as text and as tokens too.
        num_bytes = others.num_bytes + self._held.num_bytes + self._suspects.num_bytes
        return Room(self._max_waiting - num_jobs, self._max_waiting_bytes - num_bytes)

    def _take(self, wait_s: float) -> None:
        num_unread = len(self._reading) + len(self._fetching)
        normal = self._room(self._reading).without(num_unread, self._reading.num_bytes)
        high = self._room(self._reading_high).without(len(self._reading_high), self._reading_high.num_bytes)
        taken = self._intake.take(max(0, normal.num), wait_s, max_bytes=normal.num_bytes, high=high)
        self._reading_high.add(delivery for delivery in taken if delivery.is_high)
        self._reading.add(delivery for delivery in taken if not delivery.is_high)

    def _read(self, reading: Reading) -> None:
        ready, refused = reading.read(self._room(reading).num_bytes)
        self._line.add(ready)
        self._refuse(refused)

    def _read_fetched(self) -> None:
        """Put the jobs in line whose prompts came from elsewhere, unless their partitions are gone meanwhile."""
        ready, refused = self._fetching.take(self._room(self._reading).num_bytes)
        self._line.add(job for job in ready if self._intake.is_current(job.delivery))
        self._refuse([(delivery, error) for delivery, error in refused if self._intake.is_current(delivery)])

    def _refuse(self, refused: Sequence[tuple[Delivery, MessageError]]) -> None:
        self._forwarder.put(*(DeadMessage(delivery, error, self._intake) for delivery, error in refused))

    def _discard_revoked(self) -> None:
        """Drop waiting jobs of partitions that went to another worker."""
        if self._intake.assignment_number == self._assignment:
            return
        self._assignment = self._intake.assignment_number
        for unread in (*self._readings, self._fetching):
            unread.discard(lambda delivery: not self._intake.is_current(delivery))
        for waiting in (self._held, self._suspects):
            waiting.discard(lambda job: not self._intake.is_current(job.delivery))
        self._line.discard(lambda job: not self._intake.is_current(job.delivery))

    def _is_claiming_due(self) -> bool:
        return 2 * len(self.ready) <= self._ahead.wanted()

    def _claim_ahead(self) -> None:
        if self._suspects.come_first:
            if (suspect := self._suspects.next()) is not None:
                self._line.count(suspect)
                self._claim([suspect], alone=True)
        elif new := self._next_in_line():
            self._claim(new)
            # After a claim more may be claimable at once: the next turn does not wait for deliveries.
            if len(self._line) and self._is_claiming_due():
                self._intake.wake()

    def _next_in_line(self) -> list[ReadyJob]:
        """Take the jobs that are claimed next out of the queue."""
        limit = 0
        if self._is_claiming_due() and self.ready.num_free:
            limit = min(self._ahead.wanted() - len(self.ready), MOST_CLAIMED_AT_ONCE)
        # Another delivery of a job that is ours waits for that job's end: claimed now, it would fence what runs.
        new, again = self._line.take(limit, self._leases.holds)
        self._held.add((self._clock(), job) for job in again)
        self._ahead.claimed(len(new))
        return new

    def _claim(self, jobs: Sequence[ReadyJob], *, alone: bool = False) -> None:
        self._prepare_decisions(job.lane for job in jobs)
        claims = self._retry.until_done("claim", lambda: self._claiming.claim(jobs, alone=alone))
        self._leases.hold(claims.attempts)
        self._held.add(self._suspects.set_aside(claims))
        owed = [*claims.to_decode, *(ended.claimed for ended in claims.ended)]
        self._intake.handing_over.owe(claimed.ready.delivery for claimed in owed)
        self._line.ended(job.lane for job, _ in claims.suspects)
        self._pass_on(claims)
        self.ready.put(claims.to_decode, give_up=self._is_ending)
        self._wake_engine()

    def _pass_on(self, claims: Claims) -> None:
        """Pass on jobs that need no decoding, and ask again later for jobs that could not be claimed."""
        now = self._clock()
        self._held.add((now + held_for_s, job) for job, held_for_s in claims.held)
        self._refuse([(job.delivery, error) for job, error in claims.refused])
        for job, known in claims.answered:
            outcome = known.outcome or b""
            self._publishing.put(AnswerAgain(job.delivery, job.job.job_id, outcome, known.headers, self._intake))
        if claims.ended:
            self._recorder.put(undecoded(claims, self._now()))
        gone = [job for job, _ in (*claims.held, *claims.refused, *claims.answered)]
        gone += [ended.claimed.ready for ended in claims.ended]
        self._line.ended(job.lane for job in gone)
