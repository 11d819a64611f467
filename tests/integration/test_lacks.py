"""Too few workers for the deadlines of batches: known before it hurts, notified, shown alike, and over with more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop import client as python_client
from alphaloop.batches.ends import OpenBatch
from alphaloop.batches.enough import Enough
from alphaloop.notifying import open_sinks
from alphaloop.settings import SchedulerSettings, Settings
from alphaloop.store.database import Database
from alphaloop.store.lacks import EndedBatchStore, LackStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.workers import WorkerLoad, WorkerStore
from alphaloop.wording import sentence as in_full
from scheduler.lacks import LASTS, Foreseeing
from scheduler.metrics import SchedulerMetrics
from scheduler.notifying import Notifier
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.console import PASSWORD, Visitor
from tests.fixtures.hook import Hook, running_hook
from tests.fixtures.messages import batch_line
from tests.fixtures.openai_api import client, create_key, served
from tests.fixtures.postgres import as_member, count
from tests.fixtures.runs import claim, decode_run, outcome, vanilla_counts
from tests.fixtures.worker import running_worker, until
from tests.integration.test_openai_batches import create
from tests.integration.test_worker_retries import UnluckyEngine
from tests.unit.alphaloop.test_batch_ends import NIGHT, NOW, decoded, night, situation

NOW_AT = datetime.fromtimestamp(NOW, UTC)
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
TARGET = "fake-1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kafka,
    pytest.mark.postgres,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("looks_often"),
]


@pytest.fixture
def hook() -> Iterator[Hook]:
    with running_hook() as running:
        yield running


def notifier(database: Database, hook: Hook, since: datetime, **settings: object) -> Notifier:
    dials = SchedulerSettings.model_validate(settings)
    made = Notifier(database, open_sinks([hook.url]), dials, SchedulerMetrics())
    made.add_sinks(since)
    return made


def jobs_took(database: Database, device_s: float, at: datetime, num: int = 10) -> None:
    """Jobs of the segment gold were decoded alone, each in so many seconds."""
    for number in range(num):
        claim(database, f"before-{number}", segment="gold")
        run = decode_run(vanilla_counts(4), segment="gold", device_s=device_s, at=at)
        recorded = outcome(f"before-{number}", run=replace(run, wall_s=device_s))
        assert OutcomeStore(database).record([recorded], owner="w")


def workers_run(database: Database, num: int) -> None:
    """So many workers were heard of just now."""
    for number in range(num):
        WorkerStore(database).say(WorkerLoad(f"w-{number}", "cpu", TARGET, 1, 0, 0, {}))


def requests(num: int) -> bytes:
    return "\n".join(json.dumps(batch_line(f"r-{n}", f"tell of {n}")) for n in range(num)).encode()


def test_a_lack_is_known_before_it_hurts_and_over_with_more_workers(
    worker_settings: Settings, database: Database, stack_cli: Cli, hook: Hook, tmp_path: Path
) -> None:
    """40 requests of a minute are due in half an hour, and a worker decodes them one by one."""
    key, now = create_key(database, "nightly", segment="gold", tasks=["code"]), datetime.now(UTC)
    jobs_took(database, 60.0, now - 2 * HOUR)
    metrics, telling = SchedulerMetrics(), notifier(database, hook, now)
    foreseeing = Foreseeing(database, worker_settings, metrics)

    def shown(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"alphaloop_scheduler_{name}", {"target": TARGET})

    with (
        served(worker_settings, tmp_path / "data", password=SecretStr(PASSWORD)) as url,
        client(url, key) as api,
    ):
        made = create(api, requests(40))
        until(lambda: database.scalar(text("SELECT num_sent FROM api_batches")) == 40, "all is sent")
        until_at = now + 35 * MINUTE
        database.change(text("UPDATE api_batches SET expires_at = :at"), {"at": until_at})
        workers_run(database, 1)
        first = foreseeing.look(now)
        assert (first.open_lacks, shown("open_lacks"), shown("devices_needed")) == ([], 0, 2)
        assert telling.send_due(now) == 0, "an autoscaler may still mend it"
        workers_run(database, 1)
        (lack,) = foreseeing.look(now + LASTS).open_lacks
        assert (lack.target, lack.segment, lack.num_due, lack.num_workers, lack.num_enough) == (
            TARGET,
            "gold",
            40,
            1,
            2,
        )
        assert 8 <= lack.num_late <= 16
        assert re.sub(r"^\d+", "…", lack.sentence) == (
            f"…% of the deadlines of batches of segment gold until {until_at:%Y-%m-%d %H:%M} UTC will be missed with 1 "
            f"worker of target {TARGET}; 2 are enough."
        )
        assert telling.send_due(now + LASTS) == 1
        assert hook.titles == [f"alphaloop: {TARGET}: too few workers for deadlines (segment gold)"]
        assert hook.taken[0]["message"].startswith(lack.sentence)
        workers_run(database, 1)
        foreseeing.look(now + LASTS + MINUTE)
        assert telling.send_due(now + LASTS + MINUTE) == 0, "it is no news that it lasts"
        (lack,) = LackStore(database).open()
        assert shown("open_lacks") == 1
        assert shown("late_share") == pytest.approx(lack.num_late / lack.num_due)
        visitor = Visitor(url)
        assert visitor.sign_in().status == 303
        assert lack.sentence in visitor.get("/batches").text
        status = stack_cli("status", "--json").json
        assert visitor.get("/batches.json").data["lacks"] == status["lacks"] == [lack.as_json()]
        assert lack.sentence in " ".join(stack_cli("status").err.split())
        for minute in range(2, 9):
            workers_run(database, 3)
            found = foreseeing.look(now + LASTS + minute * MINUTE)
        assert found.open_lacks == []
        assert telling.send_due(now + 20 * MINUTE) == 1
        assert hook.taken[-1]["title"] == f"alphaloop: {TARGET}: enough workers for deadlines (segment gold)"
        assert "will be met with 3 workers" in hook.taken[-1]["message"]
        assert made.id not in str(hook.taken)


def test_ends_of_batches_are_news_if_asked_for_without_any_console(
    worker_settings: Settings, database: Database, hook: Hook
) -> None:
    """Those of a producer, too: a lone leader counts them, and promises their ends."""
    now = datetime.now(UTC)
    settings = worker_settings
    foreseeing = Foreseeing(database, settings, SchedulerMetrics())
    with python_client.Client(settings) as ours:
        ours.submit([{"task": "code", "prompt": f"tell {n}"} for n in range(3)], batch_id="good")
        ours.submit([{"task": "code", "prompt": p} for p in ("tell", "bad one")], batch_id="mixed\u202e")
    with running_worker(settings, UnluckyEngine({"bad": 99})):
        until(lambda: count(database, "jobs") == 5, "all are claimed")
        foreseeing.look(now)
        until(lambda: count(database, "jobs WHERE finished_at IS NOT NULL") == 5, "all have ended")
    ended = {batch.batch_id: batch for batch in foreseeing.look(now + MINUTE).ended}
    ended |= {batch.batch_id: batch for batch in EndedBatchStore(database).since(now - HOUR)}
    assert {name: (batch.state, dict(batch.by_status)) for name, batch in ended.items()} == {
        "good": ("completed", {"succeeded": 3}),
        "mixed\u202e": ("completed", {"succeeded": 1, "failed": 1}),
    }
    assert foreseeing.look(now + 2 * MINUTE).ended == [], "each end is news once"
    for wanted, num in (("never", 0), ("failed", 1), ("always", 1)):
        assert notifier(database, hook, now, notify_batches=wanted).send_due(now + 3 * MINUTE) == num
    assert hook.titles == ["alphaloop: batch mixed\\u202e completed", "alphaloop: batch good completed"]
    assert [message["type"] for message in hook.taken] == ["warning", "success"]
    first, second, command = hook.taken[1]["message"].splitlines()
    end = ended["good"].ended_at
    assert first == f"3 succeeded; ended {end:%Y-%m-%d %H:%M} UTC."
    assert second == in_full(ended["good"].promise_in_words()), "promised or not, as the first job had ended or not"
    assert command == "alphaloop batch status good"


def test_a_leader_that_may_read_no_text_counts_batches_with_failed_jobs(
    worker_settings: Settings, database: Database, database_url: SecretStr, postgres_server: str
) -> None:
    now = datetime.now(UTC)
    with python_client.Client(worker_settings) as ours:
        ours.submit([{"task": "code", "prompt": p} for p in ("tell", "bad one")], batch_id="monday")
    with running_worker(worker_settings, UnluckyEngine({"bad": 99})):
        until(lambda: count(database, "jobs WHERE finished_at IS NOT NULL") == 2, "all have ended")
    with Database(as_member(postgres_server, database_url, "alphaloop_scheduler")) as seen_by_role:
        found = Foreseeing(seen_by_role, worker_settings, SchedulerMetrics()).look(now)
    assert [(batch.batch_id, batch.num_failed) for batch in found.ended] == [("monday", 1)]


def test_what_is_not_known_is_missing(worker_settings: Settings, database: Database) -> None:
    """Before a job has ended no number of workers is known; a look that fails shows none either."""
    metrics, now = SchedulerMetrics(), datetime.now(UTC)
    target = worker_settings.models.target.name

    def needed() -> float | None:
        return metrics.registry.get_sample_value("alphaloop_scheduler_devices_needed", {"target": target})

    foreseeing = Foreseeing(database, worker_settings, metrics)
    foreseeing.look(now)
    assert needed() == 0, "nothing waits, and nothing came"
    with python_client.Client(worker_settings) as ours:
        ours.submit([{"task": "code", "prompt": "tell"}])
    assert foreseeing.look(now).devices_needed == {target: None}
    assert needed() is None
    with running_worker(worker_settings, FakeEngine()):
        until(lambda: count(database, "jobs WHERE finished_at IS NOT NULL") == 1, "it has ended")
    assert foreseeing.look(datetime.now(UTC)).devices_needed == {target: 1}


def search(within: timedelta, num_open: float = 1000, num_workers: int = 1) -> Enough:
    """Requests of a second that are due then."""
    batch = replace(night(num_open), deadline_s=NOW + within.total_seconds())
    batches: list[OpenBatch] = [batch] if num_open else []
    return Enough(situation(*batches, lately=decoded(NIGHT), num_workers=num_workers), 3600.0)


def test_a_lack_opens_when_it_lasts_is_said_anew_when_it_doubles_and_closes_when_that_lasts(
    worker_settings: Settings, database: Database
) -> None:
    foreseeing, store = Foreseeing(database, worker_settings, SchedulerMetrics()), LackStore(database)
    near, nearer, far = (timedelta(seconds=s) for s in (900, 700, 5000))

    def keep(found: Enough, minute: float) -> None:
        foreseeing.keep_lacks({"large": found}, NOW_AT + minute * MINUTE)

    keep(search(near), 0)
    keep(search(far), 3)
    keep(search(near), 4)
    keep(search(near), 8)
    assert store.open() == [], "it lasted four minutes"
    keep(search(near), 9)
    (first,) = store.open()
    assert first.said_late == pytest.approx(0.1, abs=0.03)
    keep(search(nearer), 10)
    (doubled,) = store.open()
    assert doubled.said_late == pytest.approx(0.3, abs=0.03)
    assert (doubled.id != first.id, doubled.opened_at, doubled.said_at) == (
        True,
        first.opened_at,
        NOW_AT + 10 * MINUTE,
    )
    keep(search(near), 11)
    (less,) = store.open()
    assert (less.id, less.said_late, less.num_late < doubled.num_late) == (doubled.id, doubled.said_late, True)
    keep(search(far), 12)
    keep(search(near), 16)
    keep(search(far), 17)
    assert len(store.open()) == 1, "it came back meanwhile"
    keep(search(far), 22)
    assert store.open() == []
    keep(search(timedelta(seconds=5)), 23)
    keep(search(timedelta(seconds=5)), 28)
    (hopeless,) = store.open()
    assert "no number is enough, because a request alone takes longer" in hopeless.sentence
    keep(search(far, 0), 29)
    keep(search(far, 0), 34)
    assert store.open() == []
    assert database.scalar(text("SELECT closed_because FROM lacks ORDER BY closed_at DESC LIMIT 1")) == (
        "No request of batches of segment night is due within a day any more."
    )
