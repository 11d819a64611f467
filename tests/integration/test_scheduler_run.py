"""Whole runs of the scheduler on a real database, with a sender that keeps what it is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.errors import DeliveryFailed
from alphaloop.experiment.wording import load
from alphaloop.measurements import DriftSubject
from alphaloop.messages import Mode, Purpose, parse_job
from alphaloop.messages.dead_letter import Origin
from alphaloop.probe_plan import ProbePlanner, Why
from alphaloop.settings import PriceSettings, SchedulerSettings, Settings, TaskSettings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry, DraftStatus
from alphaloop.store.decisions import BudgetSubject, DecisionLog
from alphaloop.store.drift import DriftEventStore, EventChange, EventState
from alphaloop.store.reports import ReportStore
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.tables import decode_runs, drift_events, probe_runs, schedule_runs
from scheduler.loop import Scheduler
from tests.fixtures.drift import Sender, content, live_worker, register_probe_set, scheduler_of
from tests.fixtures.history import DRAFT, TARGET, History
from tests.fixtures.runs import block_rows, subject

pytestmark = pytest.mark.postgres

NOW = datetime.now(UTC).replace(microsecond=0)
SECOND, MINUTE, HOUR, DAY = (timedelta(seconds=1) * by for by in (1, 60, 3600, 86_400))


Make = Callable[..., Scheduler]


@pytest.fixture
def outbox() -> Sender:
    return Sender()


@pytest.fixture
def make(database: Database, outbox: Sender, tmp_path: Path) -> Make:
    def build(prices: PriceSettings | None = None, **settings: object) -> Scheduler:
        given = Settings(
            data_dir=tmp_path,
            tasks={"code": TaskSettings(), "sql": TaskSettings()},
            scheduler=SchedulerSettings.model_validate(settings),
            prices=prices or PriceSettings(),
        )
        return scheduler_of(database, given, outbox)

    return build


@pytest.fixture
def worker(database: Database) -> None:
    live_worker(database)


def test_an_empty_database_gives_a_sensible_report(make: Make, database: Database, outbox: Sender) -> None:
    summary = make().run_once(NOW)
    assert summary.claimed
    assert "no acceptance to report yet" in summary.headline
    html = summary.page.read_text(encoding="utf-8")
    assert summary.headline in html
    assert html == (summary.page.parent / "latest.html").read_text(encoding="utf-8")
    stored = ReportStore(database).latest()
    assert stored.html == html
    assert "Nothing was decoded" in stored.text
    (published,) = outbox.on("drift-reports")
    assert json.loads(published) == stored.content
    assert json.loads(summary.page.with_suffix(".json").read_text(encoding="utf-8")) == stored.content


def test_a_run_happens_once(make: Make, database: Database, outbox: Sender) -> None:
    first, second = make().run_once(NOW), make().run_once(NOW)
    assert (first.claimed, second.claimed) == (True, False)
    assert len(outbox.on("drift-reports")) == 1
    (row,) = database.rows(select(schedule_runs))
    assert row.finished_at == NOW
    assert row.outcome["headline"] == first.headline


def test_a_fall_opens_one_event_and_recovery_closes_it(make: Make, database: Database, history: History) -> None:
    scheduler = make()
    lookup = Decision(Mode.SPECULATIVE, "lookup", DRAFT, 3, Reason.FASTER, "")
    DecisionLog(database).record_change(BudgetSubject("code", TARGET, "cpu", "greedy"), 1, lookup, "w")
    start = NOW - 6 * DAY
    fallen = history.traffic("code", 0.85, 200, start, 5 * MINUTE)
    assert scheduler.run_once(fallen).num_events_open == 0
    lower = history.traffic("code", 0.55, 60, fallen, 5 * MINUTE)
    found = scheduler.run_once(lower)
    assert (found.num_events_opened, found.num_events_open) == (1, 1)
    (event,) = DriftEventStore(database).open_events()
    assert event.subject.task == "code"
    assert event.cause == "too_little_evidence", "the task has no probe set"
    assert "fell from 0.8" in event.content.verdict
    assert "alphaloop probes register" in event.content.action
    again = scheduler.run_once(lower + MINUTE)
    assert (again.num_events_opened, again.num_events_open) == (0, 1)
    recovered = history.traffic("code", 0.85, 200, lower + 2 * MINUTE, 5 * MINUTE)
    over = scheduler.run_once(recovered)
    assert (over.num_events_closed, over.num_events_open) == (1, 0)
    (row,) = database.rows(select(drift_events))
    assert row.closed_at == recovered
    assert "steady again" in row.closed_because
    traffic = row.evidence["traffic"]
    assert traffic["accepts_after"] / traffic["trials_after"] < 0.7
    assert row.lost_tokens_per_s > 0, "expected, by what was accepted then and now"
    assert [state.state for state in DriftEventStore(database).history(row.id)] == ["opened", "closed"]


def test_an_accepted_level_is_the_norm_and_a_return_to_the_old_one_is_news(
    make: Make, database: Database, history: History
) -> None:
    scheduler, events, now = make(), DriftEventStore(database), datetime.now(UTC)
    fallen = history.traffic("code", 0.85, 200, now - 260 * 5 * MINUTE, 5 * MINUTE)
    lower = history.traffic("code", 0.55, 60, fallen, 5 * MINUTE)
    assert scheduler.run_once(lower).num_events_opened == 1
    (event,) = events.open_events()
    (accepted,) = events.accept(event.id, "Ada", "")
    after = max(accepted.accepted_at, lower) + MINUTE
    assert scheduler.run_once(after).num_events_open == 0, "what was read before the acceptance is forgotten"
    steady = history.traffic("code", 0.55, 320, after, 5 * MINUTE)
    found = scheduler.run_once(steady)
    assert (found.num_events_opened, found.num_events_open) == (0, 0)
    returned = history.traffic("code", 0.85, 100, steady, 5 * MINUTE)
    assert scheduler.run_once(returned).num_events_opened == 1
    (news,) = events.open_events()
    assert (news.id > event.id, news.num_reopened) == (True, 0)
    assert "rose" in news.content.verdict
    closed = events.find(event.id)
    assert closed.closed_because == "accepted as the new level."


@pytest.mark.usefixtures("worker")
def test_probes_are_compared_with_what_they_showed_when_the_level_was_accepted(
    make: Make, database: Database, history: History, outbox: Sender
) -> None:
    """A draft gone stale: accepted, it is not found again, but it stays stale; a further fall is another event."""
    drafts, events, now = DraftRegistry(database), DriftEventStore(database), datetime.now(UTC)
    drafts.register("lookup", DRAFT, TARGET)
    register_probe_set(database, "code", prompts(8), now - 10 * DAY)
    scheduler = make(probe_prompts=8, probe_min_device_s=1000.0)
    run_and_decode_probes(scheduler, database, history, outbox, now - 4 * DAY, 0.9)
    drafts.register("lookup", DRAFT, "target-2")
    run_and_decode_probes(scheduler, database, history, outbox, now - 2 * DAY, 0.6, target="target-2")
    scheduler.run_once(now - DAY)
    (event,) = events.open_events()
    assert event.cause == "draft_stale"
    (accepted,) = events.accept(event.id, "Ada", "so be it")
    after = accepted.accepted_at + MINUTE
    assert scheduler.run_once(after).num_events_open == 0
    run_and_decode_probes(scheduler, database, history, outbox, after + HOUR, 0.6, target="target-2")
    assert scheduler.run_once(after + 2 * HOUR).num_events_open == 0
    assert drafts.stale("target-2") == {("lookup", DRAFT)}, "its status has not been accepted"
    run_and_decode_probes(scheduler, database, history, outbox, after + 30 * HOUR, 0.1, target="target-2")
    assert scheduler.run_once(after + 31 * HOUR).num_events_opened == 1
    (further,) = events.open_events()
    assert (further.cause, further.id > event.id, further.num_reopened) == ("fault", True, 0)


def test_what_jobs_cost_and_save_comes_from_what_is_stored(make: Make, database: Database, history: History) -> None:
    start, runs, slices = NOW - 2 * HOUR, decode_runs.c, SwitchbackStore(database)
    history.traffic("code", 0.8, 30, start, MINUTE)
    history.vanilla("code", 10, start, MINUTE)
    history.vanilla("sql", 10, start, MINUTE)
    history.decode_probe("probe", "code", "lookup", 0.8, start)
    slices.add(block_rows(subject("code"), start, 12))
    make(prices=PriceSettings(per_hour=7.2, currency="EUR")).run_once(NOW)
    stored = ReportStore(database).latest()
    sums = (func.sum(column).label(column.name) for column in (runs.num_tokens, runs.device_s))
    grouped = select(runs.task, runs.purpose, func.count().label("jobs"), *sums).group_by(runs.task, runs.purpose)
    spent = {(row.task, row.purpose): row for row in database.rows(grouped)}
    code = next(line for line in stored.content["tasks"] if line["task"] == "code")
    assert (code["num_speculative_jobs"], code["acceptance_drafter"], code["cost"]["num_jobs"]) == (30, "lookup", 40)
    assert code["saved_device_s"]["mean"] > 0
    drafted = select(func.sum(runs.num_tokens - runs.rounds)).where(runs.drafter == "lookup", runs.purpose == "traffic")
    assert code["num_saved_passes"] == database.scalar(drafted) > 0
    assert load(slices.shown(NOW)["code"]) in stored.html
    for line in stored.content["tasks"]:
        row, cost = spent[line["task"], "traffic"], line["cost"]
        assert (cost["num_jobs"], cost["num_tokens"]) == (row.jobs, row.num_tokens)
        assert cost["per_1000_jobs"] == pytest.approx(row.device_s * 0.002 / row.jobs * 1000)
        assert cost["per_million_tokens"] == pytest.approx(row.device_s * 0.002 / int(row.num_tokens) * 1e6)
    by_task = sum(line["cost"]["device_s"] for line in stored.content["tasks"])
    assert stored.content["probe_spent_device_s"] > 0
    assert by_task + stored.content["probe_spent_device_s"] == pytest.approx(stored.content["device_s"], abs=0.01)
    assert stored.content["cost"] == pytest.approx(stored.content["device_s"] * 0.002, abs=1e-5)
    assert stored.content["probe_cost"] == pytest.approx(stored.content["probe_spent_device_s"] * 0.002, abs=1e-5)
    assert code["cost"]["saved"]["low"] == pytest.approx(code["saved_device_s"]["low"] * 0.002)
    assert "EUR per million tokens" in stored.text


def changes_told(database: Database) -> list[tuple[str, str]]:
    stored = ReportStore(database).latest()
    return [(line["kind"], line["sentence"]) for line in stored.content["changes"]["lines"]]


def test_a_report_begins_with_what_changed(make: Make, database: Database, history: History, tmp_path: Path) -> None:
    scheduler = make()
    history.traffic("code", 0.85, 5, NOW - HOUR, MINUTE)
    scheduler.run_once(NOW)
    stored = ReportStore(database).latest()
    assert (stored.content["changes"]["since"], changes_told(database)) == (None, [])
    assert "This is the first report" in stored.text
    scheduler.run_once(NOW + MINUTE)
    stored = ReportStore(database).latest()
    assert f"Nothing changed since the report of {NOW:%Y-%m-%d %H:%M} UTC." in stored.text
    subject = DriftSubject("sql", "lookup", DRAFT, TARGET)
    opened = EventChange(None, EventState.OPENED, content(subject, "fault"), "It fell.")
    DriftEventStore(database).write([opened], NOW + 2 * MINUTE)
    DraftRegistry(database).register("lookup", DRAFT, TARGET)
    vanilla = Decision(Mode.VANILLA, None, None, 0, Reason.SHORT_OUTPUT, "")
    DecisionLog(database).record_change(BudgetSubject("code", TARGET, "cpu", "greedy"), 1, vanilla, "w")
    scheduler.run_once(NOW + 3 * MINUTE)
    told = changes_told(database)
    assert [kind for kind, _ in told] == ["flag", "draft", "choice"]
    assert "(fault) was opened." in told[0][1]
    assert "is new and active" in told[1][1]
    index = (tmp_path / "reports" / "index.html").read_text(encoding="utf-8")
    assert index.count("<a href=") == 3
    assert index.count('<span class="tag flag">1</span>') == 1, "one flag was open in the third"
    assert told[2][1] == "code was last decided to be decoded vanilla, before with lookup k=3."
    scheduler.run_once(NOW + 4 * MINUTE)
    assert changes_told(database) == []


def test_times_without_a_good_run_are_gaps(make: Make, database: Database, outbox: Sender) -> None:
    scheduler = make(interval_s=3600.0)
    scheduler.run_once(NOW - 9 * HOUR)
    outbox.refuses = True
    with pytest.raises(DeliveryFailed):
        scheduler.run_once(NOW - 5 * HOUR)
    outbox.refuses = False
    scheduler.run_once(NOW - HOUR)
    scheduler.run_once(NOW)
    stored = ReportStore(database).latest()
    (gap,) = stored.content["gaps"]
    assert [datetime.fromisoformat(gap[end]) for end in ("begins", "ends")] == [NOW - 9 * HOUR, NOW - HOUR]


def prompts(num: int) -> list[dict[str, object]]:
    return [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(num)]


def run_and_decode_probes(
    scheduler: Scheduler,
    database: Database,
    history: History,
    outbox: Sender,
    now: datetime,
    alpha: float,
    target: str = TARGET,
) -> None:
    """One run, and then a worker's answer to everything it sent."""
    outbox.sent.clear()
    scheduler.run_once(now)
    for topic, key, value in outbox.sent:
        if topic.startswith("jobs."):
            job = parse_job(value, Origin("c", topic, 0, 0), task=topic.removeprefix("jobs."))
            assert key.decode() == job.job_id
            history.decode_probe(
                job.job_id, job.task, job.probe_drafter, alpha, now + MINUTE, target=target, prompt=job.body.messages
            )


