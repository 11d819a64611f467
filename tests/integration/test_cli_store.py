"""The commands that read and write Postgres, on a real one, and `status` with a real Kafka beside it."""

from __future__ import annotations

import json
import math
import random
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from rich.console import Console
from sqlalchemy import text

from alphaloop.cli.status import task_table
from alphaloop.cost import CostPoint
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.goodput import Alternative
from alphaloop.kafka.backlog import backlog
from alphaloop.kafka.producer import Producer
from alphaloop.kafka.topics import ensure_topics
from alphaloop.measurements import DriftSubject
from alphaloop.messages import Mode
from alphaloop.messages.topics import jobs_topic
from alphaloop.settings import KafkaSettings
from alphaloop.store.costs import CostStore
from alphaloop.store.database import Database
from alphaloop.store.decisions import DecisionLog
from alphaloop.store.drafts import DraftRegistry
from alphaloop.store.drift_events import DriftEventStore, EventChange, EventState
from alphaloop.store.expectations import ExpectationStore
from alphaloop.store.integrity import check
from alphaloop.store.jobs import JobStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.overview import Overview
from alphaloop.store.partitions import PartitionKeeper
from alphaloop.store.reports import ReportStore, StoredReport
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.switchback.expectation import Expected
from alphaloop.switchback.task_speedup import TaskSpeedup
from alphaloop.switchback.wording import control, figure, load, reason_word, sentence
from scheduler.facts import SentProbes
from scheduler.metrics import EXPECTATION, SPEEDUP, SchedulerMetrics
from scheduler.report.data import MeasuredLine, Report, TaskLine
from scheduler.report.expectation_lines import expectation_lines
from scheduler.report.page import render_page
from scheduler.report.text import render_text
from tests.fixtures.cli import Cli
from tests.fixtures.drift_events import content
from tests.fixtures.history import record_runs
from tests.fixtures.runs import (
    DEVICE,
    ENGINE,
    TARGET,
    claim_request,
    decode_run,
    outcome,
    simulated_counts,
    vanilla_counts,
)
from tests.fixtures.slices import block_rows, subject

pytestmark = pytest.mark.postgres


@pytest.fixture
def environment(database_url: SecretStr, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url.get_secret_value())
    monkeypatch.setenv("ALPHALOOP_DATA_DIR", str(tmp_path))


@pytest.fixture
def decoded(database: Database, rng: random.Random) -> Database:
    """A calibrated engine, and twelve jobs of `code`: eight speculative, four vanilla."""
    drafters = {"lookup": "draft-1"}
    points = [CostPoint(None, batch, width, 40.0 + width, 5) for batch in (1, 4) for width in (1, 4, 9)]
    points += [CostPoint("lookup", batch, width, 0.1, 5) for batch in (1, 4) for width in (4, 9)]
    CostStore(database).save("a-host", DEVICE, ENGINE, TARGET, drafters, points)
    DraftRegistry(database).register("lookup", "draft-1", TARGET)
    PartitionKeeper(database).ensure(datetime.now(UTC), 2)
    for i in range(12):
        fast = i < 8
        run = decode_run(
            simulated_counts(rng, [0.9, 0.8, 0.7], 20) if fast else vanilla_counts(40),
            mode=Mode.SPECULATIVE if fast else Mode.VANILLA,
        )
        job_id = f"job-{i}"
        JobStore(database).claim([claim_request(job_id)], owner="w", lease_s=60, max_attempts=3)
        OutcomeStore(database).record([outcome(job_id, run=run)], owner="w")
    return database


def test_migrate(cli: Cli, empty_database_url: SecretStr, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database_url.get_secret_value())
    assert cli("migrate", "--check").code == 1
    before = cli("report")
    assert (before.code, "hint: alphaloop migrate" in before.err) == (1, True)
    ran = cli("migrate", "--json")
    assert ran.code == 0
    assert ran.json["from"] is None
    head = ran.json["to"]
    assert cli("migrate", "--check").code == 0
    assert cli("migrate", "--json").json == {"from": head, "to": head}
    wrong = cli("migrate", "--revision", "nonesuch")
    assert (wrong.code, "error: " in wrong.err) == (1, True)


