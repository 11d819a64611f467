"""Traffic at two loads: every screen says what share of the rounds drafted, and what the next job would do."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.acceptance import PREFILL
from alphaloop.as_decoded import Decoded, at_load, drafted_by_load, percent, setting
from alphaloop.costs import CostPoint
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.goodput import Alternative
from alphaloop.explaining.explanation import tasks_now
from alphaloop.messages import Mode
from alphaloop.settings import Settings, TaskSettings, load_settings
from alphaloop.settings.models import LookupDrafterSettings
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import CostStore, CostSubject, DraftRegistry
from alphaloop.store.decisions import BudgetSubject, DecisionLog
from alphaloop.store.task_figures import task_figures
from alphaloop.store.workers import WorkerLoad, WorkerStore
from engine.drafters.lookup import LookupDrafter
from engine.scoring import score
from tests.fixtures.broker import limit_requests
from tests.fixtures.cli import Cli
from tests.fixtures.console import console
from tests.fixtures.drift import scheduler_of
from tests.fixtures.runs import (
    DEVICE,
    ENGINE,
    TARGET,
    DecodedJobs,
    calibrate,
    claim,
    decode_run,
    record,
    shadow_run,
    simulated_counts,
    vanilla_counts,
)
from tests.fixtures.worker import until

pytestmark = pytest.mark.postgres

#: A round of eight sequences is wide: there look-up costs more than it brings.
_WIDE_MS = {1: (40.0, 41.0, 42.0), 8: (60.0, 240.0, 480.0)}


@pytest.fixture
def chat(database: Database, rng: random.Random) -> Database:
    """Two jobs alone that drafted, twelve beside eight others that did not; look-up was what was logged last."""
    points = [CostPoint(None, b, w, ms, 5) for b, its in _WIDE_MS.items() for w, ms in zip((1, 4, 9), its, strict=True)]
    points += [CostPoint("lookup", batch, width, 0.1, 5) for batch in (1, 8) for width in (4, 9)]
    CostStore(database).save(CostSubject("a-host", DEVICE, ENGINE, TARGET, {"lookup": "draft-1"}), points)
    DraftRegistry(database).register("lookup", "draft-1", TARGET)
    jobs = DecodedJobs(database, rng)
    for _ in range(2):
        jobs.record("chat", replace(decode_run(simulated_counts(rng, [0.6, 0.4, 0.3], 20), task="chat"), batch_size=1))
    for _ in range(12):
        run = decode_run(vanilla_counts(41), task="chat", mode=Mode.VANILLA, reason="not_faster")
        jobs.record("chat", replace(run, batch_size=8))
    ways = (Alternative("lookup", 3, 2.5, 50.0, 2.1, 1.9, 2.4), Alternative(None, 0, 1.0, 41.0, 1.0, 1.0, 1.0))
    chosen = Decision(Mode.SPECULATIVE, "lookup", "draft-1", 3, Reason.FASTER, "2.10x vanilla expected", ways)
    DecisionLog(database).record_change(BudgetSubject("chat", TARGET, DEVICE, "greedy"), 1, chosen, "w")
    return database


@pytest.fixture
def settings(cli_environment: None) -> Settings:
    return load_settings(None)


def report_line(database: Database, settings: Settings, folder: Path) -> dict[str, Any]:
    update = {"tasks": {"chat": TaskSettings()}, "data_dir": folder}
    scheduler_of(database, settings.model_copy(update=update)).run_once(datetime.now(UTC))
    content: dict[str, Any] = database.scalar(text("SELECT content FROM reports"))
    return next(line for line in content["tasks"] if line["task"] == "chat")


def test_every_screen_says_what_was_done_and_what_would_be_done(
    chat: Database,
    cli: Cli,
    settings: Settings,
    database_url: SecretStr,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    limit_requests(monkeypatch, 0.2)
    line = report_line(chat, settings, tmp_path)
    (now,) = tasks_now(chat, settings)
    with console(database_url) as visitor:
        documents = {
            "status": cli("status", "--json").json["tasks"][0],
            "explain": {
                **(explained := cli("explain", "chat", "--json").json),
                "decoded": explained["figures"]["decoded"],
            },
            "console": visitor.read("/tasks.json")["tasks"][0],
        }
        until(lambda: visitor.get("/tasks/chat.json").data["explanation"] is not None, "the task is explained", 30)
        alone = visitor.get("/tasks/chat.json").data
        page, listed = visitor.get("/tasks/chat"), visitor.get("/tasks")
    documents["console, task"] = {"decoded": alone["now"]["decoded"], "next_job": alone["explanation"]["next_job"]}
    assert now.decoded is not None
    assert now.next_job is not None
    for screen, its in documents.items():
        assert Decoded.of_json(its["decoded"]) == now.decoded, screen
        assert its["next_job"] == documents["status"]["next_job"], screen
    assert Decoded.of_json(line["decoded"]) == now.decoded
    assert (line["mode"], line["num_draft_tokens"], line["next_running"]) == ("vanilla", 0, 8)
    # 40 of 520 rounds drafted, and no job is counted as speculative for one of them.
    assert (now.decoded.num_rounds, now.decoded.num_drafted_rounds) == (2 * 20 + 12 * 40, 2 * 20)
    assert drafted_by_load(now.decoded) == ["100% at 1", "0% at 8"]
    told = (
        percent(now.decoded.drafted_share),
        *drafted_by_load(now.decoded),
        f"{setting(now.next_job)} {at_load(now.next_job)}",
    )
    assert told[-1] == "vanilla at 8 running"
    texts = {
        "status": cli("status").out,
        "explain": cli("explain", "chat").out,
        "report": cli("report").out,
        "console": listed.text,
        "console, task": page.text,
    }
    for name, shown in texts.items():
        words = " ".join(shown.replace("<strong>", " ").replace("</strong>", " ").split())
        for one in told[:3]:
            assert one in words, f"{name} says {one}"
        # Screens that list earlier choices say there that look-up was expected faster, and at which load.
        assert "expected faster" not in words.partition("hanges")[0], name
    # It speculated, and no round was vanilla by lot.
    assert "No speed-up was measured: no slice of the experiment was recorded" in " ".join(texts["explain"].split())


def test_a_limit_that_forbade_a_draft_is_no_evidence(
    database: Database, cli: Cli, settings: Settings, database_url: SecretStr
) -> None:
    """Jobs of four tokens leave no room for long drafts, and their texts repeat: the next one is short, too."""
    calibrate(database)
    drafter = LookupDrafter("lookup", LookupDrafterSettings(min_probability=0))
    prompt, output = [1, 2, 3, 1, 2, 3], [1, 2, 3, 1]
    scored = score(drafter, prompt, output, 12, max_tokens=4)
    assert scored is not None
    assert scored.counts.num_accepted > 0
    assert scored.chances == (1, 1), "the prefill gives one of the four, and the target adds one to each draft"
    run = decode_run(vanilla_counts(4), task="code", mode=Mode.VANILLA, reason="short_output")
    run = replace(run, batch_size=1, is_cut=True)
    of_lookup = replace(shadow_run(run, scored.counts, chances=scored.chances), num_draft_tokens=12, is_whole=True)
    record(database, *[run] * 60, shadows=[of_lookup])
    (now,) = tasks_now(database, settings)
    assert now.next_job is not None
    assert (setting(now.next_job), now.next_job.reason) == ("vanilla", "short_output")
    said, document = " ".join(cli("explain", "code").out.split()), cli("explain", "code", "--json").json
    assert "about 4 tokens a job" in said
    its = document["posteriors"]["lookup"]
    assert (its["tested"][2:], its["acceptance"][2:], its["acceptance_low"][2:]) == ([0] * 10, [None] * 10, [None] * 10)
    assert "not tested" in said
    assert not re.search(r"\] not tested", said), "no interval stands beside it"
    with console(database_url) as visitor:
        until(lambda: visitor.get("/tasks/code.json").data["explanation"] is not None, "the task is explained", 30)
        assert visitor.get("/tasks/code").text.count("not tested") == 6


def test_the_prefill_of_each_text_of_a_job_is_no_round_that_could_have_drafted(
    database: Database, rng: random.Random, database_url: SecretStr
) -> None:
    prefills = sum([PREFILL] * 2, simulated_counts(rng, [0.6, 0.4, 0.3], 20))
    run = replace(decode_run(prefills, task="chat"), chances=(20, 9, 4), num_texts=3)
    DecodedJobs(database, rng).record("chat", run)
    decoded = task_figures(database)["chat"].decoded
    assert decoded is not None
    assert (decoded.num_drafted_rounds, decoded.num_rounds, percent(decoded.drafted_share)) == (20, 20, "100%")
    with console(database_url) as visitor:
        (job,) = visitor.get("/jobs.json").data["jobs"]
    assert job["decoded"]["drafted_share"] == 1


def test_a_worker_that_is_gone_runs_on_no_screen(
    database: Database, cli: Cli, cli_environment: None, database_url: SecretStr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    limit_requests(monkeypatch, 0.2)
    workers = WorkerStore(database)
    for owner, num_jobs in (("gone", 3), ("new", 2)):
        workers.say(WorkerLoad(owner, "cpu", "m", 4, 0, num_jobs, {f"{owner}-{n}": 5 for n in range(num_jobs)}, 10.0))
    database.change(text("UPDATE workers SET seen_at = now() - interval '5 minutes' WHERE owner = 'gone'"))
    claim(database, "lost", "back", "held", owner="gone")
    database.change(text("UPDATE jobs SET lease_expires_at = now() WHERE job_id = 'lost'"))
    database.change(text("UPDATE jobs SET owner = NULL WHERE job_id = 'back'"))
    with console(database_url) as visitor:
        now, page = visitor.read("/now.json"), " ".join(visitor.get("/").text.split())
    assert (now["num_workers"], now["num_running"], now["num_slots"], now["tokens_per_s"]) == (1, 2, 4, 10.0)
    assert "heard of in the last half minute; 1 silent" in page
    assert (now["num_held"], [one["num_held"] for one in now["tasks"]]) == (1, [1])
    assert cli("status", "--json").json["tasks"][0]["jobs"] == {"left": 2, "running": 1}
    status = cli("status")
    assert "worker gone: silent for 5 min; said last: 3 running, slots: 4" in status.out
    assert "worker new: 2 running, slots: 4" in status.out
    assert [one["is_silent"] for one in cli("status", "--json").json["workers"]] == [True, False]
    workers.leave("new")
    assert "no worker runs" in cli("status").err


def test_the_next_job_alone_would_be_drafted(chat: Database, cli: Cli, settings: Settings) -> None:
    """The same task, asked at the other load: the answer is labelled with it."""
    explained = cli("explain", "chat", "--batch", "1")
    assert explained.out.splitlines()[0].startswith("chat, next job: lookup k=")
    assert "at 1 running" in explained.out.splitlines()[0]


def test_the_drift_page_says_what_its_none_rests_on(
    chat: Database, settings: Settings, database_url: SecretStr, tmp_path: Path
) -> None:
    with console(database_url) as visitor:
        before = visitor.get("/drift").text
        assert "Nothing was tested yet: no run of the scheduler has ended." in before
        report_line(chat, settings, tmp_path)
        after = visitor.get("/drift").text
    assert "tested the traffic of 1 task, none with a probe set, so a stale draft would not be noticed." in after
    assert "had no texts to compare" in after
    for page in (before, after):
        assert "acceptance is where it was" not in page
        assert "no text was wrong" not in page