@pytest.mark.usefixtures("worker")
def test_probes_are_sent_once_in_pairs_and_again_when_old(
    make: Make, database: Database, history: History, outbox: Sender
) -> None:
    DraftRegistry(database).register("lookup", DRAFT, TARGET)
    register_probe_set(database, "code", prompts(6), NOW - 5 * DAY)
    register_probe_set(database, "unheard_of", prompts(2), NOW - 5 * DAY)
    scheduler = make(probe_prompts=3)
    start = NOW - 3 * DAY
    first = scheduler.run_once(start)
    jobs = [parse_job(value, Origin("c", "jobs.code", 0, 0), task="code") for value in outbox.on("jobs.code")]
    assert [job.purpose for job in jobs].count(Purpose.PROBE) == 3
    assert [job.purpose for job in jobs].count(Purpose.CONTROL) == 3
    assert {job.body.messages for job in jobs if job.purpose is Purpose.PROBE} == {
        job.body.messages for job in jobs if job.purpose is Purpose.CONTROL
    }
    assert all(job.body.temperature == 0 and job.deadline == start + HOUR / 2 for job in jobs)
    assert first.num_probes_sent == len(jobs) == 6
    assert not outbox.on("jobs.unheard_of")
    rows = database.rows(select(probe_runs))
    assert {row.job_id for row in rows} == {job.job_id for job in jobs}
    assert all(row.sent_at == start for row in rows)

    assert scheduler.run_once(start + MINUTE).num_probes_sent == 0, "they are under way"
    assert scheduler.run_once(start + HOUR).num_probes_sent == 6, "they expired undecoded"
    outbox.sent.clear()
    run_and_decode_probes(scheduler, database, history, outbox, start + 2 * HOUR, 0.8)
    assert scheduler.run_once(start + 20 * HOUR).num_probes_sent == 0, "fresh"
    assert scheduler.run_once(start + 27 * HOUR).num_probes_sent == 6, "a day old"


