"""A scheduler that lost the leader's lease writes nothing any more, however far its run had come."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import select, text

from alphaloop.errors import LeadershipLost
from alphaloop.settings import Settings, TaskSettings
from alphaloop.settings.processes import SessionLimits
from alphaloop.store.coordination import LeaderLease, Term
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry
from alphaloop.store.probes import ProbeSetStore
from alphaloop.tables import probe_runs, reports, schedule_runs
from scheduler.leadership import Leadership
from scheduler.loop import RunSummary, Scheduler
from tests.fixtures.drift import Sender, live_worker, register_probe_set, scheduler_of

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)


class Process:
    """A scheduler as `python -m scheduler run` puts it together, without the clock that calls it."""

    def __init__(self, beside: Database, database: Database, folder: Path, name: str) -> None:
        self.broker = Sender()
        self.lease = LeaderLease(beside, name, lease_s=600.0)
        self.terms: list[int] = []
        self.guarded: Database | None = None
        self._scheduler: Scheduler | None = None

        def promote(term: Term) -> None:
            self.terms.append(term.number)
            self.guarded = database.guarded(term.check)
            settings = Settings(data_dir=folder / name, tasks={"code": TaskSettings()})
            self._scheduler = scheduler_of(self.guarded, settings, self.broker, owner=name)

        self.leadership = Leadership(self.lease, promote=promote, demote=lambda: None)

    def run(self, now: datetime) -> RunSummary:
        return self._scheduler.run_once(now)


@pytest.fixture
def two(database_url: SecretStr, database: Database, tmp_path: Path) -> Iterator[tuple[Process, Process]]:
    DraftRegistry(database).register("lookup", "draft", "target")
    live_worker(database)
    register_probe_set(database, "code", [{"prompt": "one"}], NOW)
    with Database(database_url, limits=SessionLimits(lock_s=0.05)) as beside:
        yield Process(beside, database, tmp_path, "first"), Process(beside, database, tmp_path, "second")


def run_out(database: Database) -> None:
    """Let the lease run out, as it does for a leader that stands still."""
    database.change(text("UPDATE leader_leases SET expires_at = now()"))


def test_a_run_that_outlives_its_leadership_writes_nothing_more(
    two: tuple[Process, Process], database: Database, tmp_path: Path
) -> None:
    first, second = two
    assert first.leadership.check()

    def lose_the_lease() -> None:
        """The first has recorded its probes and waits for Kafka; it has not looked at its lease since."""
        run_out(database)
        assert second.leadership.check()
        assert first.leadership.leads
        assert second.run(NOW + HOUR).claimed

    first.broker.at_flush = lose_the_lease
    with pytest.raises(LeadershipLost, match="term 1 of the scheduler has ended, term 2 has begun"):
        first.run(NOW)
    of_runs = {row.owner: row.finished_at for row in database.rows(select(schedule_runs))}
    marked = {row.scheduled_for for row in database.rows(select(probe_runs)) if row.sent_at}
    reported = [row.covers_to for row in database.rows(select(reports))]
    assert of_runs == {"first": None, "second": NOW + HOUR}
    assert marked <= {NOW + HOUR}
    assert reported == [NOW + HOUR]
    assert not (tmp_path / "first").exists(), "no report of the first"
    assert first.broker.on("drift-reports") == []


def test_one_that_leads_again_leads_in_another_term(two: tuple[Process, Process], database: Database) -> None:
    """The run of its first term is still fenced, although the process leads."""
    first, second = two
    first.leadership.check()
    of_first_term = first.guarded
    run_out(database)
    assert second.leadership.check()
    second.leadership.resign()
    assert not first.leadership.check()
    assert first.leadership.check(), "the first leads again"
    assert (first.terms, second.terms) == ([1, 3], [2])
    for connect in (of_first_term.begin, of_first_term.single):
        with pytest.raises(LeadershipLost), connect() as connection:
            connection.execute(text("DELETE FROM probe_sets"))
    assert first.run(NOW).claimed


def test_the_next_leader_waits_for_a_transaction_of_the_one_before(
    two: tuple[Process, Process], database: Database
) -> None:
    """What began in a term is committed in it, or never."""
    first, second = two
    first.leadership.check()
    with first.guarded.begin() as connection:
        connection.execute(text("UPDATE probe_sets SET is_active = false"))
        run_out(database)
        assert not second.leadership.check(), "the transaction goes on"
    assert second.leadership.check()
    assert ProbeSetStore(database).active() == {}
