"""Claims: renewed, lost, given back, made anew for a second decode; cancellations noticed; a database that is away."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import pytest

from alphaloop.engine import TokenDelta
from alphaloop.errors import StoreUnavailable
from alphaloop.messages import Status
from alphaloop.store.jobs import Claim, ClaimRequest, ClaimState
from tests.fixtures.publishing import InstantEvent, claimed_job
from worker.background import Retry
from worker.claims import ClaimedJob, Claiming, EndedUndecoded, LeaseKeeper


class LedgerOfLeases:
    def __init__(self) -> None:
        self.renewed: list[dict[str, int]] = []
        self.lost: set[str] = set()
        self.asked_to_end: set[str] = set()
        self.is_away = False

    def renew(self, attempts: Mapping[str, int], *, owner: str, lease_s: float) -> set[str]:
        if self.is_away:
            raise StoreUnavailable
        self.renewed.append(dict(attempts))
        return set(attempts) - self.lost

    def cancelled(self, job_ids: Collection[str]) -> set[str]:
        return self.asked_to_end & set(job_ids)


class Keeping:
    """A keeper of leases, and the seconds that pass for it."""

    def __init__(self, may_renew: Callable[[], bool] = lambda: True) -> None:
        self.store, self.now = LedgerOfLeases(), 1000.0
        self.keeper = LeaseKeeper(self.store, owner="w", lease_s=30, may_renew=may_renew, clock=lambda: self.now)

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.keeper.renew_due()


def test_a_claim_is_renewed_when_half_of_its_lease_is_over_and_not_before() -> None:
    one = Keeping()
    one.keeper.hold({"a": 1, "b": 3})
    one.pass_s(14)
    assert one.store.renewed == [], "most jobs end before: their rows are never written for a lease"
    one.keeper.hold({"later": 1})
    one.pass_s(29)
    assert one.store.renewed == [{"a": 1, "b": 3}, {"later": 1}, {"a": 1, "b": 3}]


def test_a_job_that_is_claimed_again_is_renewed_with_its_new_attempt() -> None:
    one = Keeping()
    one.keeper.hold({"a": 1})
    one.pass_s(10)
    one.keeper.hold({"a": 2})
    one.pass_s(15)
    assert one.store.renewed == [{"a": 2}]


def test_cancellations_are_known_while_held_and_forgotten_after() -> None:
    one = Keeping()
    one.keeper.hold({"a": 1, "b": 1})
    one.store.asked_to_end = {"b", "somebody else's"}
    one.keeper.check_cancelled()
    assert one.keeper.cancelled() == {"b"}
    one.keeper.let_go(["b"])
    assert one.keeper.cancelled() == set()


def test_a_database_that_is_away_is_asked_again_until_it_answers() -> None:
    one = Keeping()
    one.keeper.hold({"a": 1})
    one.store.is_away = True
    one.pass_s(15)
    one.store.is_away = False
    one.pass_s(1)
    assert one.store.renewed == [{"a": 1}]


def test_while_the_worker_hangs_its_claims_run_out() -> None:
    hangs = [True]
    one = Keeping(may_renew=lambda: not hangs)
    one.keeper.hold({"a": 1})
    one.pass_s(20)
    assert one.store.renewed == []
    hangs.clear()
    one.keeper.renew_due()
    assert one.store.renewed == [{"a": 1}]


class Claims:
    """A store that gives one answer, and a keeper of leases that notes what it holds."""

    def __init__(self, state: ClaimState, *, num_errors: int = 0) -> None:
        self.held: dict[str, int] = {}
        self.asked: list[str] = []
        self.released: list[dict[str, int]] = []
        self._state, self._num_errors = state, num_errors
        self.hurry = InstantEvent()
        self.claiming = Claiming(self, self, owner="w", lease_s=30.0, max_attempts=3, retry=Retry(self.hurry))  # type: ignore[arg-type]

    def claim(
        self, requests: Sequence[ClaimRequest], *, owner: str, lease_s: float, max_attempts: int, alone: bool
    ) -> list[Claim]:
        assert alone, "the worker holds the claim already"
        self.asked += [request.job_id for request in requests]
        if len(self.asked) <= self._num_errors:
            raise StoreUnavailable
        return [Claim(request.job_id, self._state, 2) for request in requests]

    def release(self, attempts: Mapping[str, int], *, owner: str) -> set[str]:
        self.released.append(dict(attempts))
        if len(self.released) <= self._num_errors:
            raise StoreUnavailable
        return set(attempts)

    def hold(self, attempts: dict[str, int]) -> None:
        self.held |= attempts


def streamed_job() -> ClaimedJob:
    claimed = claimed_job("a", stream=True)
    claimed.stream.add(TokenDelta("j", "some text", 0), created=0, model="target")
    return claimed


@pytest.mark.parametrize("claimed", [claimed_job("a"), claimed_job("a", stream=True)])
def test_a_job_without_a_chunk_out_keeps_its_claim(claimed: ClaimedJob) -> None:
    claims = Claims(ClaimState.CLAIMED)
    assert claims.claiming.claim_again(claimed) is claimed
    assert claims.asked == []


def test_a_job_with_a_chunk_out_gets_the_next_attempt_and_numbers_its_chunks_from_0() -> None:
    claims = Claims(ClaimState.CLAIMED, num_errors=1)
    fresh = claims.claiming.claim_again(streamed_job())
    assert isinstance(fresh, ClaimedJob)
    assert (fresh.attempt, fresh.stream.num_chunks, claims.held) == (2, 0, {"a": 2})
    assert claims.asked == ["a", "a"], "the first answer was lost"


def test_a_job_that_was_cancelled_meanwhile_ends_with_its_new_claim() -> None:
    ended = Claims(ClaimState.CANCELLED).claiming.claim_again(streamed_job())
    assert isinstance(ended, EndedUndecoded)
    assert (ended.status, ended.claimed.attempt) == (Status.CANCELLED, 2)


@pytest.mark.parametrize("state", [ClaimState.HELD, ClaimState.ENDED])
def test_a_job_that_another_worker_took_ends_with_the_lost_claim(state: ClaimState) -> None:
    claims = Claims(state)
    ended = claims.claiming.claim_again(streamed_job())
    assert isinstance(ended, EndedUndecoded)
    assert (ended.claimed.attempt, ended.failure.code, claims.held) == (1, "claim_lost", {})


def test_claims_are_given_back_when_the_database_is_back_also_in_a_hurry() -> None:
    claims = Claims(ClaimState.CLAIMED, num_errors=1)
    claims.hurry.set()
    claims.claiming.release({"a": 2})
    assert claims.released == [{"a": 2}] * 2, "the first try was lost"