@pytest.mark.usefixtures("worker")
def test_only_what_a_live_worker_asks_is_probed_and_a_late_run_probes_once(
    make: Make, database: Database, history: History, outbox: Sender
) -> None:
    drafts, scheduler = DraftRegistry(database), make()
    register_probe_set(database, "code", prompts(2), NOW - 5 * DAY)
    for name in ("lookup", "small", "removed"):
        drafts.register(name, DRAFT, TARGET)
    drafts.set_retired("small", True)
    # The drafters are newer than the time at which the late run was due.
    now = datetime.now(UTC) + MINUTE
    assert scheduler.run_once(now, now - HOUR).num_probes_sent == 4
    jobs = [parse_job(value, Origin("c", "jobs.code", 0, 0), task="code") for value in outbox.on("jobs.code")]
    assert {job.probe_drafter for job in jobs} == {None, "lookup"}
    assert scheduler.run_once(now + 6 * SECOND).num_probes_sent == 0


@pytest.mark.usefixtures("worker")
def test_an_old_probe_is_repeated_by_scores_and_an_alarm_by_decoding(
    make: Make, database: Database, history: History, outbox: Sender
) -> None:
    DraftRegistry(database).register("lookup", DRAFT, TARGET, is_scorable=True)
    register_probe_set(database, "code", prompts(4), NOW - 5 * DAY)
    scheduler, start = make(), NOW - 3 * DAY
    run_and_decode_probes(scheduler, database, history, outbox, start, 0.8)
    assert len(outbox.on("jobs.code")) == 8, "new"
    outbox.sent.clear()
    assert scheduler.run_once(start + 25 * HOUR).num_probes_sent == 5, "a day old"
    jobs = [parse_job(value, Origin("c", "jobs.code", 0, 0), task="code") for value in outbox.on("jobs.code")]
    assert sorted(job.scored_drafters for job in jobs if job.purpose is Purpose.CONTROL) == [(), *[("lookup",)] * 3]
    stored = ReportStore(database).latest()
    (line,) = stored.content["probes"]
    assert (line["why"], line["num_probes"], line["num_scored"]) == ("age", 1, 3)
    assert "1 sent and 3 scored" in stored.text
    assert "1 + 3 scored" in stored.html

    subject = DriftSubject("code", "lookup", DRAFT, TARGET)
    opened = EventChange(None, EventState.OPENED, content(subject, "fault"), "It fell.")
    DriftEventStore(database).write([opened], start + 26 * HOUR)
    planner = ProbePlanner(database, Settings(tasks={"code": TaskSettings()}))
    (planned,) = planner.plan(planner.sets(), start + 27 * HOUR).measurements
    assert (planned.due.why, planned.num_decoded) == (Why.ALARM, 4)
    (planned,) = planner.plan(planner.sets(), start + 60 * HOUR).measurements
    assert planned.num_decoded == 4, "while the event is open"


