"""From deliveries to jobs that the engine may start: read, put in order, claimed ahead.

    deliveries → Unread → Fetching → AdmissionQueue → Claiming → ClaimedAhead

The feed has a thread of its own, so the device never waits for Kafka, a tokenizer or Postgres.
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from functools import partial
from heapq import heapify, heappop, heapreplace
from typing import TYPE_CHECKING, Final

from alphaloop.engine import Generation
from alphaloop.errors import MessageError, StoreError
from alphaloop.messages.topics import task_of
from alphaloop.settings import settings_of_segment
from alphaloop.store.reuse import ReuseStore
from worker.admission import AdmissionQueue, LaneKey, Line
from worker.background import BoundedQueue
from worker.claims import ClaimedJob, Claiming, Claims
from worker.dead_letters import DeadMessage, Forwarder
from worker.intake.partitions import Delivery
from worker.intake.polling import MAX_BUFFERED, Intake
from worker.intake.validation import Fetching, ReadyJob, Refusal
from worker.ordering.prefixes import prefixes_of
from worker.ordering.service_times import ServiceTimes
from worker.ordering.sharing import SHORTEST_JOB_S
from worker.publishing import Publication, answer_again
from worker.recording import Recorder, answered_equal, ended
from worker.reusing import Reusing
from worker.running import Suspects

if TYPE_CHECKING:
    from worker.deciding.decider import Deciding
    from worker.foundation import Foundation

#: Inside a text a quotation mark is escaped, so this finds the name of a field.
_SEGMENT: Final = re.compile(rb'"segment"\s*:\s*("(?:[^"\\]|\\.){1,1000}")')
#: A field of that name elsewhere costs its job only the place in line of those with a deadline.
_DEADLINE: Final = b'"deadline"'


class Unread:
    """The unread messages of the high lanes, or of the others. One thread owns it, the feed's."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lines: dict[tuple[str, str, bool], deque[Delivery]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def room_bytes(self) -> int:
        """Bytes that may be put; 0 or less for none."""
        return self._max_bytes - self._num_bytes

    def put(self, deliveries: Iterable[Delivery]) -> None:
        """Let these wait after those of their tasks and segments, apart by whether they have a deadline."""
        for delivery in deliveries:
            value = delivery.record.value or b""
            line = task_of(delivery.record.topic) or "", segment_in(value), _DEADLINE in value
            self._lines.setdefault(line, deque()).append(delivery)
            self._num_bytes += delivery.num_bytes

    def take(self, num_read: Callable[[str, str, bool], int]) -> Iterator[Delivery]:
        """Take out one after the other, as long as the caller asks, of whoever has the fewest read ones waiting.

        `num_read`: how many read jobs of a task and segment wait, with a deadline or without. What was taken here
        counts as read.
        """
        turns = [(num_read(*line), number, line) for number, line in enumerate(self._lines)]
        heapify(turns)
        while turns:
            num, number, line = turns[0]
            waiting = self._lines[line]
            delivery = waiting.popleft()
            self._num_bytes -= delivery.num_bytes
            if waiting:
                heapreplace(turns, (num + 1, number, line))
            else:
                heappop(turns)
                del self._lines[line]
            yield delivery

    def discard(self, unwanted: Callable[[Delivery], bool]) -> None:
        """Drop those for which `unwanted` holds (their partition went to another worker)."""
        left = [delivery for waiting in self._lines.values() for delivery in waiting if not unwanted(delivery)]
        self._lines, self._num_bytes = {}, 0
        self.put(left)


def segment_in(value: bytes) -> str:
    """The segment that a message seems to name; empty for none. Only its place in line depends on it.

    Reading the whole message for it would take a hundred times as long. A field of that name deeper in the message may
    be taken for it: the job still runs as its own segment's.
    """
    match = _SEGMENT.search(value)
    if match is None:
        return ""
    try:
        return str(json.loads(match[1].decode()))
    except ValueError:
        return ""


