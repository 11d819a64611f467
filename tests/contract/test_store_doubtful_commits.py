"""A connection that breaks during a commit: the caller does not know whether it was carried out, and asks again."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.errors import StoreUnavailable
from alphaloop.messages import Mode
from alphaloop.store.database import Database
from alphaloop.store.jobs import ClaimState, JobStore
from alphaloop.store.outcomes import Outbox, OutcomeStore
from tests.chaos.proxy import Proxy
from tests.chaos.world import proxied
from tests.fixtures.runs import claim, decode_run, num_pending, outcome, recorded_results, vanilla_counts

pytestmark = pytest.mark.postgres


@pytest.fixture
def proxy(database_url: SecretStr) -> Iterator[Proxy]:
    proxy = Proxy(urlsplit(database_url.get_secret_value()).port or 5432)
    yield proxy
    proxy.close()


@pytest.fixture
def far(proxy: Proxy, database_url: SecretStr) -> Iterator[Database]:
    """The database behind the proxy."""
    with Database(SecretStr(proxied(database_url.get_secret_value(), proxy.port))) as database:
        yield database


@pytest.mark.parametrize("is_carried_out", [False, True])
def test_an_outcome_is_recorded_once_and_published_at_once(
    far: Database, database: Database, proxy: Proxy, is_carried_out: bool
) -> None:
    outcomes = OutcomeStore(far)
    claim(far, *"abc")
    JobStore(database).request_cancel("c")
    run = decode_run(vanilla_counts(5), mode=Mode.VANILLA)
    asked = [outcome("b", run=run), outcome("a", run=run), outcome("lost", 9)]
    proxy.cut_commits(0 if is_carried_out else 1, 1 if is_carried_out else 0)
    with pytest.raises(StoreUnavailable):
        outcomes.record(asked, owner="w")
    assert recorded_results(database, "ab").keys() == (set("ab") if is_carried_out else set())
    messages = outcomes.record(asked, owner="w")
    assert [(message.key, message.value) for message in messages] == [(o.job_id.encode(), o.result) for o in asked[:2]]
    assert proxy.num_cuts == 1
    counted = "SELECT (SELECT count(*) FROM decode_runs), (SELECT sum(num_jobs) FROM acceptance_hourly)"
    assert tuple(database.one(text(counted))) == (2, 2)
    outbox = Outbox(database)
    assert num_pending(database) == 2
    outbox.delete({message.id for message in messages})
    assert num_pending(database) == 0


def test_outcomes_that_a_relay_publishes_meanwhile_are_published_once_more(far: Database, database: Database) -> None:
    """The relay of another worker found them first. The same bytes twice are allowed, a lost delivery is not."""
    outcomes, outbox, asked = OutcomeStore(far), Outbox(database), [outcome("a", text="one")]
    claim(far, "a")
    outcomes.record(asked, owner="w")
    for _ in range(2):
        relayed = outbox.take_over(older_than_s=0.0, limit=1)
        assert len(relayed) == 1
        outbox.delete(relayed)
        again = outcomes.record(asked, owner="w")
        assert [message.value for message in again] == [asked[0].result]
        assert num_pending(database) == 1
    relayed = outbox.take_over(older_than_s=0.0, limit=1)
    again = outcomes.record(asked, owner="w")
    outbox.delete(relayed)
    assert num_pending(database) == 1
    outbox.delete({message.id for message in again})
    assert num_pending(database) == 0
    for other in (outcome("a", text="two"), outcome("a", 2, text="one")):
        assert outcomes.record([other], owner="w") == []


def test_a_claim_and_a_release_may_be_repeated(far: Database, proxy: Proxy) -> None:
    """A claim commits by itself, so its answer is what gets lost."""
    jobs = JobStore(far)

    claim(far, "b", "a", max_attempts=1)
    [found] = claim(far, "a", max_attempts=1)
    assert (found.state, found.attempt, found.num_crashes) == (ClaimState.CLAIMED, 2, 0)
    proxy.cut_commits(0, 1)
    with pytest.raises(StoreUnavailable):
        jobs.release({"a": 2}, owner="w")
    assert jobs.release({"a": 2}, owner="w") == set()
    [other] = claim(far, "a", owner="other", max_attempts=1)
    assert (other.state, other.attempt, other.num_crashes) == (ClaimState.CLAIMED, 3, 0)