def test_report(cli: Cli, environment: None, database: Database, tmp_path: Path) -> None:
    none = cli("report")
    assert (none.code, none.err.splitlines()[0]) == (1, "error: there is no report yet")
    now = datetime.now(UTC)
    ReportStore(database).save(
        StoredReport(
            now, now - timedelta(days=1), now, "All is well.", {"tasks": []}, "All is [well].\n", "<p>well</p>"
        )
    )
    assert cli("report").out.strip() == "All is [well]."
    assert "this report is old" not in cli("report").err
    assert cli("report", "--json").json["summary"] == "All is well."
    assert cli("report", "--html", "-").out == "<p>well</p>"
    page = tmp_path / "page.html"
    assert page.as_uri() in cli("report", "--html", page).err
    assert page.read_text() == "<p>well</p>"
    assert cli("report", "--html", tmp_path / "none" / "page.html").code == 1


def test_a_report_says_that_it_is_old(cli: Cli, environment: None, database: Database) -> None:
    now = datetime.now(UTC)
    for due, is_old in ((now - timedelta(minutes=1), True), (now + timedelta(hours=1), False)):
        content = {"next_due": due.isoformat()}
        ReportStore(database).save(StoredReport(now, now - timedelta(days=1), now, "Well.", content, "Well.\n", ""))
        assert ("this report is old" in cli("report").err) is is_old


def test_an_owner_accepts_a_new_level(cli: Cli, environment: None, database: Database) -> None:
    said = content(DriftSubject("code", "small", "draft-1", "target-1"), "draft_stale")
    store = DriftEventStore(database)
    store.write([EventChange(None, EventState.OPENED, said, said.verdict)], datetime.now(UTC))
    (event,) = store.open_events()
    done = cli("drift", "ack", event.id, "--by", "Ada", "--new-level", "--note", "so be it")
    assert (done.code, f"event {event.id} is closed" in done.err) == (0, True)
    shown = cli("drift", "show", event.id, "--json").json
    assert (shown["state"], shown["closed_because"]) == ("closed", "accepted as the new level: so be it")
    assert shown["accepted_at"] is not None
    assert "closed by Ada (draft stale): accepted as the new level: so be it" in cli("drift", "show", event.id).out
    assert cli("drift", "ack", event.id, "--by", "Ada", "--new-level").code == 1


def test_drift(cli: Cli, environment: None, database: Database) -> None:
    assert "no drift is open" in cli("drift", "list").err
    assert cli("drift", "list", "--json").json == []
    said = content(DriftSubject("code", "small", "draft-1", "target-1"), "draft_stale", lost_tokens_per_s=41.7)
    now = datetime.now(UTC)
    store = DriftEventStore(database)
    store.write([EventChange(None, EventState.OPENED, said, said.verdict)], now)
    (event,) = cli("drift", "list", "--json").json
    assert (event["cause"], event["state"], event["task"], event["lost_tokens_per_s"]) == (
        "draft_stale",
        "opened",
        "code",
        41.7,
    )
    number = event["id"]
    assert "41.7 tokens/s" in cli("drift", "list").out
    acknowledged = cli("drift", "ack", number, "--by", "Ada", "--note", "in training")
    assert (acknowledged.code, f"Ada has taken note of event {number}" in acknowledged.err) == (0, True)
    shown = cli("drift", "show", number, "--json").json
    assert (shown["state"], shown["note"]) == ("acknowledged", "in training")
    assert [state["actor"] for state in shown["history"]] == ["scheduler", "Ada"]
    told = cli("drift", "show", number).out
    assert "acknowledged by Ada (draft stale): in training" in told
    assert "Train it." in told
    (stored,) = store.open_events()
    store.write([EventChange(stored.id, EventState.CLOSED, said, "It is back.")], now)
    assert cli("drift", "list", "--json").json == []
    assert [event["closed_because"] for event in cli("drift", "list", "--since", "1d", "--json").json] == [
        "It is back."
    ]
    for wrong in (("show", number + 1), ("ack", number, "--by", "Ada"), ("ack", number, "--by", " ")):
        failed = cli("drift", *wrong)
        assert (failed.code, "hint: " in failed.err) == (1, True)


