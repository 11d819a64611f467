"""One question, one answer: every screen and view gives a task the same jobs, the same α₁ and the same speed-up."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.acceptance import Interval
from alphaloop.experiment.wording import figure, sentence
from alphaloop.settings import TaskSettings, load_settings
from alphaloop.store.database import Database
from alphaloop.store.reports import ReportStore
from alphaloop.store.switchback import SwitchbackStore
from alphaloop.store.task_figures import TaskFigures, recent_tasks
from alphaloop.wording import counted_apart, share_with_interval
from scheduler.metrics import SchedulerMetrics
from tests.fixtures.broker import limit_requests
from tests.fixtures.cli import Cli
from tests.fixtures.console import Visitor, console
from tests.fixtures.drift import scheduler_of
from tests.fixtures.postgres import fresh_database
from tests.fixtures.runs import DecodedJobs, block_rows, subject
from tests.fixtures.six_tasks import NUM_ALPHA_JOBS, NUM_JOBS, Answer, fill, of_document, of_metrics, of_views
from worker.metrics import WorkerMetrics

pytestmark = pytest.mark.postgres


class Asked:
    """Six tasks, a run of the scheduler over them, and a console."""

    def __init__(self, url: SecretStr, jobs: DecodedJobs, folder: Path, visitor: Visitor) -> None:
        self.url, self.jobs, self.database, self.visitor = url, jobs, jobs.database, visitor
        self.metrics, self._folder = SchedulerMetrics(), folder

    def run_scheduler(self) -> None:
        """A run now."""
        tasks = {task: TaskSettings() for task in NUM_JOBS}
        update = {"tasks": tasks, "data_dir": self._folder}
        settings = load_settings(None).model_copy(update=update)
        scheduler_of(self.database, settings, metrics=self.metrics).run_once(datetime.now(UTC))


@pytest.fixture(scope="module")
def asked(
    postgres_server: str, migrated_template: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Asked]:
    with fresh_database(postgres_server, migrated_template) as url, Database(url) as database, console(url) as visitor:
        jobs = DecodedJobs(database, random.Random(seed))
        fill(jobs)
        found = Asked(url, jobs, tmp_path_factory.mktemp("one"), visitor)
        found.run_scheduler()
        yield found


@pytest.fixture(autouse=True)
def environment(asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATABASE_URL", asked.url.get_secret_value())
    monkeypatch.setenv("ALPHALOOP_DATA_DIR", str(tmp_path))
    # No broker: what waits is not asked here.
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    limit_requests(monkeypatch, 0.2)


def answers(asked: Asked, cli: Cli) -> dict[str, dict[str, Answer]]:
    """By task and screen."""

    def by_task(told: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {one["task"]: one for one in told}

    status, report = (by_task(cli(command, "--json").json["tasks"]) for command in ("status", "report"))
    listed = by_task(asked.visitor.read("/tasks.json")["tasks"])
    found = {}
    for task in NUM_JOBS:
        explained = cli("explain", task, "--json").json
        alone = asked.visitor.get(f"/tasks/{task}.json").data["now"]
        found[task] = {
            "status": of_document(status[task], status[task]["measured"], "num_alpha_jobs"),
            "explain": of_document(explained["figures"], explained["measured"]["speedup"], "num_alpha_jobs"),
            "report": of_document(report[task], report[task]["measured"], "num_speculative_jobs"),
            "console, tasks": of_document(listed[task], listed[task]["measured"], "num_alpha_jobs"),
            "console, task": of_document(alone, alone["measured"], "num_alpha_jobs"),
            "metrics": of_metrics(asked.metrics.registry.get_sample_value, task, NUM_ALPHA_JOBS.get(task, 0)),
        }
    return found


def test_every_screen_gives_one_answer(asked: Asked, cli: Cli) -> None:
    for task, found in answers(asked, cli).items():
        status = found["status"]
        assert (status.num_jobs, status.num_probes, status.num_controls) == NUM_JOBS[task]
        assert status.num_alpha_jobs == NUM_ALPHA_JOBS.get(task, 0)
        assert (status.alpha_1 is None) is (task not in NUM_ALPHA_JOBS)
        assert (status.speedup is None) is (task not in ("faster", "split", "flagged"))
        assert {screen: one for screen, one in found.items() if one != status} == {}
        view = of_views(asked.database, task)
        mean = status.alpha_1[0] if status.alpha_1 else None
        assert view == replace(status, alpha_1=None if mean is None else (pytest.approx(mean),) * 3)


def test_the_worker_counts_the_same_jobs_and_the_same_acceptance(asked: Asked) -> None:
    """Its counters begin with the process: here it recorded everything, the job before the window too."""
    metrics = WorkerMetrics()
    for task, purpose, ended in asked.jobs.recorded:
        metrics.recorded(task, purpose, [ended])
    value = metrics.registry.get_sample_value
    shown = {now.task: now for now in recent_tasks(asked.database)}
    probed = shown["probed"]
    for purpose, number in (("traffic", probed.num_jobs), ("probe", probed.num_probes), ("control", 4)):
        assert value("alphaloop_jobs_total", {"task": "probed", "purpose": purpose, "status": "succeeded"}) == number
    labels = {"task": "probed", "drafter": "lookup", "purpose": "traffic", "position": "1"}
    accepts, trials = (value(f"alphaloop_spec_decode_{name}_total", labels) for name in ("accepts", "trials"))
    assert accepts is not None
    assert trials is not None
    assert accepts / trials == pytest.approx(probed.alpha_1.mean)


def written(asked: Asked, cli: Cli) -> dict[str, dict[str, str]]:
    """By task and screen, what a person reads of the task: its row where there is a table, else the whole."""
    report = ReportStore(asked.database).latest()
    assert report is not None
    asked.visitor.read("/tasks.json")
    status, listed = cli("status").out, asked.visitor.get("/tasks").text
    return {
        task: {
            "status": row(status, task),
            "explain": cli("explain", task).out,
            "report": row(report.text, task),
            "report, page": html_row(report.html, task),
            "console, tasks": html_row(listed, task),
            "console, task": asked.visitor.get(f"/tasks/{task}").text,
        }
        for task in NUM_JOBS
    }


def row(table: str, task: str) -> str:
    """The lines of a task in a table: its first, and those behind it that have no name."""
    lines = table.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.split()[:1] == [task])
    begins = (n for n in range(begin + 1, len(lines)) if not lines[n].startswith(" ") or not lines[n].strip())
    end = next(begins, len(lines))
    return "\n".join(lines[begin:end])


def html_row(page: str, task: str) -> str:
    found = re.search(rf'<tr>\s*<td class="name" data-label="Task">(?:<[^>]+>)*{task}<.*?</tr>', page, re.DOTALL)
    assert found, task
    return without_tags(found.group())


def tiles(page: str) -> str:
    return without_tags(page.split('<ul class="tiles">')[1].split("</ul>")[0])


def without_tags(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_people_read_what_the_json_says_and_faster_of_what_was_measured_faster(asked: Asked, cli: Cli) -> None:
    """Of the six tasks one is faster; one is slower, two are not measured, and of one another drafter was."""
    tasks = {one.task: one for one in recent_tasks(asked.database)}
    assert figure(tasks["thin"].measured) == "no verdict yet (3 of 8 blocks)"
    for task, screens in written(asked, cli).items():
        now, page = tasks[task], screens["console, task"]
        apart = counted_apart(now.num_probes, now.num_controls)
        for screen, whole in screens.items():
            words = tiles(whole) if screen == "console, task" else " ".join(whole.split())
            assert_alpha_1(screen, words, now.alpha_1)
            assert_jobs(screen, words, now)
            assert_speedup(screen, words, now)
            assert screen == "report" or apart in words, screen
            assert "report" in screen or not now.num_held or f"{now.num_held} held" in words, screen
            assert_faster(screen, whole.splitlines()[0] if screen == "explain" else words, task)
        assert_faster("console, changes", without_tags(page.split("Changes of the choice")[1]), task)


def assert_alpha_1(screen: str, words: str, found: Interval | None) -> None:
    if found is None:
        return
    assert share_with_interval(found) in words, screen


def assert_jobs(screen: str, words: str, now: TaskFigures) -> None:
    """Status tells ended jobs from held ones; the others have the number."""
    told = f"{now.jobs['succeeded']} succeeded" if screen == "status" else str(now.num_jobs)
    assert re.search(rf"(?<![\d.]){told}\b", words), screen


def assert_speedup(screen: str, words: str, now: TaskFigures) -> None:
    """The sentence of explain, the figure of the tables; the report's text has it in a section of its own."""
    if now.measured and screen != "report":
        assert now.measured.drafter in words, f"{screen}: whose speed-up"
    if screen == "explain" and now.measured:
        assert sentence(now.measured.drafter, now.measured) in words
    elif now.measured and screen != "report":
        assert figure(now.measured) in words, screen
    elif screen != "explain":
        others = words.replace(share_with_interval(now.alpha_1), "")
        assert not re.search(r"\d\.\d\d ?\[?\d\.\d\d \d\.\d\d\]", others), screen