#: How long one turn waits for deliveries when there is nothing else to do.
IDLE_WAIT_S: Final = 0.1
#: Between two questions about a job whose claim another worker holds.
HELD_WAIT_S: Final = 0.02
#: A portion ends after this long, because long prompts take seconds and claims must go on between them.
MOST_READING_S: Final = 0.05
MOST_TAKEN: Final = 1024  #: messages that are put in line at once, unread
MOST_CLAIMED_AT_ONCE: Final = 256  #: jobs in one transaction
#: Jobs claimed ahead last for this time where jobs are short: a claim costs a transaction, whatever its number of jobs.
AHEAD_S: Final = 0.1
#: Jobs that are claimed before the engine has room for them; as many as it has slots if those are more.
LEAST_AHEAD: Final = 8
#: Fewer where jobs are so long that fewer start within this time: what is claimed is not overtaken any more.
SOON_S: Final = 5.0
#: However short jobs are.
MOST_AHEAD: Final = 512


@dataclass(eq=False)
class JobFeed:
    """Keeps `ready` filled with claimed jobs, in the order of admission.

    Claims run ahead of the engine by few jobs (`num_soon`, `ClaimedAhead`), so that another worker can still take a
    waiting job, and a job with less slack its place. The next are claimed when half of those are used up, because a
    transaction costs the same for one job and for many. While a job waits with which a worker died, only such jobs are
    claimed, one by one.

    `prepare_decisions` is called with the lanes that are claimed next, so what their first decision needs is read here
    and not by the loop. `answer_equal` takes jobs out of what is to be decoded whose text is recorded for an equal one.
    """

    intake: Intake
    reader: Fetching
    queue: AdmissionQueue[ReadyJob]
    claiming: Claiming
    suspects: Suspects
    undecoded: UndecodedJobs
    ready: ClaimedAhead
    _: KW_ONLY
    max_jobs: int
    max_bytes: int
    service: ServiceTimes
    prepare_decisions: Callable[[Iterable[LaneKey]], object] = lambda lanes: None
    answer_equal: Callable[[Claims], object] = lambda claims: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.queue.service_s = lambda lane, job: self.service.expected_s(lane.task, job.prepared.sampling.max_tokens)
        self._assignment = -1
        self._unread = {is_high: Unread(self.max_bytes) for is_high in (True, False)}
        #: Jobs whose claim another worker or their own first delivery has, with the time at which to ask again.
        self._held: list[tuple[float, ReadyJob]] = []
        self._lock = threading.Lock()  # of the queue and of the counts below
        self._taken: Counter[Line] = Counter()  # jobs taken out of the queue that have not ended
        self._num_taken = 0  # their number
        self._aside: Counter[Line] = Counter()  # of these, jobs that no other has to wait for

    @property
    def num_waiting(self) -> int:
        """Jobs whose messages were read and that the engine does not have."""
        return self.num_in_turn + len(self._held) + len(self.suspects)

    @property
    def num_in_turn(self) -> int:
        """Those that wait for nothing but their turn."""
        return len(self.reader) + len(self.queue) + len(self.ready)

    @property
    def num_wanted(self) -> int:
        """How many jobs to claim now: for free slots, and what starts within `SOON_S`."""
        num_running = self._num_taken - len(self.ready)
        return self.ready.num_wanted(num_soon(self.queue.num_slots, num_running, self.service.decode_s))

    def turn(self) -> None:
        """Take new deliveries, read and order them, and claim the jobs that start next."""
        self._read()
        if len(self.reader):
            self._add_fetched()
        self._add(self._due_again())
        self._discard_revoked()
        self._claim_ahead()

    def charge(self, device_s: Mapping[Line, float]) -> None:
        """Count the device time of an engine step, by line. Called by the loop."""
        with self._lock:
            self.queue.charge(device_s)

    def served(self, finished: Iterable[tuple[ClaimedJob, Generation]]) -> None:
        """Learn from jobs whose texts ended now how long jobs take. Called by the loop."""
        now = self.claiming.clock()
        for claimed, generation in finished:
            if not (lane := claimed.ready.lane).is_measured:
                num_tokens = generation.counts.num_tokens // claimed.ready.prepared.sampling.n
                ahead_s = max(0.0, now - claimed.claimed_at_s - generation.wall_s)
                self.service.ended(lane.task, num_tokens=num_tokens, wall_s=generation.wall_s, ahead_s=ahead_s)

    def ended(self, lines: Sequence[Line]) -> None:
        """Jobs of these lines have ended or were given back. Called by the loop; makes room for claims."""
        self._forget(lines)
        self.intake.wake()

    def set_aside(self, absent: Mapping[str, Line]) -> None:
        """These jobs wait for servers that are away, so that no other has to wait for their end. Called by the loop."""
        self.suspects.absent = frozenset(absent)
        aside = Counter(absent.values())
        with self._lock:
            is_other = aside != self._aside
            self._aside = aside
        if is_other:
            self.intake.wake()

    def put_back(self, jobs: Sequence[ReadyJob]) -> None:
        """These wait in line again: their claims were given back. Called by the loop."""
        self._add(jobs)
        self.intake.wake()

    def decode_instead(self, claimed: Sequence[ClaimedJob]) -> None:
        """These wait in line again: the texts that were to answer them are gone. Called by the recorder."""
        attempts = {job.job_id: job.attempt for job in claimed}
        with suppress(StoreError):  # a claim of our own is claimed again as it is
            self.claiming.release(attempts)
        self.claiming.leases.let_go(attempts)
        self.intake.handing_over.settle(job.ready.delivery for job in claimed)
        self.put_back([job.ready for job in claimed if self.intake.is_current(job.ready.delivery)])

    def started(self) -> None:
        """The loop took jobs from `ready`: there may be room for more claims."""
        if self.num_wanted:
            self.intake.wake()

    def _read(self) -> None:
        """Take what has come, then read until the jobs that wait fill their room, or the portion's time is over.

        The high lane goes first.
        """
        wait_s = HELD_WAIT_S if self._held else IDLE_WAIT_S
        if any(unread and min(self._room(is_high=is_high)) > 0 for is_high, unread in self._unread.items()):
            wait_s = 0.0
        normal = self._unread[False]
        normal.put(self.intake.take(1 if normal.room_bytes > 0 else 0, wait_s))
        for is_high, unread in self._unread.items():
            if (room_bytes := unread.room_bytes) > 0:
                unread.put(self.intake.take(MOST_TAKEN, 0.0, is_high=is_high, max_bytes=room_bytes))
        until = self.clock() + MOST_READING_S
        for is_high, unread in self._unread.items():
            ready: list[ReadyJob] = []
            refused: list[Refusal] = []
            num, num_bytes = self._room(is_high=is_high)
            in_turn = unread.take(partial(self.queue.num_waiting, is_high=is_high))
            while num > 0 and num_bytes > 0 and (delivery := next(in_turn, None)) is not None:
                num -= 1
                job = self.reader.read(delivery, refused) if self.intake.is_current(delivery) else None
                if job is not None:
                    ready.append(job)
                    num_bytes -= job.num_bytes
                if self.clock() > until:
                    break
            self._add(ready)
            # What no job was made of while its topic was dropped is for another target to judge.
            self.undecoded.refuse(
                [(delivery, error) for delivery, error in refused if self.intake.is_current(delivery)]
            )

    def _room(self, *, is_high: bool) -> tuple[int, int]:
        """Jobs of that lane, and their bytes, that may wait beside those that do. The lanes share no room."""
        with self._lock:
            num, num_bytes = self.queue.load(is_high=is_high)
        if not is_high:
            num += len(self.reader) + len(self._held) + len(self.suspects)
            num_bytes += sum(job.num_bytes for _, job in self._held) + self.suspects.num_bytes
        # More than the bytes of the messages, because a prompt is held as text and as tokens too.
        return self.max_jobs - num, self.max_bytes - num_bytes

    def _add(self, jobs: Iterable[ReadyJob]) -> None:
        """Let jobs wait in line, beginning now."""
        now, today = self.clock(), self.undecoded.now()
        with self._lock:
            for job in jobs:
                deadline = job.job.deadline
                self.queue.add(
                    job.lane,
                    job,
                    priority=job.job.priority,
                    num_bytes=job.num_bytes,
                    now=now,
                    prefixes=prefixes_of(job.prepared.token_ids),
                    is_high=job.delivery.is_high,
                    segment=job.line.segment,
                    deadline_s=math.inf if deadline is None else now + (deadline - today).total_seconds(),
                )

    def _add_fetched(self) -> None:
        """Put the jobs in line whose prompts came from elsewhere, unless their partitions are gone meanwhile."""
        ready, refused = self.reader.take(self._room(is_high=False)[1])
        self._add(job for job in ready if self.intake.is_current(job.delivery))
        self.undecoded.refuse([(delivery, error) for delivery, error in refused if self.intake.is_current(delivery)])

    def _due_again(self) -> list[ReadyJob]:
        """Take out the held jobs whose time has come. One that is ours runs here and goes on waiting."""
        now = self.clock()
        held, self._held, due = self._held, [], list[ReadyJob]()
        for at, job in held:
            if at > now or self._is_ours(job):
                self._held.append((at, job))
            else:
                due.append(job)
        return due

    def _discard_revoked(self) -> None:
        """Drop waiting jobs of partitions that went to another worker."""
        if self.intake.assignment_number == self._assignment:
            return
        self._assignment = self.intake.assignment_number
        for unread in self._unread.values():
            unread.discard(lambda delivery: not self.intake.is_current(delivery))
        self.reader.discard(lambda delivery: not self.intake.is_current(delivery))
        self._held = [(at, job) for at, job in self._held if self.intake.is_current(job.delivery)]
        self.suspects.discard(lambda job: not self.intake.is_current(job.delivery))
        with self._lock:
            self.queue.discard(lambda job: not self.intake.is_current(job.delivery))

    def _claim_ahead(self) -> None:
        if self.suspects.come_first:
            if (suspect := self.suspects.next()) is not None:
                with self._lock:
                    self._taken[suspect.line] += 1
                    self._num_taken += 1
                self._claim([suspect], alone=True)
        elif new := self._next_in_line():
            self._claim(new)
            # After a claim more may be claimable at once: the next turn does not wait for deliveries.
            if len(self.queue) and self.num_wanted:
                self.intake.wake()

    def _next_in_line(self) -> list[ReadyJob]:
        """Take the jobs that are claimed next out of the queue.

        Another delivery of a job that is ours waits for that job's end: claimed now, it would fence what runs.
        """
        if not (limit := min(self.num_wanted, MOST_CLAIMED_AT_ONCE)):
            return []
        with self._lock:
            batch = [job for _, job in self.queue.next(limit, running=self._taken - self._aside, now=self.clock())]
            again = [job for job in batch if self._is_ours(job)]
            new = [job for job in batch if not self._is_ours(job)] if again else batch
            self._taken.update(job.line for job in new)
            self._num_taken += len(new)
        now = self.clock()
        self._held += [(now, job) for job in again]
        return new

    def _claim(self, jobs: Sequence[ReadyJob], *, alone: bool = False) -> None:
        self.prepare_decisions(job.lane for job in jobs)
        claims = self.claiming.claim(jobs, alone=alone)
        claims.end_expired(self.undecoded.now())
        self.answer_equal(claims)
        now = self.clock()
        self._held += self.suspects.set_aside(claims)
        self._held += [(now + held_for_s, job) for job, held_for_s in claims.held]
        self.intake.handing_over.owe(claimed.ready.delivery for claimed in claims.ours)
        self._forget(self.undecoded.pass_on(claims))
        self.ready.fill(claims.to_decode)
        self.ready.count_claimed(len(claims.to_decode))

    def _is_ours(self, job: ReadyJob) -> bool:
        return self.claiming.leases.holds(job.job.job_id)

    def _forget(self, lines: Sequence[Line]) -> None:
        """Jobs of these lines that were taken out of the queue have ended, or were given back."""
        with self._lock:
            self._taken.subtract(lines)
            self._num_taken -= len(lines)
            for line in lines:
                if not self._taken[line]:  # a segment is a free label, so there may be any number of lines
                    del self._taken[line]