def test_probe_sets(cli: Cli, environment: None, tmp_path: Path) -> None:
    assert cli("probes", "list", "--json").json == []
    file = tmp_path / "probes.jsonl"
    file.write_text("".join(json.dumps({"id": i, "task": "code", "prompt": f"p {i}"}) + "\n" for i in range(3)))
    assert cli("probes", "register", file, "--task", "code").code == 0
    (found,) = cli("probes", "list", "--json").json
    assert (found["task"], found["num_prompts"]) == ("code", 3)
    assert cli("probes", "register", file, "--task", "code").code == 0
    assert cli("probes", "list", "--json").json == [found]
    assert found["version"] in cli("probes", "list").out
    stranger = cli("probes", "register", file, "--task", "sql")
    assert (stranger.code, "found some of code" in stranger.err) == (1, True)
    file.write_text('{"prompt": 3}\n')
    assert cli("probes", "register", file, "--task", "code").code == 1
    assert cli("probes", "list", "--json").json == [found]


def test_versions_of_a_probe_set_are_compared_without_their_texts(cli: Cli, environment: None, tmp_path: Path) -> None:
    file = tmp_path / "probes.jsonl"
    for texts in (["secret one", "secret two"], ["secret two", "secret three"]):
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        assert cli("probes", "register", file, "--task", "code", "--k", 4).code == 0
    now, before = cli("probes", "list", "--task", "code", "--json").json
    assert [(one["in_use"], one["num_draft_tokens"], one["source"]) for one in (now, before)] == [
        (True, 4, "file"),
        (False, 4, "file"),
    ]
    shown = cli("probes", "show", "code", "--against", before["version"])
    assert "1 prompts in both, 1 only here, 1 only there" in shown.err
    assert "secret" not in shown.out + shown.err
    lines = cli("probes", "show", "code", "--against", before["version"], "--json").json["prompts"]
    assert sorted(line["is_shared"] for line in lines) == [False, True]
    assert cli("probes", "show", "code", "--version", "unheard-of").code == 1
    assert cli("probes", "show", "sql").code == 1


def test_the_plan_of_the_next_probes(cli: Cli, environment: None, decoded: Database, tmp_path: Path) -> None:
    assert "no task has a probe set" in cli("probes", "plan").err
    file = tmp_path / "probes.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert cli("probes", "register", file, "--task", "code").code == 0
    planned = cli("probes", "plan", "--json").json
    (one,) = planned["measurements"]
    assert (one["task"], one["drafter"], one["why"], one["num_prompts"]) == ("code", "lookup", "new", 2)
    assert one["is_sent"]
    assert one["device_s"] <= planned["budget_device_s"]
    ran = cli("probes", "plan")
    assert "the next run sends 1 of 1 measurements" in ran.err
    assert "lookup" in ran.out


def test_explain_decides_as_a_worker_would(cli: Cli, environment: None, decoded: Database) -> None:
    ran = cli("explain", "code", "--json")
    assert ran.code == 0
    told = ran.json
    assert told["posteriors"]["lookup"]["jobs"] == pytest.approx(8, abs=0.1)
    decision = told["decision"]
    assert (decision["mode"], decision["drafter"], decision["reason"]) == ("speculative", "lookup", "faster")
    best = decision["alternatives"][0]
    assert best["speedup"] > 2
    assert best["speedup_low"] <= best["speedup"] <= best["speedup_high"]
    shown = cli("explain", "code").out
    assert shown.startswith(f"code: lookup k={decision['num_draft_tokens']} (expected faster)"), "nothing was measured"
    assert "vanilla" in shown
    # Counts and figures stand beside each other: what is believed lies within its bounds, what was seen adds up.
    inferred = told["posteriors"]["lookup"]
    assert sum(inferred["borrowed"].values()) == pytest.approx(1)
    assert inferred["borrowed"]["same_jobs"] > 0.5
    assert all(
        low <= mean <= high
        for low, mean, high in zip(
            inferred["acceptance_low"], inferred["acceptance"], inferred["acceptance_high"], strict=True
        )
    )
    assert (told["measured"]["all"]["num_jobs"], told["measured"]["speedup"]) == (12, None)
    cold = cli("explain", "sql", "--json").json
    assert cold["decision"]["reason"] == "no_history"
    assert cold["posteriors"]["lookup"]["jobs"] == 0
    unknown = cli("explain", "nonesuch")
    assert (unknown.code, "code" in unknown.err.splitlines()[1]) == (1, True)