def assert_faster(screen: str, words: str, task: str) -> None:
    told = " ".join(words.replace(task, "").split())
    is_said = re.search(r"\bfaster\b", re.sub(r"(expected|not|not surely) faster", "", told))
    assert not is_said or (task == "faster" and "changes" not in screen), f"{screen}: {told}"


def test_stored_figures_say_of_when_they_are(asked: Asked, cli: Cli) -> None:
    """A report is of its run; a speed-up, of the moment at which it was computed, on whatever screen."""
    slices = SwitchbackStore(asked.database)
    before = slices.shown(datetime.now(UTC))["faster"]
    old = cli("report", "--json").json
    assert datetime.fromisoformat(old["created_at"]) >= before.computed_at
    later = before.computed_at + timedelta(minutes=3)
    slices.add(block_rows(subject("faster"), later - timedelta(minutes=1), 12, cost=2.0))
    slices.refresh(later, ["faster"])
    fresh = slices.shown(later)["faster"]
    assert figure(fresh) != figure(before)
    stamp, old_stamp = (f"Computed at {one.computed_at:%Y-%m-%d %H:%M} UTC." for one in (fresh, before))
    assert stamp in " ".join(cli("explain", "faster").out.split())
    told = " ".join(cli("status").out.split())
    assert f"to {fresh.computed_at:%Y-%m-%d %H:%M} UTC." in told, "the other speed-ups are older"
    report = " ".join(cli("report").out.split())
    assert f"{sentence('lookup', before)}" in report
    assert old_stamp in report
    assert figure(before) in " ".join(cli("report", "--html", "-").out.split())
    asked.run_scheduler()
    assert stamp not in report
    found = answers(asked, cli)["faster"]
    assert found["report"] == found["status"]
    computed = asked.database.scalar(text("SELECT computed_at FROM task_speedup_now WHERE task = 'faster'"))
    assert computed >= fresh.computed_at - timedelta(minutes=3)
