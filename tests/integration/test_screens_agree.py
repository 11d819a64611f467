"""One measured speed-up on every screen: the view, status, explain, the report and metrics say the same of it."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import SecretStr
from rich.console import Console
from sqlalchemy import text

from alphaloop.acceptance import Interval
from alphaloop.as_decoded import NextJob
from alphaloop.cli.status import task_table
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.goodput import Alternative, DrafterState
from alphaloop.deciding.snapshot import SessionFacts, Snapshot
from alphaloop.engine import HeldRequests
from alphaloop.experiment.estimate import Verdict
from alphaloop.experiment.figures import TaskSpeedup
from alphaloop.experiment.observe import Expected
from alphaloop.experiment.wording import judged, why
from alphaloop.explaining.explanation import AsAWorker, ExplainRequest, tasks_now
from alphaloop.messages import Mode
from alphaloop.server_identity import SERVERS
from alphaloop.settings import load_settings
from alphaloop.store.database import Database
from alphaloop.store.decisions import BudgetSubject, DecisionLog
from alphaloop.store.switchback import ExpectationStore, SwitchbackStore
from alphaloop.store.workers import WorkerLoad, WorkerSetup, WorkerStore
from scheduler.metrics import EXPECTATION, SchedulerMetrics
from scheduler.probing import SentProbes
from scheduler.report.build import expectation_lines
from scheduler.report.data import DriftReport, MeasuredLine, TaskLine
from scheduler.report.pages import render_page, render_text
from tests.fixtures.broker import limit_requests
from tests.fixtures.cli import Cli
from tests.fixtures.console import console
from tests.fixtures.deciding import keep_snapshot
from tests.fixtures.reports import empty
from tests.fixtures.runs import DEVICE, TARGET, DecodedJobs, block_rows, choose, shown_speedup, subject, task_speedup
from tests.fixtures.worker import until

pytestmark = pytest.mark.postgres


def test_metrics_and_explain_of_an_hour_ago_agree_with_the_view(
    cli: Cli, cli_environment: None, twelve_jobs: Database
) -> None:
    """Metrics have every column of the view. An hour ago there was no verdict, which is what explain says of it."""
    slices, now = SwitchbackStore(twelve_jobs), datetime.now(UTC)
    slices.add(block_rows(subject("code"), now - timedelta(minutes=90), 3))
    slices.add(block_rows(subject("code"), now - timedelta(minutes=5), 12, cost=2.0))
    slices.refresh(now)
    with twelve_jobs.begin() as connection:
        row = connection.execute(text("SELECT * FROM task_speedup_now")).mappings().one()
    columns = {
        "ratio": "speedup",
        "low": "speedup_low",
        "high": "speedup_high",
        "blocks": "num_blocks",
        "min_draft_tokens": "min_num_draft_tokens",
        "max_draft_tokens": "max_num_draft_tokens",
        "mean_running": "mean_running",
        "control_share": "control_share",
    }
    found = metrics_of(report_of("code", slices.shown(now)["code"]), "speedup", columns)
    assert found == {name: row[column] for name, column in columns.items()}
    keep_snapshot(twelve_jobs, now - timedelta(minutes=61))
    then = cli("explain", "code", "--at", "1h", "--json").json["measured"]["speedup"]
    assert (then["speedup"], then["num_blocks"], then["verdict"]) == (None, 3, "no_verdict_yet")
    told = " ".join(cli("explain", "code", "--at", "1h").out.split())
    assert "No verdict yet (lookup, k up to 4, 4.0 running; 3 blocks of control rounds, 5.3% of the time)" in told


def report_of(task: str, measured: TaskSpeedup) -> DriftReport:
    line = TaskLine(
        task=task,
        num_jobs=12,
        mode="speculative",
        drafter="lookup",
        num_draft_tokens=4,
        reason=judged(NextJob("speculative", "lookup", 4, "faster", ""), measured).reason,
        num_speculative_jobs=12,
        measured=MeasuredLine.model_validate(measured),
    )
    at = measured.computed_at
    return DriftReport(created_at=at, covers_from=at, covers_to=at, headline="", tasks=(line,))


def metrics_of(report: DriftReport, figure: str, names: Iterable[str]) -> dict[str, float | None]:
    """What a scheduler's metrics say of look-up in the report's task."""
    metrics, labels = SchedulerMetrics(), {"task": "code", "drafter": "lookup"}
    metrics.run_succeeded(report, SentProbes())
    return {n: metrics.registry.get_sample_value(f"alphaloop_scheduler_{figure}_{n}", labels) for n in names}


def test_a_table_calls_faster_only_what_was_measured_or_is_expected_beyond_doubt(twelve_jobs: Database) -> None:
    for low, expected in ((None, "expected faster"), (1.1, "expected faster"), (0.97, "not surely faster")):
        coming = replace(NextJob("speculative", "lookup", 3, "faster", ""), expected_low=low)
        assert why(judged(coming, None)) == expected
        for verdict, word in (
            ("faster", "faster"),
            ("slower", f"{expected}, measured slower"),
            ("no_difference", f"{expected}, measured no difference"),
            ("no_verdict_yet", expected),
        ):
            measured = replace(task_speedup(Interval(1.6, 1.5, 1.7), datetime.now(UTC)), verdict=Verdict(verdict))
            assert why(judged(coming, measured)) == word
    assert why(judged(NextJob("vanilla", None, 0, "not_faster", ""), None)) == "not faster"
    for low, word in ((1.9, "expected_faster"), (0.97, "not_surely_faster")):
        ways = (Alternative("lookup", 3, 2.5, 50.0, 1.01, low, 2.4), Alternative(None, 0, 1.0, 41.0, 1.0, 1.0, 1.0))
        chosen = Decision(Mode.SPECULATIVE, "lookup", "draft-1", 3, Reason.FASTER, "expected", ways)
        DecisionLog(twelve_jobs).record_change(BudgetSubject(f"task-{word}", TARGET, DEVICE, "greedy"), 4, chosen, "w")
        asked = text("SELECT reason FROM decision_log WHERE task = :task")
        assert twelve_jobs.scalar(asked, {"task": f"task-{word}"}) == word


def test_no_screen_says_faster_beside_a_measured_loss(cli: Cli, cli_environment: None, twelve_jobs: Database) -> None:
    """Status, the report's text and page, and explain; `measure` has its own test."""
    shown = shown_speedup(twelve_jobs, 12, cost=4.0)
    assert shown.verdict == "slower"
    choose(twelve_jobs)
    (status,) = tasks_now(twelve_jobs, load_settings(None))
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
    cli: Cli, cli_environment: None, twelve_jobs: Database, kafka_broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka_broker)
    slices, now = SwitchbackStore(twelve_jobs), datetime.now(UTC)
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
    assert "Expected speed-ups of lookup (k up to 4, 4.0 running): 1 of 3 intervals held" in words
    best = next(way for way in explained["decision"]["alternatives"] if way["drafter"])
    assert best["error"] == explained["posteriors"]["lookup"]["expectation_error"]
    assert best["error"]["bias"] < 0
    assert f"corrected by {math.exp(best['error']['bias']):.2f}x" in words
    keep_snapshot(twelve_jobs, now - timedelta(minutes=26))
    earlier = cli("explain", "code", "--at", "25m", "--json").json
    assert [one["num_pairs"] for one in earlier["measured"]["expectations"]] == [1]
    lines = expectation_lines(ExpectationStore(twelve_jobs).shown(datetime.now(UTC)))
    report = report_of("code", slices.shown(now)["code"]).model_copy(update={"expectations": lines})
    assert "code: Expected speed-ups of lookup (k up to 4, 4.0 running): 1 of 3" in " ".join(
        render_text(report).split()
    )
    view = twelve_jobs.one(text("SELECT num_pairs, num_held, ratio FROM expectation_now"))
    of_metrics = metrics_of(report, "expectation", EXPECTATION)
    assert of_metrics == {"pairs": 3, "held_share": 1 / 3, "ratio": pytest.approx(code["ratio"])}
    assert (view.num_pairs, view.num_held, view.ratio) == (3, 1, pytest.approx(code["ratio"]))


