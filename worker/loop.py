"""The worker, top to bottom: what happens to a job between Kafka and Kafka."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import uuid4

from alphaloop.deciding.policy import Decision
from alphaloop.errors import AlphaloopError, MalformedMessage, MessageError
from alphaloop.kafka.topics import CONTROL
from alphaloop.messages import Status
from alphaloop.store.outbox import OutboxMessage
from alphaloop.store.outcomes import Outcome
from worker.components import Components
from worker.engine import Step
from worker.intake.cancellation import parse_cancellation
from worker.intake.polling import Delivery
from worker.intake.refusing import refuse
from worker.intake.validation import ReadyJob
from worker.jobs import outcomes
from worker.jobs.batch_decoding import BatchDecoding
from worker.jobs.batching import BatchKey, batch_key
from worker.jobs.claiming import ClaimedJob, Claims, cancelled
from worker.retry import Retry

log = logging.getLogger(__name__)

RELAY_LIMIT: Final = 500
SHORT_WAIT_S: Final = 0.02  #: between two looks at jobs that wait: for company, or for another worker's lease to end


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of the loop did."""

    num_taken: int = 0
    num_refused: int = 0
    num_answered: int = 0
    num_recorded: int = 0
    decision: Decision | None = None


class Worker:
    """One GPU process."""

    def __init__(self, components: Components) -> None:
        self._p = components
        self._retry = Retry(components.hurry)
        self._held: list[tuple[float, ReadyJob]] = []
        self._relay_due = components.clock()

    @property
    def num_waiting(self) -> int:
        """Jobs taken and not yet decoding."""
        return len(self._p.batcher) + len(self._held)

    def run(self) -> None:
        """Turn until told to stop; then everything in hand is decoded or given back, and the offsets are committed."""
        while not self._p.stop.is_set():
            self.relay_overdue()
            self._p.costs.save_when_due()
            self.run_once()
        self._p.costs.save()
        self._p.decider.save()

    def relay_overdue(self) -> int:
        """Publish what was recorded and, by a crash or a broken connection during the commit, never published."""
        if self._p.clock() < self._relay_due:
            return 0
        self._relay_due = self._p.clock() + self._p.relay_after_s

        def relay() -> int:
            return self._p.outbox.relay(self._p.publisher.emit, older_than_s=self._p.relay_after_s, limit=RELAY_LIMIT)

        num_relayed = self._retry.until_done("relay", relay)
        if num_relayed:
            log.info("published %d results recorded earlier", num_relayed, extra={"action": "outbox_relayed"})
        return num_relayed

    def run_once(self, timeout_s: float = 0.2) -> Turn:
        """Take what has come, and decode at most one batch of it. Offsets move last.

        1. take   2. validate   3. batch by task   4. claim   5. decide   6. decode   7. record   8. publish   9. finish

        A crash anywhere before 9 delivers the messages again: the claim then finds what was recorded and emits it once
        more, or decodes anew. Claiming comes after batching so that only jobs about to be decoded burn an attempt.
        """
        deliveries = self._take(timeout_s)
        ready, num_refused = self._validate(deliveries)
        self._wait_for_batch(ready)
        batched = self._p.batcher.next(self._p.clock())
        if batched is None:
            return Turn(len(deliveries), num_refused)
        key, batch = batched
        claims = self._claim(batch)
        decision, decoded, released = self._decide_and_decode(key, claims)
        messages = self._record(decoded)
        self._publish(claims, messages)
        self._finish(claims, released)
        return Turn(len(deliveries), num_refused, len(claims.answered), len(messages), decision)

    def _take(self, timeout_s: float) -> list[Delivery]:
        room = self._p.max_waiting - self.num_waiting
        if len(self._p.batcher):
            timeout_s = min(timeout_s, SHORT_WAIT_S)
        if room > 0:
            return self._p.intake.take(room, timeout_s)
        self._p.stop.wait(SHORT_WAIT_S)
        return []

    def _validate(self, deliveries: Sequence[Delivery]) -> tuple[list[ReadyJob], int]:
        ready, refused = [], []
        for delivery in deliveries:
            try:
                if delivery.record.topic == CONTROL:
                    self._cancel(delivery)
                else:
                    ready.append(self._p.validation.read(delivery))
            except MessageError as error:
                refused.append((delivery, error))
            except AlphaloopError:
                raise
            except Exception as error:
                # A message that our own code trips over must not stop its partition. The exception's text is left out:
                # it may quote the prompt.
                where = traceback.extract_tb(error.__traceback__)[-1]
                fields = {"error": type(error).__name__, "where": f"{where.filename}:{where.lineno}"}
                log.error("a message could not be read", extra={"action": "validation_failed", **fields})
                refused.append((delivery, MalformedMessage(f"could not be read: {type(error).__name__}")))
        refuse(refused, self._p, self._retry)
        return ready, len(refused)

    def _wait_for_batch(self, ready: Sequence[ReadyJob]) -> None:
        now = self._p.clock()
        due = [job for at, job in self._held if at <= now]
        self._held = [(at, job) for at, job in self._held if at > now]
        for job in (*ready, *due):
            key = batch_key(job.job, job.prepared.sampling, job.switched_off)
            self._p.batcher.add(key, job, priority=job.job.priority, now=now)
        # Jobs of a partition that went to another worker are that worker's now.
        self._p.batcher.discard(lambda job: not self._p.intake.is_current(job.delivery))

    def _claim(self, batch: Sequence[ReadyJob]) -> Claims:
        claims = self._retry.until_done("claim", lambda: self._p.claiming.claim(batch))
        now = self._p.clock()
        self._held += [(now + held_for_s, job) for job, held_for_s in claims.held]
        refuse([(job.delivery, error) for job, error in claims.conflicts], self._p, self._retry)
        self._p.leases.hold(claims.attempts)
        return claims

    def _decide_and_decode(
        self, key: BatchKey, claims: Claims
    ) -> tuple[Decision | None, list[tuple[ClaimedJob, Outcome]], list[ClaimedJob]]:
        """The decision for most jobs, the outcomes, and the claimed jobs that were given back undecoded."""
        now = self._p.now()
        decoded = [(e.claimed, outcomes.ended(e.claimed, e.status, e.failure, now=now)) for e in claims.ended]
        if not claims.to_decode:
            return None, decoded, []
        jobs = [claimed.ready.prepared for claimed in claims.to_decode]
        task = self._p.validation.task(key.task)
        each = self._retry.until_done("decide", lambda: self._p.decider.decide_each(key, jobs, task))
        decisions = {claimed.job_id: decision for claimed, decision in zip(claims.to_decode, each, strict=True)}
        decision = max(each, key=each.count)
        self._p.metrics.decided(key.task, decision)
        started, decode_batch_id = self._p.now(), uuid4()
        batch = self._decoding(claims.to_decode).decode(claims.to_decode, decisions)
        now = self._p.now()
        for claimed, generation in batch.finished:
            queue_s = _seconds_between(claimed, started)
            identity = self._p.engine.identity
            its = decisions[claimed.job_id]
            outcome = outcomes.succeeded(
                claimed, generation, its, identity, queue_s=queue_s, now=now, decode_batch_id=decode_batch_id
            )
            decoded.append((claimed, outcome))
        for claimed, error in batch.failed:
            decoded.append((claimed, outcomes.ended(claimed, Status.FAILED, outcomes.failure_of(error), now=now)))
        decoded += [(c, outcomes.ended(c, Status.CANCELLED, cancelled(), now=now)) for c in batch.cancelled]
        return decision, decoded, batch.unfinished

    def _decoding(self, batch: Sequence[ClaimedJob]) -> BatchDecoding:
        stream = self._p.publisher.token_stream(batch)

        def on_step(step: Step) -> None:
            self._p.metrics.stepped(step)
            self._p.costs.observe(step)
            stream.send(step)

        return BatchDecoding(
            self._p.engine, is_hurried=self._p.hurry.is_set, cancelled=self._p.leases.cancelled, on_step=on_step
        )

    def _record(self, decoded: Sequence[tuple[ClaimedJob, Outcome]]) -> list[OutboxMessage]:
        """One Postgres transaction for result, counts, status and outbox; outcomes whose claim was lost are dropped."""
        if not decoded:
            return []
        every = [outcome for _, outcome in decoded]
        messages = self._retry.until_done("record", lambda: self._p.recorder.record(every, owner=self._p.owner))
        self._p.leases.let_go(claimed.job_id for claimed, _ in decoded)
        won = {(message.key or b"").decode() for message in messages}
        self._p.decider.remember(outcome for claimed, outcome in decoded if claimed.job_id in won)
        for claimed, outcome in decoded:
            if claimed.job_id in won:
                job = claimed.ready.job
                self._p.metrics.recorded(outcome, job.task, job.purpose.value)
        self._p.metrics.fenced(len(decoded) - len(won))
        return messages

    def _publish(self, claims: Claims, messages: Sequence[OutboxMessage]) -> None:
        self._retry.until_done("publish", lambda: self._p.publisher.emit(messages))
        self._retry.until_done("clear outbox", lambda: self._p.outbox.delete([message.id for message in messages]))
        again = [(job.job.job_id, outcome) for job, outcome in claims.answered]
        self._retry.until_done("answer again", lambda: self._p.publisher.answer_again(again))
        self._p.metrics.answered_again(len(again))

    def _finish(self, claims: Claims, released: Sequence[ClaimedJob]) -> None:
        attempts = {claimed.job_id: claimed.attempt for claimed in released}
        if attempts:
            self._p.jobs.release(attempts, owner=self._p.owner)
        self._p.leases.let_go(claims.attempts)
        unfinished = {id(claimed.ready) for claimed in released}
        ours = [c.ready for c in claims.to_decode if id(c.ready) not in unfinished]
        ours += [e.claimed.ready for e in claims.ended] + [job for job, _ in claims.answered]
        self._p.intake.finish(job.delivery for job in ours)

    def _cancel(self, delivery: Delivery) -> None:
        request = parse_cancellation(delivery.record.value)
        self._retry.until_done("cancel", lambda: self._p.jobs.request_cancel(request.job_id))
        self._p.intake.finish([delivery])


def _seconds_between(claimed: ClaimedJob, started: datetime) -> float:
    timestamp_ms = claimed.ready.delivery.record.timestamp_ms
    return max(0.0, started.timestamp() - timestamp_ms / 1000) if timestamp_ms else 0.0