def num_soon(num_slots: int, num_running: int, decode_s: float | None) -> int:
    """Jobs that the engine can start within `SOON_S`, while each takes about `decode_s`; None: that is not known."""
    if decode_s is None:
        return MOST_AHEAD
    return max(0, num_slots - num_running) + math.ceil(num_slots * SOON_S / max(decode_s, SHORTEST_JOB_S))


class ClaimedAhead(BoundedQueue[ClaimedJob]):
    """Claimed jobs that the engine may start: those that start soon, at most `least`, or as many as were claimed within
    the last `AHEAD_S`.

    So claims follow the rate at which jobs start.
    """

    def __init__(
        self,
        least: int,
        max_bytes: int,
        *,
        is_ending: Callable[[], bool],
        wake_engine: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake_engine` is called when jobs are ready, because the loop may be waiting for what runs."""
        super().__init__(
            max_items=max(least, MOST_AHEAD),
            max_bytes=max_bytes,
            num_bytes_of=lambda claimed: claimed.ready.num_bytes,
            give_up=is_ending,
        )
        self._least = least
        self._wake_engine = wake_engine
        self._clock = clock
        self._claimed: deque[tuple[float, int]] = deque()
        self._num_claimed = 0

    def num_wanted(self, num_soon: int) -> int:
        """How many jobs to claim now; 0 while more than half of those that should be ready are.

        `num_soon`: jobs that start soon. There should be no more than these, but for what was claimed just now.
        """
        begin = self._clock() - AHEAD_S
        while self._claimed and self._claimed[0][0] < begin:
            self._num_claimed -= self._claimed.popleft()[1]
        wanted = max(min(self._least, num_soon), min(self._num_claimed, MOST_AHEAD))
        return wanted - len(self) if 2 * len(self) <= wanted and self.num_free else 0

    def count_claimed(self, num_jobs: int) -> None:
        """So many jobs are claimed now."""
        self._claimed.append((self._clock(), num_jobs))
        self._num_claimed += num_jobs

    def fill(self, claimed: Sequence[ClaimedJob]) -> None:
        """Let the engine start these; waits for room."""
        self.put(claimed)
        self._wake_engine()


@dataclass(eq=False)
class UndecodedJobs:
    """Where messages go that are not decoded here: they are refused, go to the recorder, or out as recorded before."""

    intake: Intake
    publishing: BoundedQueue[Publication]
    forwarder: Forwarder
    recorder: Recorder
    _: KW_ONLY
    now: Callable[[], datetime]

    def refuse(self, refused: Sequence[tuple[Delivery, MessageError]]) -> None:
        """These messages are no jobs."""
        self.forwarder.put(*(DeadMessage(delivery, error, self.intake) for delivery, error in refused))

    def pass_on(self, claims: Claims) -> list[Line]:
        """Pass on the jobs that need no decoding; the lines of all that were not claimed to be decoded."""
        self.refuse([(job.delivery, error) for job, error in claims.refused])
        for job, known in claims.answered:
            answer = job.delivery, job.job.job_id, known.outcome or b"", known.headers
            self.publishing.put([answer_again(*answer, self.intake)])
        if claims.ended or claims.reused:
            now = self.now()
            self.recorder.put([ended(job.claimed, job.status, job.failure, now=now) for job in claims.ended])
            self.recorder.put([answered_equal(job, now=now) for job in claims.reused])
        gone = [job for job, _ in (*claims.suspects, *claims.held, *claims.refused, *claims.answered)]
        return [job.line for job in (*gone, *(claimed.ready for claimed in claims.undecoded))]


def open_feed(
    base: Foundation,
    reader: Fetching,
    claiming: Claiming,
    undecoded: UndecodedJobs,
    deciding: Deciding,
) -> JobFeed:
    """What orders and claims this worker's jobs."""
    limits, engine, validation = base.settings.worker, base.engine, reader.validation
    num_slots, segments = engine.load().num_slots, base.settings.segments
    queue: AdmissionQueue[ReadyJob] = AdmissionQueue(
        num_slots=num_slots,
        quantum_s=limits.task_quantum_s,
        weight_of=lambda task: validation.tasks[task].weight,
        weight_of_segment=lambda segment: settings_of_segment(segments, segment).weight,
        read_s=deciding.costs.read_s,
    )
    ready = ClaimedAhead(
        max(LEAST_AHEAD, num_slots),
        base.max_bytes,
        is_ending=lambda: base.stop.is_set() or base.died.is_set(),
        wake_engine=engine.wake,
    )
    return JobFeed(
        intake=undecoded.intake,
        reader=reader,
        queue=queue,
        claiming=claiming,
        suspects=Suspects(claiming.leases, random.Random(base.rng.random())),
        undecoded=undecoded,
        ready=ready,
        max_jobs=MAX_BUFFERED,
        max_bytes=base.max_bytes,
        service=ServiceTimes(),
        prepare_decisions=deciding.first_reads.prepare,
        answer_equal=Reusing(ReuseStore(base.database), retry=base.retry, now=base.now).answer,
    )
