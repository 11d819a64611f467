"""Recording outcomes from one thread: all that wait share one Postgres transaction (group commit).

While one group is being committed the next one gathers, so a slow disk makes groups larger and not the device slower.
Where jobs are short, groups also gather for a moment, because a transaction takes as long for one job as for many.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

from alphaloop.errors import StoreValueRefused
from alphaloop.messages import Failure, Status
from alphaloop.store.outbox import OutboxMessage
from alphaloop.store.outcomes import Outcome
from worker.background import BoundedQueue
from worker.claims import ClaimedJob, Claims, LeaseKeeper
from worker.dead_letters import DeadMessage, failed_job
from worker.intake.polling import Intake
from worker.metrics import WorkerMetrics
from worker.outcomes import ended, with_unacknowledged
from worker.publishing import PublishingQueue, RecordedGroup
from worker.retry import Retry
from worker.streams import JobStream

if TYPE_CHECKING:
    from worker.tracing import JobTrace, Tracing


log = logging.getLogger(__name__)

#: Outcomes of one transaction at most. More would hold the locks of shared rows for longer than a commit takes.
MOST_AT_ONCE: Final = 512
MOST_BYTES_AT_ONCE: Final = 8 << 20
#: Between the beginnings of two transactions, because one costs some 5 ms of processor time whatever its size. A job
#: that ends alone does not wait; the others leave time for commit and broker, so that results come within 50 ms.
GATHER_S: Final = 0.03
_IDLE_WAIT_S: Final = 0.2
#: Outcomes that wait to be recorded before the loop waits.
MOST_WAITING: Final = 4096
#: Between two looks whether the streams of held outcomes are settled.
_LOOK_S: Final = 0.005
#: An outcome waits no longer for its stream, because a `tokens` topic that is away must not hold up results.
MOST_HELD_S: Final = 1.0
#: Half of what one transaction takes at most, so that what is held and what has just come fit in one.
MOST_HELD: Final = 256
MOST_HELD_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A claimed job and what became of it."""

    claimed: ClaimedJob
    outcome: Outcome


def undecoded(claims: Claims, now: datetime) -> list[EndedJob]:
    """Claimed jobs that need no decoding, with their outcomes."""
    return [EndedJob(e.claimed, ended(e.claimed, e.status, e.failure, now=now)) for e in claims.ended]


class Recorder:
    """Result, counts, status and outbox in one transaction; outcomes whose claim was lost are dropped.

    The outcome of a streamed job is held until its stream is settled, as UnsettledStreams says.
    """

    def __init__(
        self,
        record: Callable[[Sequence[Outcome]], list[OutboxMessage]],
        intake: Intake,
        leases: LeaseKeeper,
        publishing: PublishingQueue,
        metrics: WorkerMetrics,
        *,
        retry: Retry,
        max_bytes: int,
        now: Callable[[], datetime],
        clock: Callable[[], float] = time.monotonic,
        tracing: Tracing | None = None,
    ) -> None:
        """`record` writes outcomes as this worker's and returns what is to be published, as OutcomeStore does."""
        self._write = record
        self._intake = intake
        self._leases = leases
        self._publishing = publishing
        self._metrics = metrics
        self._retry = retry
        self._now = now
        self._clock = clock
        self._tracing = tracing
        self._gathered_at = -math.inf
        self._waiting: BoundedQueue[EndedJob] = BoundedQueue(
            max_items=MOST_WAITING, max_bytes=max_bytes, num_bytes_of=lambda one: len(one.outcome.result)
        )
        self._unsettled = UnsettledStreams(is_hurried=retry.gives_up, clock=clock)
        self._recorded: deque[Outcome] = deque()

    def __len__(self) -> int:
        """Outcomes that are not recorded yet, those of the transaction in hand among them.

        One of a streamed job may count twice.
        """
        return self._waiting.num_unsettled + len(self._unsettled)

    def put(self, ended: Sequence[EndedJob]) -> None:
        """Hand over outcomes; waits for room unless the worker is told to hurry."""
        self._waiting.put(ended, give_up=self._retry.gives_up)

    def turn(self, timeout_s: float = _IDLE_WAIT_S) -> int:
        """Record what waits as one group and hand its messages on; returns how many outcomes won their record."""
        if (gathering_s := self._gathered_at + GATHER_S - self._clock()) > 0:
            self._retry.wait(gathering_s)
        if not (group := self._take(timeout_s)):
            return 0
        self._gathered_at = self._clock()
        group, messages = self._record(group)
        self._leases.let_go(one.claimed.job_id for one in group)
        won = {(message.key or b"").decode(): message.value for message in messages}
        winners = [one for one in group if won.get(one.claimed.job_id) == one.outcome.result]
        # Before the results are published, so that a job sent because of a result is decided with this evidence.
        self._recorded.extend(one.outcome for one in winners)
        self._publishing.put(
            RecordedGroup(
                tuple(messages),
                tuple(one.claimed.ready.delivery for one in group),
                self._intake,
                tuple(one.claimed.job_id for one in group),
                tuple(found for one in winners if (found := self._failed(one))),
                self._traces(winners),
            )
        )
        self._count(winners)
        self._metrics.fenced(len(group) - len(won))
        return len(won)

    def _take(self, timeout_s: float) -> list[EndedJob]:
        """A group that may be recorded now: what waits, and what is no longer held."""
        held = self._unsettled
        wait_s = min(timeout_s, _LOOK_S) if held.num_held else timeout_s
        limit, max_bytes = MOST_AT_ONCE - held.num_held, MOST_BYTES_AT_ONCE - held.num_bytes
        return list(map(_told, held.pass_on(self._waiting.take(limit, wait_s, max_bytes=max_bytes))))

    def _record(self, group: list[EndedJob]) -> tuple[list[EndedJob], list[OutboxMessage]]:
        """Record the group; returns it as it was recorded, and the messages to publish.

        An outcome that Postgres does not take, alone, is recorded without what drafters were scored with and without
        a probe's text, which no job depends on. If that is refused too, a failure that says so replaces it: the job
        must not stop the others, nor be decoded again and again.
        """
        outcomes = [one.outcome for one in group]
        try:
            return group, self._retry.until_done("record", lambda: self._write(outcomes))
        except StoreValueRefused as error:
            if len(group) > 1:
                parts = [self._record([one]) for one in group]
                return [one for jobs, _ in parts for one in jobs], [message for _, sent in parts for message in sent]
            bare = replace(outcomes[0], shadows=(), probe_text=None)
            if bare != outcomes[0]:
                log.error("the evidence of a job is not taken: %s", error.message, extra={"action": "evidence_refused"})
                return self._record([replace(group[0], outcome=bare)])
            log.error("outcome not taken: %s", error.message, extra={"action": "outcome_refused"})
        claimed = group[0].claimed
        failure = Failure(code="outcome_refused", message="the database does not take the outcome of this job")
        failed = EndedJob(claimed, ended(claimed, Status.FAILED, failure, now=self._now()))
        stand_in = [failed.outcome]
        return [failed], self._retry.until_done("record", lambda: self._write(stand_in))

    def _failed(self, one: EndedJob) -> DeadMessage | None:
        is_failed = one.outcome.status == Status.FAILED.value
        return failed_job(one.claimed.ready.delivery, one.outcome.result, self._intake) if is_failed else None

    def _traces(self, winners: Sequence[EndedJob]) -> tuple[JobTrace, ...]:
        if self._tracing is None:
            return ()
        return tuple(self._tracing.recorded(winners))

    def _count(self, winners: Sequence[EndedJob]) -> None:
        by_label: dict[tuple[str, str], list[Outcome]] = {}
        for one in winners:
            lane = one.claimed.ready.lane
            by_label.setdefault((lane.task, lane.purpose), []).append(one.outcome)
        for (task, purpose), outcomes in by_label.items():
            self._metrics.recorded(task, purpose, outcomes)

    def take_recorded(self) -> list[Outcome]:
        """Outcomes that were recorded since the last call: evidence for the next decision. Called by the loop."""
        taken: list[Outcome] = []
        while self._recorded:
            taken.append(self._recorded.popleft())
        return taken