def test_k_is_the_longest_draft_beside_every_figure(
    cli: Cli,
    cli_environment: None,
    twelve_jobs: Database,
    rng: random.Random,
    database_url: SecretStr,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of jobs with drafts up to 3 and up to 4, and of rounds with k 2 and 4: no row names two k."""
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    limit_requests(monkeypatch, 0.2)
    monkeypatch.setenv("COLUMNS", "200")
    DecodedJobs(twelve_jobs, rng, num_written=50).decoded("code", [0.9, 0.8, 0.7, 0.6], 3)
    slices, now = SwitchbackStore(twelve_jobs), datetime.now(UTC)
    slices.add(block_rows(subject("code"), now - timedelta(minutes=9), 12, num_draft_tokens=2))
    slices.add(block_rows(subject("code"), now - timedelta(minutes=5), 12))
    slices.refresh(now)
    (status,) = tasks_now(twelve_jobs, load_settings(None))
    assert status.decoded is not None
    assert status.measured is not None
    assert (status.decoded.num_draft_tokens, status.measured.min_num_draft_tokens) == ((3, 4), 2)
    line = TaskLine.of(
        status,
        status.next_job,
        num_speculative_jobs=11,
        acceptance_drafter="lookup",
        measured=MeasuredLine.model_validate(status.measured),
    )
    report = empty().model_copy(update={"tasks": (line,)})
    with console(database_url) as visitor:
        visitor.read("/tasks.json")
        until(lambda: visitor.get("/tasks/code.json").data["explanation"] is not None, "the task is explained", 30)
        pages = [visitor.get(address).text for address in ("/tasks", "/tasks/code")]
    screens = {
        "status": cli("status").out,
        "explain": cli("explain", "code").out,
        "report": render_text(report),
        "report, page": render_page(report),
        **dict(zip(("tasks", "task"), pages, strict=True)),
    }
    for name, shown in screens.items():
        words = " ".join(re.sub(r"<[^>]*>", " ", shown).split())
        assert set(re.findall(r"\bk (?:up to )?[\d-]+", words)) == {"k up to 4"}, name
        assert "longest draft" in words or name in ("explain", "task"), name


def test_servers_are_named_by_what_serves_and_where_on_every_screen(
    cli: Cli,
    cli_environment: None,
    twelve_jobs: Database,
    database_url: SecretStr,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A vLLM of the worker's own too: what evidence and costs are stored under is a hash, and on no screen."""
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    limit_requests(monkeypatch, 0.2)
    device = f"{SERVERS}12ab34cd"
    facts = SessionFacts("w", "gpu-1", device, "vllm-0.32.0", TARGET, 3, timedelta(days=3), 0.07)
    setup = WorkerSetup(facts, (DrafterState("lookup", "vllm-0.32.0-12ab", 4),))
    WorkerStore(twelve_jobs).say(WorkerLoad("w", device, "my-target", 3, 0, 0, {}, setup=setup))
    with console(database_url) as visitor:
        visitor.read("/tasks.json")
        until(lambda: visitor.get("/tasks/code.json").data["explanation"] is not None, "the task is explained", 30)
        pages = {
            address: visitor.get(address).text for address in ("/now", "/now.json", "/tasks/code", "/tasks/code.json")
        }
    screens = {
        **pages,
        **{" ".join(words): cli(*words).out for words in (("status",), ("explain", "code"))},
        **{" ".join(words): cli(*words).out for words in (("status", "--json"), ("explain", "code", "--json"))},
    }
    for name, shown in screens.items():
        words = " ".join(shown.split())
        assert "vllm-0.32.0 at gpu-1" in words, name
        assert "12ab34cd" not in words, name


def test_jobs_held_for_other_clients_are_on_every_screen_of_workers(
    cli: Cli,
    cli_environment: None,
    twelve_jobs: Database,
    database_url: SecretStr,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    limit_requests(monkeypatch, 0.2)
    facts = SessionFacts("w", "gpu-1", f"{SERVERS}12ab34cd", "vllm-0.32.0", TARGET, 3, timedelta(days=3), 0.07)
    held = HeldRequests(8, "held for others: 3 of 16 places are free, 4 stay free")
    setup = WorkerSetup(facts, (), held={"shared": held})
    WorkerStore(twelve_jobs).say(WorkerLoad("w", facts.device, "my-target", 3, 0, 0, {}, setup=setup))
    with console(database_url) as visitor:
        page, told = visitor.get("/now").text, visitor.get("/now.json").data
    assert held.sentence in " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert f"worker w sends shared nothing new, {held.sentence}" in " ".join(cli("status").err.split())
    for workers in (told["workers"], cli("status", "--json").json["workers"]):
        assert [worker["held"] for worker in workers] == [{"shared": {"num": 8, "reason": held.reason}}]


def test_one_choice_has_one_reason_on_every_screen(
    cli: Cli, cli_environment: None, twelve_jobs: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision of now is also the last change that was logged, with bounds that hold 1."""
    decide = AsAWorker.decide

    def doubtful(worker: AsAWorker, request: ExplainRequest) -> Snapshot:
        made = decide(worker, request)
        (one,) = made.decisions
        ways = tuple(way._replace(speedup_low=0.97) if way.drafter else way for way in one.alternatives)
        return replace(made, decisions=(replace(one, alternatives=ways),))

    monkeypatch.setattr(AsAWorker, "decide", doubtful)
    ways = (Alternative("lookup", 3, 2.5, 50.0, 1.2, 0.97, 1.5), Alternative(None, 0, 1.0, 41.0, 1.0, 1.0, 1.0))
    chosen = Decision(Mode.SPECULATIVE, "lookup", "draft-1", 3, Reason.FASTER, "expected", ways)
    DecisionLog(twelve_jobs).record_change(BudgetSubject("code", TARGET, DEVICE, "greedy"), 2, chosen, "w")
    (status,) = tasks_now(twelve_jobs, load_settings(None))
    assert status.next_job is not None
    line = TaskLine.of(
        status,
        status.next_job,
        num_speculative_jobs=8,
        acceptance_drafter="lookup",
        next_expected_low=status.next_job.expected_low,
    )
    printed = Console(width=140)
    with printed.capture() as table:
        printed.print(task_table([status], None))
    explained = cli("explain", "code").out
    head, changes = explained.splitlines()[0], explained.partition("changes, newest first")[2]
    report = empty().model_copy(update={"tasks": (line,)})
    documents = cli("explain", "code", "--json").json, report.model_dump()["tasks"][0]
    assert {documents[0][name]["reason"] for name in ("decision", "next_job")} == {"not_surely_faster"}
    assert (documents[0]["changes"][0]["reason"], documents[1]["reason"]) == ("not_surely_faster",) * 2
    assert status.as_json(None)["next_job"]["reason"] == "not_surely_faster"
    for screen in (head, changes, table.get(), render_text(report), render_page(report)):
        words = " ".join(screen.split())
        assert "not surely faster" in words
        assert "expected faster" not in words