def test_explain_as_of_an_earlier_time(cli: Cli, environment: None, decoded: Database, rng: random.Random) -> None:
    """Vanilla before the drafter's good days, speculative after them; what came later is not seen."""
    now = datetime.now(UTC)
    with decoded.begin() as connection:
        connection.execute(text("UPDATE draft_revisions SET registered_at = now() - interval '9 days'"))
    runs = [
        decode_run(simulated_counts(rng, [alpha] * 3, 20), task="math", at=now - timedelta(days=days, minutes=i))
        for days, alpha in ((6, 0.0), (2, 0.97))
        for i in range(20)
    ]
    for number, run in enumerate(sorted(runs, key=lambda run: run.decoded_at)):
        record_runs(decoded, {f"m{number}": run})
    bad, good, none = (cli("explain", "math", "--at", ago, "--json").json for ago in ("5d", "1d", "8d"))
    assert (bad["decision"]["mode"], good["decision"]["mode"]) == ("vanilla", "speculative")
    # A day old each; what the good days contradict is forgotten.
    assert all(10 < then["posteriors"]["lookup"]["seen"]["jobs"] < 25 for then in (bad, good))
    assert bad["posteriors"]["lookup"]["acceptance"][0] < 0.2
    assert good["posteriors"]["lookup"]["acceptance"][0] > 0.6
    assert none["posteriors"]["lookup"]["jobs"] == 0
    assert (bad["measured"]["all"]["num_jobs"], good["measured"]["all"]["num_jobs"]) == (20, 40)
    assert "The evidence is rebuilt" in cli("explain", "math", "--at", "1d").out
    assert "no job of this task yet" in cli("explain", "sql", "--at", "1d").out