@pytest.mark.usefixtures("worker")
def test_a_new_target_makes_the_draft_stale_and_its_recovery_active(
    make: Make, database: Database, history: History, outbox: Sender
) -> None:
    drafts = DraftRegistry(database)
    drafts.register("lookup", DRAFT, TARGET)
    register_probe_set(database, "code", prompts(8), NOW - 10 * DAY)
    scheduler = make(probe_prompts=8, probe_min_device_s=1000.0)
    start = NOW - 4 * DAY
    run_and_decode_probes(scheduler, database, history, outbox, start, 0.9)
    drafts.register("lookup", DRAFT, "target-2")
    run_and_decode_probes(scheduler, database, history, outbox, start + 25 * HOUR, 0.5, target="target-2")
    found = scheduler.run_once(start + 26 * HOUR)
    assert (found.num_events_opened, found.num_status_changes) == (1, 1)
    (event,) = DriftEventStore(database).open_events()
    assert (event.cause, event.state) == ("draft_stale", EventState.OPENED)
    assert "target model changed" in event.content.verdict
    assert drafts.stale("target-2") == {("lookup", DRAFT)}
    assert "lookup is stale" in found.headline
    assert drafts.stale(TARGET) == set(), "with the old target it was fine"
    run_and_decode_probes(scheduler, database, history, outbox, start + 50 * HOUR, 0.9, target="target-2")
    over = scheduler.run_once(start + 51 * HOUR)
    assert (over.num_events_closed, over.num_events_open, over.num_status_changes) == (1, 0, 1)
    assert {(d.target_revision, d.status) for d in drafts.all()} == {
        (TARGET, DraftStatus.ACTIVE),
        ("target-2", DraftStatus.ACTIVE),
    }


@pytest.mark.usefixtures("worker")
def test_a_refused_probe_is_forgotten_and_sent_by_a_later_run(make: Make, database: Database, outbox: Sender) -> None:
    DraftRegistry(database).register("lookup", DRAFT, TARGET)
    register_probe_set(database, "code", prompts(2), NOW - 5 * DAY)
    scheduler = make()
    outbox.refuses = True
    with pytest.raises(DeliveryFailed):
        scheduler.run_once(NOW - DAY)
    (failed,), unsent = database.rows(select(schedule_runs)), database.rows(select(probe_runs))
    assert failed.outcome["error"] == "delivery_failed"
    assert [row.sent_at for row in unsent] == [None] * 4
    outbox.refuses = False
    assert scheduler.run_once(NOW - DAY + HOUR).num_probes_sent == 4
    rows = database.rows(select(probe_runs))
    assert {row.sent_at for row in rows} == {NOW - DAY + HOUR}
