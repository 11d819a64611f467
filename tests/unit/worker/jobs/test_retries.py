"""Which failed jobs are tried again, when, and in which order a failure is counted, sent and let go."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from alphaloop.errors import BrokerError, BrokerUnavailable, StoreUnavailable
from alphaloop.messages import Failure
from alphaloop.messages.retry import RetryHeaders as RetryHeaders
from tests.fixtures.claimed import NOW, FinishedDeliveries, claimed_job
from tests.fixtures.instant import InstantEvent
from worker.dead_letters import FailedTry, Forwarded, JobRetries, TryAgain
from worker.intake.delays import JITTER
from worker.jobs.claiming import ClaimedJob
from worker.retry import Retry

FAILURE = Failure(code="decode_failed", message="no luck")


class Forwarding:
    """The forwarder, which sends nothing here."""

    def __init__(self) -> None:
        self.taken: list[Forwarded] = []

    def put(self, *messages: Forwarded) -> None:
        self.taken += messages


class World:
    """The store, the leases and the recorder as the retries see them; `events` has what was asked, in order."""

    def __init__(self, *, seed: int = 1) -> None:
        self.events: list[object] = []
        self.store_errors: list[Exception] = []
        self.topic_errors: list[Exception] = []
        self.failed: list[FailedTry] = []
        self.forwarding = Forwarding()
        self.retries = JobRetries(
            (10, 60),
            self,  # type: ignore[arg-type]
            self.forwarding,  # type: ignore[arg-type]
            FinishedDeliveries(),  # type: ignore[arg-type]
            count=self._count,
            fail=self.failed.append,
            ensure_topics=self._ensure,
            retry=Retry(InstantEvent()),
            rng=random.Random(seed),
            max_bytes=1 << 20,
        )

    def _count(self, attempts: Mapping[str, int]) -> None:
        self.events.append(("counted", dict(attempts)))
        if self.store_errors:
            raise self.store_errors.pop(0)

    def let_go(self, job_ids: Mapping[str, int]) -> None:
        assert not self.forwarding.taken, "let go before it is sent"
        self.events.append(("let go", sorted(job_ids)))

    def _ensure(self, task: str) -> None:
        self.events.append(("topics", task))
        if self.topic_errors:
            raise self.topic_errors.pop(0)

    def sent(self) -> list[TryAgain]:
        sent, self.forwarding.taken = self.forwarding.taken, []
        return [one for one in sent if isinstance(one, TryAgain)]


def failed(num_failures: int = 0, **given: Any) -> ClaimedJob:
    return replace(claimed_job("job", attempt=3, **given), num_failures=num_failures)


@pytest.mark.parametrize(("num_failures", "topic"), [(0, "jobs.code.retry.10s"), (1, "jobs.code.retry.1m")])
def test_each_failure_waits_longer_and_is_counted_before_it_is_sent(num_failures: int, topic: str) -> None:
    world = World()
    assert world.retries.put(failed(num_failures), FAILURE, NOW)
    assert len(world.retries) == 1
    assert world.retries.turn(0.0) == 1
    assert world.events == [("topics", "code"), ("counted", {"job": 3}), ("let go", ["job"])]
    (sent,) = world.sent()
    said = RetryHeaders.read(sent.headers)
    assert said is not None
    assert (sent.topic, said.num_failures, said.reason) == (topic, num_failures + 1, "decode_failed")
    assert world.retries.turn(0.0) == 0
    assert len(world.retries) == 0


def test_delays_have_jitter_within_its_bound() -> None:
    waits_s = set()
    for seed in range(50):
        world = World(seed=seed)
        world.retries.put(failed(), FAILURE, NOW)
        world.retries.turn(0.0)
        (sent,) = world.sent()
        said = RetryHeaders.read(sent.headers)
        assert said is not None
        waits_s.add(said.not_before_ms / 1000 - NOW.timestamp())
    assert len(waits_s) > 40
    assert 10 <= min(waits_s) < 10.5 < 10 * (1 + JITTER) - 0.5 < max(waits_s) <= 10 * (1 + JITTER)


def test_jobs_that_cannot_gain_by_another_try_have_failed() -> None:
    world = World()
    soon = (NOW + timedelta(seconds=10)).isoformat()
    for hopeless in (failed(2), failed(deadline=soon), failed(purpose="probe"), failed(purpose="control")):
        assert not world.retries.put(hopeless, FAILURE, NOW)
    assert len(world.retries) == 0
    later = (NOW + timedelta(seconds=13)).isoformat()
    assert world.retries.put(failed(deadline=later), FAILURE, NOW)


def test_servers_that_are_away_are_waited_for() -> None:
    world = World()
    world.store_errors = [StoreUnavailable("nobody answers")]
    world.topic_errors = [BrokerUnavailable("nobody answers")]
    world.retries.put(failed(), FAILURE, NOW)
    assert world.retries.turn(0.0) == 1
    assert len(world.sent()) == 1, "sent whatever the second answer was, because the first may have been lost"
    assert [event for event in world.events if event == ("counted", {"job": 3})] == [("counted", {"job": 3})] * 2


def test_without_its_topic_a_failure_is_final_and_the_broker_is_asked_once() -> None:
    world = World()
    world.topic_errors = [BrokerError("not authorized")]
    for _ in range(2):
        world.retries.put(failed(), FAILURE, NOW)
        world.retries.turn(0.0)
    assert world.events == [("topics", "code")]
    assert [one.failure for one in world.failed] == [FAILURE, FAILURE]
    assert world.sent() == []