def test_explain_says_what_was_measured_and_why_the_choice_changed(
    cli: Cli, environment: None, decoded: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens for one and a half vanilla rounds."""
    slices, now = SwitchbackStore(decoded), datetime.now(UTC)
    slices.add(block_rows(subject("code"), now - timedelta(minutes=5), 12))
    slices.refresh(now)
    ways = (Alternative("lookup", 3, 2.5, 50.0, 2.1, 1.9, 2.4), Alternative(None, 0, 1.0, 41.0, 1.0, 1.0, 1.0))
    chosen = Decision(Mode.SPECULATIVE, "lookup", "draft-1", 3, Reason.FASTER, "2.10x vanilla expected", ways)
    DecisionLog(decoded).record_change("code", TARGET, DEVICE, "greedy", 4, chosen, "w")
    measured = cli("explain", "code", "--json").json["measured"]
    assert measured["speedup"]["speedup"]["mean"] == pytest.approx(2.0, rel=0.01)
    assert (measured["speedup"]["verdict"], measured["all"]["num_jobs"]) == ("faster", 12)
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = cli("explain", "code").out
        assert max(map(len, shown.splitlines())) <= width
        told = " ".join(shown.split())
        assert "(lookup, k 4, 4.0 running; 12 blocks of control rounds, 5.3% of the time): faster." in told
        assert "nothing → lookup k=3 (expected faster; batch 4, greedy)" in told
        assert "lookup k=3 2.10x (1.90 to 2.40), vanilla 1; from 8 jobs" in told


def test_five_screens_agree_about_the_measured_speed_up(cli: Cli, environment: None, decoded: Database) -> None:
    """The view, status, the report, explain and metrics; and explain of an hour ago, when there was no verdict."""
    slices, now = SwitchbackStore(decoded), datetime.now(UTC)
    slices.add(block_rows(subject("code"), now - timedelta(minutes=90), 3))
    slices.add(block_rows(subject("code"), now - timedelta(minutes=5), 12, cost=2.0))
    slices.refresh(now)
    with decoded.begin() as connection:
        view = connection.execute(text("SELECT speedup, speedup_low, speedup_high FROM task_speedup_now")).one()
    expected = dict(zip(("mean", "low", "high"), view, strict=True))
    explained = cli("explain", "code", "--json").json["measured"]["speedup"]
    (status,) = Overview(decoded).tasks_now()
    assert explained["speedup"] == status.as_json(None)["measured"]["speedup"] == expected
    console = Console(width=110)
    with console.capture() as printed:
        console.print(task_table([status], None))
    assert figure(status.measured) in printed.get()
    assert load(status.measured) in printed.get()
    assert control(status.measured) in printed.get()
    shown = slices.shown(now)["code"]
    assert sentence("lookup", shown) in " ".join(cli("explain", "code").out.split())
    report = report_of("code", shown)
    assert sentence("lookup", shown) in " ".join(render_text(report).split())
    with decoded.begin() as connection:
        row = connection.execute(text("SELECT * FROM task_speedup_now")).mappings().one()
    metrics = SchedulerMetrics()
    metrics.run_succeeded(report, SentProbes())
    of_metrics = {
        "ratio": "speedup",
        "low": "speedup_low",
        "high": "speedup_high",
        "blocks": "num_blocks",
        "min_draft_tokens": "min_num_draft_tokens",
        "max_draft_tokens": "max_num_draft_tokens",
        "mean_running": "mean_running",
        "control_share": "control_share",
    }
    labels = {"task": "code", "drafter": "lookup"}
    for name, column in of_metrics.items():
        found = metrics.registry.get_sample_value(f"alphaloop_scheduler_speedup_{name}", labels)
        assert found == row[column], name
    then = cli("explain", "code", "--at", "1h", "--json").json["measured"]["speedup"]
    assert (then["speedup"], then["num_blocks"], then["verdict"]) == (None, 3, "no_verdict_yet")
    told = " ".join(cli("explain", "code", "--at", "1h").out.split())
    assert "No verdict yet (lookup, k 4, 4.0 running; 3 blocks of control rounds, 5.3% of the time)" in told


def report_of(task: str, measured: TaskSpeedup) -> Report:
    line = TaskLine(
        task=task,
        num_jobs=12,
        mode="speculative",
        drafter="lookup",
        num_draft_tokens=4,
        reason="faster",
        num_speculative_jobs=12,
        measured=MeasuredLine.of(measured),
    )
    at = measured.computed_at
    return Report(created_at=at, covers_from=at, covers_to=at, headline="", tasks=(line,))


def test_without_a_verdict_all_screens_say_what_is_missing(cli: Cli, environment: None, decoded: Database) -> None:
    slices, now = SwitchbackStore(decoded), datetime.now(UTC)
    slices.add(block_rows(subject("code"), now - timedelta(minutes=5), 3))
    slices.refresh(now)
    shown = slices.shown(now)["code"]
    assert figure(shown) == "no verdict yet (3 of 8 blocks)"
    (status,) = Overview(decoded).tasks_now()
    assert figure(status.measured) == figure(shown)
    assert sentence("lookup", shown) in " ".join(render_text(report_of("code", shown)).split())
    metrics = SchedulerMetrics()
    metrics.run_succeeded(report_of("code", shown), SentProbes())
    labels = {"task": "code", "drafter": "lookup"}
    values = {n: metrics.registry.get_sample_value(f"alphaloop_scheduler_speedup_{n}", labels) for n in SPEEDUP}
    assert {name for name, value in values.items() if value is None} == {"ratio", "low", "high"}
    assert values["blocks"] == 3


def test_a_table_calls_faster_only_what_was_measured_or_is_expected_beyond_doubt(decoded: Database) -> None:
    assert reason_word("faster", "faster") == "faster"
    assert reason_word("faster", "slower") == "expected faster, measured slower"
    assert reason_word("faster", "no_verdict_yet") == reason_word("faster", None) == "expected faster"
    assert reason_word("not_faster", None) == "not faster"
    for low, word in ((1.9, "faster"), (0.97, "not_surely_faster")):
        ways = (Alternative("lookup", 3, 2.5, 50.0, 1.01, low, 2.4), Alternative(None, 0, 1.0, 41.0, 1.0, 1.0, 1.0))
        chosen = Decision(Mode.SPECULATIVE, "lookup", "draft-1", 3, Reason.FASTER, "expected", ways)
        DecisionLog(decoded).record_change(f"task-{word}", TARGET, DEVICE, "greedy", 4, chosen, "w")
        with decoded.begin() as connection:
            asked = text("SELECT reason FROM decision_log WHERE task = :task")
            assert connection.execute(asked, {"task": f"task-{word}"}).scalar_one() == word


def test_no_screen_says_faster_beside_a_measured_loss(cli: Cli, environment: None, decoded: Database) -> None:
    """Status, the report's text and page, and explain; the demo's table has its own test, as has `measure`."""
    slices, now = SwitchbackStore(decoded), datetime.now(UTC)
    slices.add(block_rows(subject("code"), now - timedelta(minutes=5), 12, cost=4.0))
    slices.refresh(now)
    shown = slices.shown(now)["code"]
    assert shown.verdict == "slower"
    ways = (Alternative("lookup", 3, 2.5, 50.0, 1.6, 1.4, 1.9), Alternative(None, 0, 1.0, 41.0, 1.0, 1.0, 1.0))
    chosen = Decision(Mode.SPECULATIVE, "lookup", "draft-1", 3, Reason.FASTER, "expected", ways)
    DecisionLog(decoded).record_change("code", TARGET, DEVICE, "greedy", 4, chosen, "w")
    (status,) = Overview(decoded).tasks_now()
    console = Console(width=140)
    with console.capture() as printed:
        console.print(task_table([status], None))
    report = report_of("code", shown)
    explained = cli("explain", "code").out
    assert "lookup" in explained.splitlines()[0], "explain chose the drafter"
    for screen in (printed.get(), render_text(report), render_page(report), explained):
        words = " ".join(screen.split())
        assert "expected faster, measured slower" in words
        assert re.findall(r"\bfaster\b", re.sub(r"expected faster|not (surely )?faster", "", words)) == []


def test_all_screens_tell_alike_how_reliable_expectations_were(
    cli: Cli, environment: None, decoded: Database, kafka_broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka_broker)
    slices, now = SwitchbackStore(decoded), datetime.now(UTC)
    for minutes, speedup in ((30, 2.02), (20, 2.4), (10, 2.5)):
        expected = Expected(speedup, 0.9 * speedup, 1.1 * speedup, speedup, 0.03)
        begin = now - timedelta(minutes=minutes)
        slices.add(block_rows(subject("code"), begin, 8, expected=expected))
        slices.refresh(begin + timedelta(minutes=1))
    compared = cli("status", "--json").json["expectations"]
    (code,) = compared
    assert (code["task"], code["drafter"], code["num_pairs"], code["num_held"]) == ("code", "lookup", 3, 1)
    told = " ".join(cli("status").out.split())
    assert "1 of 3 intervals held the measured one (code 1 of 3 with lookup)" in told
    explained = cli("explain", "code", "--json").json
    assert explained["measured"]["expectations"] == compared
    words = " ".join(cli("explain", "code").out.split())
    assert "Expected speed-ups of lookup (k 4, 4.0 running): 1 of 3 intervals held" in words
    best = next(way for way in explained["decision"]["alternatives"] if way["drafter"])
    assert best["error"] == explained["posteriors"]["lookup"]["expectation_error"]
    assert best["error"]["bias"] < 0
    assert f"corrected by {math.exp(best['error']['bias']):.2f}x" in words
    earlier = cli("explain", "code", "--at", "25m", "--json").json
    assert [one["num_pairs"] for one in earlier["measured"]["expectations"]] == [1]
    lines = expectation_lines(ExpectationStore(decoded).shown(datetime.now(UTC)))
    report = report_of("code", slices.shown(now)["code"]).model_copy(update={"expectations": lines})
    assert "code: Expected speed-ups of lookup (k 4, 4.0 running): 1 of 3" in " ".join(render_text(report).split())
    metrics = SchedulerMetrics()
    metrics.run_succeeded(report, SentProbes())
    with decoded.begin() as connection:
        view = connection.execute(text("SELECT num_pairs, num_held, ratio FROM expectation_now")).one()
    labels = {"task": "code", "drafter": "lookup"}
    of_metrics = {
        name: metrics.registry.get_sample_value(f"alphaloop_scheduler_expectation_{name}", labels)
        for name in EXPECTATION
    }
    assert of_metrics == {"pairs": 3, "held_share": 1 / 3, "ratio": pytest.approx(code["ratio"])}
    assert (view.num_pairs, view.num_held, view.ratio) == (3, 1, pytest.approx(code["ratio"]))


def test_explain_says_whose_rounds_count_for_a_drafter(
    cli: Cli, environment: None, decoded: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = tmp_path / "pair"
    configs.mkdir()
    dials = {"plain": "", "gated": "min_probability = 0.6", "branching": "num_branches = 2"}
    (configs / "models.toml").write_text(
        "".join(
            f'[models.drafters.{name}]\nmethod = "draft_model"\nsource = "small"\n{dial}\n'
            for name, dial in dials.items()
        )
    )
    monkeypatch.setenv("ALPHALOOP_CONFIGS", str(configs))
    for name in dials:
        DraftRegistry(decoded).register(name, f"{name}-1", TARGET)
    told = " ".join(cli("explain", "code").out.split())
    assert "Rounds of gated count for plain too, because the weights are the same. " in told
    assert told.count("because the weights are the same") == 2


WRONG_EXPLAINS = [
    (("--at", "soon"), "--at: expected a time, found 'soon'"),
    (("--at", "2999-01-01"), "--at: expected a time in the past"),
    (("--at", "1e400d"), "--at: expected a time, found"),
    (("--sampling", "hot"), "--sampling: expected a sampling bucket, found 'hot'"),
]


def test_explain_refuses_what_cannot_be_asked(cli: Cli, environment: None) -> None:
    for arguments, told in WRONG_EXPLAINS:
        ran = cli("explain", "code", *arguments)
        assert (ran.code, ran.out) == (1, ""), arguments
        assert told in ran.err


def test_replay_decides_history_again_and_writes_nothing(cli: Cli, environment: None, decoded: Database) -> None:
    def everything() -> list[object]:
        with decoded.begin() as connection:
            tables = connection.execute(
                text("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
            ).scalars()
            rows = "SELECT count(*), sum(hashtextextended(t::text, 0)) FROM "
            return [connection.execute(text(f'{rows} "{name}" AS t')).one() for name in tables.all()]

    before = everything()
    ran = cli("replay", "--set", "tasks.code.decoding=vanilla", "--json")
    assert ran.code == 0
    assert everything() == before
    told = ran.json
    (code,) = told["tasks"].values()
    assert (code["num_jobs"], code["num_same_jobs"]) == (12, 4)
    assert told["reasons"] == {"forced": 12}
    assert 1 < code["ratio"]["low"] <= code["ratio"]["mean"] <= code["ratio"]["high"]
    assert {way["would"]["drafter"] for way in code["ways"]} == {None}
    assert sum(way["num_tokens"] for way in code["ways"]) == code["num_tokens"]
    assert code["measured_s"] == pytest.approx(12 * 0.5)
    assert told["total"] == code
    no_trials = cli("replay", "--set", "policy.explore_share=0.0", "--json").json
    assert {"exploring", "control"}.isdisjoint(no_trials["reasons"])


def test_replay_with_another_folder_of_settings(
    cli: Cli, environment: None, decoded: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its only drafter everything is vanilla; what was drafted is compared all the same."""
    configs = tmp_path / "to-be"
    configs.mkdir()
    (configs / "models.toml").write_text("[models]\ndrafters = {}\n")
    for width in (80, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        ran = cli("replay", "--configs", configs, "--task", "code", "--since", "2h")
        assert ran.code == 0
        assert max(map(len, ran.out.splitlines())) <= width
        assert "Reasons: no drafter 12 jobs." in ran.out
        assert "It would have cost" in ran.out


WRONG_REPLAYS = [
    (("--task", "nonesuch"), "no task 'nonesuch'"),
    (("--task", "sql"), "found no job of sql in that time"),
    (("--since", "soon"), "--since: expected a time, found 'soon'"),
    (("--since", "1d", "--until", "2d"), "--since: expected a time before --until"),
    (("--until", "3d"), "found no job in that time; they are from "),
    (("--set", "policy.explor=1"), "did you mean explore_share?"),
    (("--set", "polcy.explore_share=1"), "did you mean policy?"),
    (("--set", "policy.explore_share=many"), "policy.explore_share: "),
    (("--set", "policy.explore_share"), "expected a setting and its value"),
    (("--set", "policy.explore_share.x=1"), "policy.explore_share.x: no such setting"),
    (("--set", "worker.batch_size=8"), "worker.batch_size: no decision of the past depends on it"),
    (("--configs", "/nonesuch"), "expected a folder of TOML files"),
]


def test_replay_refuses_what_cannot_be_asked(cli: Cli, environment: None, decoded: Database) -> None:
    for arguments, told in WRONG_REPLAYS:
        ran = cli("replay", *arguments)
        assert (ran.code, ran.out) == (1, ""), arguments
        assert told in ran.err


def test_replay_without_history(cli: Cli, environment: None) -> None:
    assert "found no job in that time" in cli("replay").err


def test_explain_before_any_calibration(cli: Cli, environment: None) -> None:
    ran = cli("explain", "code")
    assert (ran.code, ran.err.splitlines()[0]) == (1, "error: no worker has measured its device yet")


@pytest.mark.kafka
def test_status(
    cli: Cli,
    environment: None,
    decoded: Database,
    clean_kafka: KafkaSettings,  # jobs that wait for other tests would take width from the table
    kafka_broker: str,
    fresh_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka_broker)
    monkeypatch.setenv("ALPHALOOP_KAFKA__GROUP_ID", fresh_prefix)
    ensure_topics(clean_kafka, [fresh_prefix])
    producer = Producer(clean_kafka)
    for _ in range(3):
        producer.send(jobs_topic(fresh_prefix), key=None, value=b"{}")
    producer.flush(10)
    producer.close()
    assert backlog(clean_kafka.model_copy(update={"group_id": fresh_prefix}))[fresh_prefix] == 3
    ran = cli("status", "--json")
    assert ran.code == 0
    by_task = {task["task"]: task for task in ran.json["tasks"]}
    assert by_task["code"]["jobs"] == {"succeeded": 12}
    with decoded.begin() as connection:
        seen = connection.execute(text("SELECT sum(accepts[1]), sum(trials[1]) FROM decode_runs")).one()
    alpha_1 = by_task["code"]["alpha_1"]
    assert alpha_1["mean"] == pytest.approx(int(seen[0]) / int(seen[1]))
    assert alpha_1["low"] < alpha_1["mean"] <= alpha_1["high"] <= 1
    assert by_task["code"]["measured"] is None, "the task was on no trial"
    assert by_task[fresh_prefix]["waiting"] == 3
    monkeypatch.setenv("COLUMNS", "100")
    shown = cli("status").out
    assert max(map(len, shown.splitlines())) <= 100
    assert "12 succeeded" in shown
    assert ":***@" in shown


def test_integrity_finds_what_does_not_hold(decoded: Database) -> None:
    found = check(decoded)
    assert (found.num_jobs, found.num_outcomes, found.num_succeeded, found.num_decoded_once) == (12, 12, 12, 12)
    assert found.num_wrong_counts == 0
    JobStore(decoded).claim([claim_request("running")], owner="w", lease_s=60, max_attempts=3)
    assert not check(decoded).holds