def _told(one: EndedJob) -> EndedJob:
    """The ended job; its result tells whether chunks of its stream may be missing."""
    num_chunks = one.claimed.stream.num_unacknowledged if one.claimed.stream else 0
    return replace(one, outcome=with_unacknowledged(one.outcome, num_chunks)) if num_chunks else one


class UnsettledStreams:
    """Holds outcomes of streamed jobs until every chunk was acknowledged or dropped. The recorder's thread owns it.

    Once an outcome is recorded, the relay of any worker may end the stream. If this worker then dies with chunks that
    no broker has, they are lost, because the job is not decoded again. Then the final chunk has to have the whole text,
    which costs a reader the wait for the end; so an outcome waits for its chunks, but not for long.

    An outcome whose stream is not settled goes on nevertheless after `MOST_HELD_S`, when the worker is told to hurry,
    and if it is among the oldest when too much is held. Its result then tells of the chunks that may be missing.
    """

    def __init__(
        self,
        *,
        is_hurried: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._is_hurried = is_hurried
        self._clock = clock
        self._held: list[_Held] = []  # the oldest first
        self._num_bytes = 0
        self._num_in_hand = 0

    def __len__(self) -> int:
        """Outcomes that are held, and those of streams in the last answer of `pass_on`, which may be in hand."""
        return len(self._held) + self._num_in_hand

    @property
    def num_held(self) -> int:
        """Outcomes that are held."""
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Bytes of the results that are held."""
        return self._num_bytes

    def pass_on(self, items: Sequence[EndedJob]) -> list[EndedJob]:
        """What may be recorded now, of what was held and of `items`. The rest is held."""
        ready: list[EndedJob] = []
        streamed = self._held.copy()
        for item in items:
            if (stream := item.claimed.stream) is None:
                ready.append(item)
            else:
                streamed.append(_Held(item, stream, self._clock() + MOST_HELD_S))
        held, num_bytes = self._unsettled(streamed) if streamed else ([], 0)
        kept = {id(one) for one in held}
        ready.extend(one.ended for one in streamed if id(one) not in kept)
        self._num_in_hand = len(streamed) - len(held)  # first, because another thread may ask for the length
        self._held, self._num_bytes = held, num_bytes
        return ready

    def _unsettled(self, streamed: Sequence[_Held]) -> tuple[list[_Held], int]:
        """What has to be held, as far as there is room for it, the newest before older ones; and how many bytes."""
        held: list[_Held] = []
        num_bytes, now = 0, self._clock()
        if self._is_hurried():
            return held, num_bytes
        for one in reversed(streamed):
            size = len(one.ended.outcome.result)
            has_room = not held or (len(held) < MOST_HELD and num_bytes + size <= MOST_HELD_BYTES)
            if has_room and now < one.until and not one.stream.is_settled:
                held.append(one)
                num_bytes += size
        return held[::-1], num_bytes


@dataclass(frozen=True, slots=True)
class _Held:
    ended: EndedJob
    stream: JobStream
    until: float  #: by the clock: when it waits no longer
