"""The measuring stores on a real Postgres."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select, update

from alphaloop.errors import StoreValueRefused
from alphaloop.store.coordination import ScheduleStore
from alphaloop.store.database import Database
from alphaloop.store.housekeeping import RetentionStore
from alphaloop.store.job_counts import RollupStore, sums_between
from alphaloop.store.probes import ProbeRun, ProbeSetStore, ProbeStore
from alphaloop.store.reports import ReportStore, StoredReport
from alphaloop.store.traffic import TrafficStore
from alphaloop.tables import acceptance_daily, acceptance_hourly, probe_runs, probe_sets
from tests.fixtures.drift import probe_set, register_probe_set
from tests.fixtures.history import ENGINE, History, decoded, drawn_counts

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC).replace(microsecond=0)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def probe_run(position: int, purpose: str = "probe", *, at: datetime = NOW, version: str = "v") -> ProbeRun:
    drafter = "lookup" if purpose == "probe" else None
    return ProbeRun(
        f"{purpose}-{position}-{at.isoformat()}",
        "measure",
        at,
        "code",
        version,
        position,
        f"prompt-{position}",
        purpose,
        drafter,
        3 if drafter else None,
        b"digest",
    )


class TestProbeSets:
    def test_the_same_prompts_again_change_nothing(self, database: Database) -> None:
        store, made = ProbeSetStore(database), probe_set("code", [{"prompt": "one"}, {"prompt": "two"}])
        store.register(made, NOW)
        store.register(made, NOW + DAY)
        assert store.active() == {"code": made}
        (version,) = store.versions()
        assert (version.version, version.num_prompts, version.created_at) == (made.version, 2, NOW)

    def test_a_changed_set_replaces_the_former_and_may_come_back(self, database: Database) -> None:
        store = ProbeSetStore(database)
        first, second = (
            probe_set("code", [{"prompt": "one"}, {"prompt": "two"}]),
            probe_set("code", [{"prompt": "one"}]),
        )
        store.register(first, NOW)
        store.register(second, NOW + DAY)
        assert store.active() == {"code": second}
        assert [(v.version, v.is_active) for v in store.versions("code")] == [
            (second.version, True),
            (first.version, False),
        ]
        store.register(first, NOW + 2 * DAY)
        assert store.active() == {"code": first}
        assert store.get("code", second.version) == second
        assert store.get("code", "unheard-of") is None
        with pytest.raises(StoreValueRefused, match="uq_probe_sets_active"), database.begin() as connection:
            connection.execute(update(probe_sets).values(is_active=True))
        store.register(probe_set("sql", [{"prompt": "one"}]), NOW)
        assert list(store.active()) == ["code", "sql"], "tasks do not touch each other"


class TestProbeRuns:
    def test_results_are_those_of_probes(self, database: Database, history: History) -> None:
        store = ProbeStore(database)
        runs = [
            probe_run(0),
            probe_run(0, "control"),
            probe_run(1),
            probe_run(2),
            probe_run(3),
            probe_run(4, at=NOW + DAY),
        ]
        store.record(runs)
        store.record(runs)
        history.decode_probe(runs[0].job_id, "code", "lookup", 1.0, NOW + MINUTE)
        history.decode_probe(runs[1].job_id, "code", None, 0.0, NOW + MINUTE)
        history.decode_probe(runs[2].job_id, "code", "lookup", 0.0, NOW + MINUTE)
        undrafted = drawn_counts(history.rng, 0.0, num_tokens=8, num_draft_tokens=0)
        history.write([decoded(undrafted, NOW, purpose="probe", drafter="")], job_ids=[runs[3].job_id])
        first, second = store.results(NOW - DAY)
        assert (first.position, first.prompt_id, first.drafter) == (0, "prompt-0", "lookup")
        assert (first.engine, first.num_draft_tokens) == (ENGINE, 3)
        assert first.accepts == first.trials
        assert (second.position, second.is_scored) == (1, False)
        assert store.results(NOW) == []
        assert store.settle_unsent(NOW + HOUR) == 1
        rows = {row.job_id: row.sent_at for row in database.rows(select(probe_runs))}
        arrived, young = runs[:4], runs[5]
        assert rows == {**{run.job_id: NOW for run in arrived}, young.job_id: None}, "the one that was lost is gone"

    @pytest.mark.parametrize(("purpose", "scored"), [("probe", ()), ("control", ("lookup", "tiny"))])
    def test_when_a_pair_was_last_probed(
        self, database: Database, history: History, purpose: str, scored: tuple[str, ...]
    ) -> None:
        """A control measures what is scored on it."""
        store = ProbeStore(database)
        made = register_probe_set(database, "code", [{"prompt": "one"}], NOW)
        run = replace(probe_run(0, purpose, version=made.version), scored_drafters=scored)
        store.record([run])
        assert store.last_probed(NOW, HOUR, since=NOW - DAY) == {}, "not sent"
        store.mark_sent([run.job_id], NOW)
        pairs = {("code", drafter): NOW for drafter in scored or ("lookup",)}
        assert store.last_probed(NOW + 59 * MINUTE, HOUR, since=NOW - DAY) == pairs, "under way"
        assert store.last_probed(NOW + 61 * MINUTE, HOUR, since=NOW - DAY) == {}, "expired"
        history.decode_probe(run.job_id, "code", None, 0.5, NOW + MINUTE)
        assert store.last_probed(NOW + 23 * HOUR, HOUR, since=NOW - DAY) == pairs, "decoded without the drafter"
        assert store.last_probed(NOW + 25 * HOUR, HOUR, since=NOW - DAY) == {}, "which measured nothing"
        late = probe_run(1, version=made.version)
        store.record([late])
        store.mark_sent([late.job_id], NOW + 5 * HOUR)
        history.decode_probe(late.job_id, "code", "lookup", 0.5, NOW + 5 * HOUR)
        assert store.last_probed(NOW + 2 * DAY, HOUR, since=NOW - DAY) == {("code", "lookup"): NOW + 5 * HOUR}
        register_probe_set(database, "code", [{"prompt": "another"}], NOW)
        assert store.last_probed(NOW + MINUTE, HOUR, since=NOW - DAY) == {}, "with another set"

    def test_device_time(self, database: Database, history: History) -> None:
        store = ProbeStore(database)
        assert store.device_s(NOW - DAY, NOW) == 0.0
        history.decode_probe("c", "code", None, 0.0, NOW)
        history.vanilla("code", 2, NOW - HOUR, MINUTE)
        assert store.device_s(NOW - DAY, NOW) == pytest.approx(3 * 48 * 0.04)
        assert store.mean_device_s(NOW - DAY, NOW) == {"code": pytest.approx(48 * 0.04)}


class TestDrift:
    def test_streams_are_in_order_and_bounded(self, database: Database, history: History) -> None:
        history.traffic("code", 0.7, 6, NOW - HOUR, MINUTE)
        history.vanilla("code", 2, NOW - HOUR, MINUTE)
        history.traffic("sql", 0.7, 1, NOW - HOUR, MINUTE)
        history.decode_probe("p", "code", "lookup", 0.7, NOW - HOUR)
        history.traffic("code", 0.7, 1, NOW - 3 * DAY, MINUTE)
        streams = TrafficStore(database).streams(NOW - DAY, NOW, max_jobs=4)
        assert TrafficStore(database).num_tokens(NOW - DAY, NOW) == {"code": 8 * 48, "sql": 48}
        assert sorted((s.task, s.drafter, len(jobs)) for s, jobs in streams.items()) == [
            ("code", "", 2),
            ("code", "lookup", 4),
            ("sql", "lookup", 1),
        ]
        (jobs,) = [jobs for s, jobs in streams.items() if (s.task, s.drafter) == ("code", "lookup")]
        assert [job.decoded_at for job in jobs] == [NOW - HOUR + i * MINUTE for i in (2, 3, 4, 5)]
        assert all(job.num_tokens == 48 and len(job.trials) == 3 for job in jobs)

    def test_all_streams_together_are_bounded_and_small_ones_are_read_whole(
        self, database: Database, history: History
    ) -> None:
        for task, num_jobs in (("busy", 30), ("small", 3), ("other", 30)):
            history.traffic(task, 0.7, num_jobs, NOW - 5 * HOUR, MINUTE)
        streams = TrafficStore(database).streams(NOW - DAY, NOW, max_all_jobs=23)
        assert {stream.task: len(jobs) for stream, jobs in streams.items()} == {"busy": 10, "small": 3, "other": 10}
        (jobs,) = [jobs for stream, jobs in streams.items() if stream.task == "busy"]
        assert jobs[-1].decoded_at == NOW - 5 * HOUR + 29 * MINUTE

    def test_a_rare_stream_of_a_busy_task_is_looked_for_in_its_newest_jobs(
        self, database: Database, history: History
    ) -> None:
        rare = NOW.replace(minute=0, second=0) - 10 * HOUR
        history.traffic("code", 0.7, 1, rare, MINUTE)
        history.vanilla("code", 20, rare + HOUR, 12 * MINUTE)  # five an hour
        history.traffic("code", 0.7, 1, rare + 4 * HOUR, MINUTE)
        streams = TrafficStore(database).streams(NOW - DAY, NOW, max_read=10)
        assert {stream.drafter: len(jobs) for stream, jobs in streams.items()} == {"lookup": 1, "": 10}
        everything = TrafficStore(database).streams(NOW - DAY, NOW)
        assert {stream.drafter: len(jobs) for stream, jobs in everything.items()} == {"lookup": 2, "": 20}


class TestSchedule:
    def test_a_run_is_claimed_once(self, database: Database) -> None:
        store = ScheduleStore(database)
        assert store.claim("measure", NOW, "a", NOW)
        assert not store.claim("measure", NOW, "b", NOW)
        assert store.claim("manual", NOW, "b", NOW)
        assert store.last_finished("measure") is None
        store.finish("measure", NOW, {"num_jobs": 3}, NOW + MINUTE)
        assert store.last_finished("measure") == (NOW, {"num_jobs": 3})


class TestRollups:
    def test_a_day_is_the_sum_of_its_hours(self, database: Database, history: History) -> None:
        day = (NOW - DAY).replace(hour=0, minute=0, second=0)
        history.traffic("code", 0.7, 30, day + 20 * MINUTE, 40 * MINUTE)
        history.traffic("code", 0.7, 3, day + DAY, MINUTE)
        store = RollupStore(database)
        assert store.roll_up_day(day.date()) == 1
        assert store.roll_up_day(day.date()) == 1, "again, with the same rows"
        hours = database.rows(
            select(acceptance_hourly).where(acceptance_hourly.c.bucket >= day, acceptance_hourly.c.bucket < day + DAY)
        )
        (total,) = database.rows(select(acceptance_daily))
        assert len(hours) > 10
        assert total.bucket == day
        assert total.num_jobs == sum(hour.num_jobs for hour in hours) == 30
        assert total.tokens_sq == sum(hour.tokens_sq for hour in hours)
        assert total.device_s == pytest.approx(sum(hour.device_s for hour in hours))
        assert total.trials == tuple(sum(column) for column in zip(*(hour.trials for hour in hours), strict=True))
        assert total.accepts_sq == tuple(
            sum(column) for column in zip(*(hour.accepts_sq for hour in hours), strict=True)
        )

    @pytest.mark.parametrize("num_days_away", [2, 20])
    def test_no_day_is_missed_while_the_scheduler_was_away(
        self, database: Database, history: History, num_days_away: int
    ) -> None:
        noon = NOW.replace(hour=12, minute=0, second=0)
        days = [noon - n * DAY for n in range(num_days_away, -1, -1)]
        store = RollupStore(database)
        assert store.roll_up(days[0]) == [], "nothing was decoded yet"
        history.traffic("code", 0.7, 2, days[0], MINUTE)
        assert store.roll_up(days[0] + HOUR) == [days[0].date()]
        for day in days[1:]:
            history.traffic("code", 0.7, 3, day, MINUTE)
        history.traffic("code", 0.7, 5, days[0] + 11 * HOUR, MINUTE)  # after that run, on its day
        assert store.roll_up(noon + HOUR) == [day.date() for day in days]
        found = database.rows(select(acceptance_daily.c.bucket, acceptance_daily.c.num_jobs))
        midnight = {day.replace(hour=0): 3 for day in days}
        assert {row.bucket: row.num_jobs for row in found} == midnight | {days[0].replace(hour=0): 7}
        assert store.roll_up(noon + HOUR) == [], "nothing has changed since"


class TestSettledSums:
    NUM_DAYS = 8

    @pytest.fixture
    def summed_up(self, database: Database, history: History) -> Database:
        """Jobs every five hours of eight days, summed up every day."""
        for day in range(self.NUM_DAYS, -1, -1):
            history.traffic("code", 0.7, 5, NOW - day * DAY - 20 * HOUR, 5 * HOUR)
            if day == self.NUM_DAYS:
                with database.begin() as connection:
                    sums = sums_between(connection, NOW - 20 * DAY, NOW)
                    assert connection.execute(select(func.count()).select_from(sums)).scalar_one() == 5
            RollupStore(database).roll_up(NOW - day * DAY)
        return database

    def test_they_are_the_sums_of_the_hours_and_few_rows_are_read(self, summed_up: Database) -> None:
        hours = acceptance_hourly.c
        for since, until in (
            (NOW - 20 * DAY, NOW),
            (NOW - 5 * DAY - 30 * MINUTE, NOW - 4 * DAY + HOUR),
            (NOW - 6 * DAY, NOW - 6 * DAY + 2 * HOUR),
            (NOW - HOUR, NOW),
            ((NOW - 6 * DAY).replace(hour=0, minute=0), (NOW - 4 * DAY).replace(hour=0, minute=0)),
            (NOW, NOW - DAY),
        ):
            with summed_up.begin() as connection:
                sums = sums_between(connection, since, until).c
                found = connection.execute(select(func.sum(sums.num_tokens), func.sum_by_position(sums.trials))).one()
                wanted = select(func.sum(hours.num_tokens), func.sum_by_position(hours.trials))
                assert found == connection.execute(wanted.where(hours.bucket > since, hours.bucket <= until)).one()
        with summed_up.begin() as connection:
            sums = sums_between(connection, NOW - 20 * DAY, NOW).c
            starts = connection.execute(select(sums.bucket).order_by(sums.bucket)).scalars().all()
        settled = [start for start in starts if start.date() < (NOW - 2 * DAY).date()]
        assert len(settled) == len({start.date() for start in settled}) >= self.NUM_DAYS - 3
        assert len(starts) - len(settled) >= 10, "the hours of the last days"


def test_reports_are_kept_and_dropped(database: Database) -> None:
    store = ReportStore(database)
    assert store.latest() is None
    made = [
        StoredReport(NOW + i * DAY, NOW - DAY, NOW, f"number {i}", {"headline": "α"}, "text", "<html>")
        for i in range(3)
    ]
    for report in made:
        store.save(report)
    assert store.latest() == made[2]
    assert [one.summary for one in store.headings(2)] == ["number 2", "number 1"]
    assert [one.summary for one in store.headings(2, before=NOW + DAY)] == ["number 0"]
    assert (store.made_at(NOW + DAY), store.made_at(NOW - DAY)) == (made[1], None)
    assert RetentionStore(database).drop("reports", NOW + 2 * DAY, lambda: False).num_rows == 2
    assert store.latest() == made[2]
