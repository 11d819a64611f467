"""After a real run, every text says what every JSON says: one worker, one database, every screen and its twin."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import text

from alphaloop.acceptance import Interval
from alphaloop.as_decoded import Decoded, drafted_sentence, percent
from alphaloop.deciding.decision import Reason
from alphaloop.errors import InvalidField
from alphaloop.measurements import DriftSubject
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore, EventChange, EventState, Incident, IncidentKind, IncidentStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.workers import WorkerLoad, WorkerStore
from alphaloop.wording import named, share_with_interval, words
from engine.own import TransformersEngine
from scheduler.report.data import DriftReport
from scheduler.report.pages import render_page
from tests.fixtures.cli import Cli
from tests.fixtures.console import Visitor, console
from tests.fixtures.drift import content, scheduler_of
from tests.fixtures.runs import (
    DecodedJobs,
    block_rows,
    calibrate,
    claim,
    decode_run,
    outcome,
    simulated_counts,
    subject,
)
from tests.fixtures.worker import Client, running_worker, until, write_letter

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.timeout(300)]

#: What a job of each task is like: texts that repeat, sampled ones, texts of one token, which no round follows.
TASKS: Final[dict[str, dict[str, Any]]] = {
    "code": {"max_tokens": 60},
    "chat": {"max_tokens": 30, "temperature": 1.0},
    "sql": {"max_tokens": 1},
    "math": {"max_tokens": 4},
}
NUM_JOBS: Final = 24
_BOUNDS: Final = re.compile(r"(?<![\d.])\d?\.\d+ ?[\[(][-+\d.]+,? (?:to )?[-+\d.]+[\])]")
_FORMAT: Final = re.compile(r"[-+]?\d+\.\d\d \[[-+]?\d+\.\d\d [-+]?\d+\.\d\d\]")


class Screens:
    """Every JSON document and every text, by screen."""

    def __init__(self, cli: Cli, visitor: Visitor, report: DriftReport, tasks: list[str]) -> None:
        self.of_all = {"status": cli("status", "--json").json, "report": cli("report", "--json").json}
        self.of_all |= {"tasks": visitor.read("/tasks.json"), "jobs": visitor.get("/jobs.json").data}
        self.texts = {"status": cli("status").out, "report": cli("report").out}
        self.texts |= {"report, page": render_page(report), "tasks": visitor.get("/tasks").text}
        self.explained, self.tasks = {}, {}
        for task in tasks:
            self.explained[task] = cli("explain", task, "--json").json
            address = f"/tasks/{task}"
            until(lambda: visitor.get(f"{address}.json").data["explanation"] is not None, "it is explained", 30)  # noqa: B023
            self.tasks[task] = visitor.get(f"{address}.json").data
            self.texts |= {f"explain {task}": cli("explain", task).out, f"task {task}": visitor.get(address).text}
        self.texts = {name: plain(its) for name, its in self.texts.items()}

    def of_task(self, task: str) -> dict[str, dict[str, Any]]:
        """What each document says of a task."""
        found = {
            name: next(one for one in self.of_all[name]["tasks"] if one["task"] == task)
            for name in ("status", "report", "tasks")
        }
        return {**found, "explain": self.explained[task], "task": self.tasks[task]}

    def texts_of(self, task: str) -> dict[str, str]:
        """The texts that speak of it."""
        others = {f"{kind} {other}" for kind in ("explain", "task") for other in TASKS if other != task}
        return {name: its for name, its in self.texts.items() if name not in others}


def plain(shown: str) -> str:
    """A text on one line; a page without its markup."""
    if shown.startswith("<!doctype"):
        shown = html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", shown, flags=re.DOTALL))
    return " ".join(shown.split())


@pytest.fixture
def ran(
    worker_settings: Settings,
    database: Database,
    tiny_engine: Callable[..., TransformersEngine],
    stack_cli: Cli,
    tmp_path: Path,
    rng: random.Random,
) -> Iterator[tuple[Cli, Visitor, DriftReport]]:
    """A worker decoded jobs of four tasks, then a scheduler ran."""
    client = Client(worker_settings)
    with running_worker(worker_settings, tiny_engine("llama", dtype="float32")):
        for task, body in TASKS.items():
            prompts = (" ".join(rng.choices(("one", "two", "cd", "ab"), k=8)) for _ in range(NUM_JOBS))
            client.send(task, [json.dumps({"prompt": its, "seed": 1, **body}).encode() for its in prompts])
        client.results(NUM_JOBS * len(TASKS))
        update = {"data_dir": tmp_path}
        scheduler_of(database, worker_settings.model_copy(update=update)).run_once(datetime.now(UTC))
        report = DriftReport.model_validate(database.scalar(text("SELECT content FROM reports")))
        assert worker_settings.postgres.url is not None
        with console(worker_settings.postgres.url, kafka=worker_settings.kafka) as visitor:
            yield stack_cli, visitor, report


def test_every_json_says_what_every_text_says(ran: tuple[Cli, Visitor, DriftReport]) -> None:
    cli, visitor, report = ran
    screens = Screens(cli, visitor, report, [*TASKS])
    for task in TASKS:
        its = screens.of_task(task)
        of_next = {name: one["next_job"] for name, one in its.items() if name in ("status", "tasks", "explain")}
        of_next["task"] = its["task"]["explanation"]["next_job"]
        assert {"next_job", "measured"}.isdisjoint(its["explain"]["figures"]), "they stand beside it, and once"
        reasons = {name: one["reason"] for name, one in of_next.items()}
        reasons |= {"report": its["report"]["reason"], "decision": its["explain"]["decision"]["reason"]}
        (reason,) = set(reasons.values())
        assert reason != Reason.FASTER, "no slice was recorded: nothing was measured"
        decoded = {name: its[name]["decoded"] for name in ("status", "tasks", "report")}
        decoded |= {"explain": its["explain"]["figures"]["decoded"], "task": its["task"]["now"]["decoded"]}
        (done,) = {Decoded.of_json(one) for one in decoded.values()}
        chosen = {named(one["drafter"], one["num_draft_tokens"]) for one in of_next.values()}
        said = {words(reason), *chosen, percent(done.drafted_share)}
        (alpha,) = {json.dumps(its[name]["alpha_1"], sort_keys=True) for name in ("status", "tasks", "report")}
        said |= {share_with_interval(Interval(**json.loads(alpha)))} if alpha != "null" else set()
        for name, shown in screens.texts_of(task).items():
            for one in said - ({"-"} if name.startswith("explain") else set()):
                assert one in shown or one == "-", f"{task}: {name} does not say {one}"
        assert drafted_sentence(done) in screens.texts[f"explain {task}"]
    for name, shown in screens.texts.items():
        wrong = [one for one in _BOUNDS.findall(shown) if not _FORMAT.fullmatch(one)]
        assert wrong == [], name
        assert not re.search(r"(?<![\d.])\.\d", shown), name


def test_a_result_and_its_page_say_how_it_was_decoded(ran: tuple[Cli, Visitor, DriftReport]) -> None:
    _, visitor, _ = ran
    for listed in visitor.get("/jobs.json").data["jobs"]:
        address = f"job.json?id={listed['job_id']}"
        decoding = visitor.get(f"/{address}").data["result"]["decoding"]
        page = plain(visitor.get(f"/job?id={listed['job_id']}").text)
        is_drafted = decoding["mode"] == "speculative"
        assert is_drafted is (listed["decoded"]["drafter"] is not None)
        assert decoding["reason"] not in (
            ("not_faster", "short_output") if is_drafted else ("expected_faster", "faster")
        )
        assert f"Why: {words(decoding['reason'])} " in page
        numbers = {int(one) for one in re.findall(r"of (\d+) rounds", page)}
        numbers |= {int(one) for one in re.findall(r"Rounds after the prompt (\d+),", page)}
        assert numbers == ({listed["decoded"]["num_rounds"]} if decoding["proposed"] or not is_drafted else set())


def test_replay_and_report_count_the_same_device_time(ran: tuple[Cli, Visitor, DriftReport]) -> None:
    cli, _, report = ran
    num_jobs = NUM_JOBS * len(TASKS)

    def is_stored() -> bool:
        """Workers store what they decided on after they have published results."""
        return sum(task["num_jobs"] for task in cli("replay", "--json").json["tasks"].values()) == num_jobs

    until(is_stored, "every decision is stored", 30)
    replayed = cli("replay", "--json").json
    assert replayed["left_out"] == {}
    costs = {line.task: line.cost for line in report.tasks}
    for task, its in replayed["tasks"].items():
        cost = costs[task]
        assert cost is not None
        assert (its["num_jobs"], its["measured_s"]) == (cost.num_jobs, pytest.approx(cost.device_s, abs=1e-3))
    told = plain(cli("replay").out)
    assert f"{replayed['total']['measured_s']:.1f} s of the device" in told or "more than" in told


LONG: Final = "summarization_of_very_long_documents_in_the_legal_department.v2"


def test_no_line_of_a_text_screen_is_longer_than_80_columns(
    worker_settings: Settings,
    database: Database,
    rng: random.Random,
    stack_cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the names; an address that is to be copied stands alone on its line."""
    monkeypatch.setenv("COLUMNS", "80")
    Client(worker_settings)
    calibrate(database)
    jobs = DecodedJobs(database, rng)
    claim(database, *(f"{LONG}-{number}" for number in range(9)), task=LONG)
    for number in range(9):
        run = decode_run(simulated_counts(rng, [0.9, 0.7], 20), task=LONG, drafter="lookup")
        OutcomeStore(database).record([outcome(f"{LONG}-{number}", task=LONG, run=run)], owner="w")
    jobs.decoded("code", 0.6, 3, drafter=LONG)
    slices, now = SwitchbackStore(database), datetime.now(UTC)
    slices.add(block_rows(subject(LONG), now - timedelta(minutes=5), 12))
    slices.refresh(now)
    workers = WorkerStore(database)
    workers.say(WorkerLoad(LONG, "NVIDIA H100 80GB HBM3", LONG, 4, 7, 1, {"j": 5}, 10.0, f"temperature 0.6 of {LONG}"))
    incident = Incident(IncidentKind.WRONG_TEXT, LONG, LONG, "r", "t", "e", ("j-1",), f"{LONG} wrote other texts.", {})
    IncidentStore(database).open([incident], now)
    event = content(DriftSubject(LONG, LONG, "r" * 40, "t" * 40), verdict=f"Acceptance of {LONG} on {LONG} fell.")
    DriftEventStore(database).write([EventChange(None, EventState.OPENED, event, "fell")], now)
    wrong = InvalidField(f"expected a task, found {LONG}", field="body.messages", hint="one of code, sql")
    write_letter(worker_settings.kafka, wrong, b"{}", job_id=LONG)
    scheduler_of(database, worker_settings.model_copy(update={"data_dir": tmp_path})).run_once(now)
    commands = [
        ["status"],
        ["report"],
        ["explain", LONG],
        ["explain", "code"],
        ["drift", "list"],
        ["drift", "show", "1"],
    ]
    commands += [["probes", "list"], ["probes", "plan"], ["draft", "list"], ["job", f"{LONG}-1", "nothere"]]
    commands += [["dlq", "list"], ["dlq", "show", stack_cli("dlq", "list", "--json").json[0]["at"]], ["replay"]]
    addresses = str(tmp_path), "postgresql", "/tmp"
    for typed in commands:
        ran = stack_cli(*typed)
        for line in (ran.out + ran.err).splitlines():
            is_address = line.startswith("  ") and line.strip().startswith(addresses)
            assert len(line) <= 80 or is_address, f"{' '.join(typed)}: {len(line)} {line}"
    shown = stack_cli("status")
    assert "1 running, slots: 4, 10.0 tokens/s, 7 jobs read ahead" in " ".join(shown.out.split())
    assert re.search(r"^console +http://\S+:9466$", shown.out, re.MULTILINE)
    assert stack_cli("status", "--json").json["console"].endswith(":9466")
