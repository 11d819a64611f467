"""The console over HTTP: what its pages show, to whom, and with which headers."""

from __future__ import annotations

import base64
import html
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest
from markupsafe import escape
from pydantic import SecretStr

from alphaloop.as_decoded import percent
from alphaloop.console.app import VIEWS
from alphaloop.explaining.explanation import explain_task, usual_request
from alphaloop.explaining.wording import opening
from alphaloop.measurements import DriftSubject
from alphaloop.messages import AnswerMessage, Choice, Result, Status
from alphaloop.messages.result import Failure
from alphaloop.settings import KafkaSettings, PostgresSettings, Settings
from alphaloop.store import known_jobs
from alphaloop.store.coordination import ScheduleStore
from alphaloop.store.database import Database
from alphaloop.store.decision_inputs import DraftRegistry
from alphaloop.store.drift import DriftEventStore, EventChange, EventState, Incident, IncidentKind, IncidentStore
from alphaloop.store.outcomes import OutcomeStore
from alphaloop.store.refreshes import RefreshReason, RefreshStore
from alphaloop.store.reports import ReportStore, StoredReport
from alphaloop.store.task_figures import figures_of, recent_tasks
from alphaloop.store.workers import WorkerStore
from benchmarks.console.filling import fill, plans
from scheduler.report.pages import render_page
from tests.fixtures import reports
from tests.fixtures.answers import call
from tests.fixtures.broker import limit_requests
from tests.fixtures.console import PASSWORD, WAIT_S, Visitor, console
from tests.fixtures.drift import content
from tests.fixtures.history import decoded, drawn_counts
from tests.fixtures.runs import claim, outcome

pytestmark = pytest.mark.postgres

NASTY = reports.NASTY
SECRET_TEXT = "the text of a caller"
PATHS = (
    *("/", "/tasks", "/tasks/code", "/jobs", "/job?id=j-1", "/batches", "/dead-letters", "/drift", "/drift/1"),
    *("/drafts", "/reports", "/cost"),
)


@pytest.fixture
def visitor(database_url: SecretStr) -> Iterator[Visitor]:
    with console(database_url) as found:
        yield found


@pytest.fixture
def guest(database_url: SecretStr) -> Iterator[Visitor]:
    """Of a console with a password, not signed in."""
    with console(database_url, password=SecretStr(PASSWORD)) as found:
        yield found


def record(
    database: Database,
    job_id: str,
    text: str = SECRET_TEXT,
    error: Failure | None = None,
    choices: Sequence[Choice] = (),
) -> None:
    claim(database, job_id, owner="w1")
    status = Status.SUCCEEDED if error is None else Status.FAILED
    ended = outcome(job_id, text=text, status=status, error=error)
    result = Result.decode(ended.result).model_copy(update={"choices": tuple(choices)})
    OutcomeStore(database).record([replace(ended, result=result.encode())], owner="w1")


def open_event(database: Database, verdict: str = "α_1 fell.") -> None:
    found = content(DriftSubject("code", "lookup", "r", "t"), verdict=verdict)
    DriftEventStore(database).write([EventChange(None, EventState.OPENED, found, verdict)], datetime.now(UTC))


def open_incident(database: Database, sentence: str) -> None:
    found = Incident(IncidentKind.WRONG_TEXT, "code", "lookup", "r", "t", "e", ("j-1",), sentence, {})
    IncidentStore(database).open([found], datetime.now(UTC))


def test_every_page_of_an_empty_database_is_shown_and_has_its_json_twin(visitor: Visitor) -> None:
    of_one = ("/job", "/report", "/batch", "/dead-letter", "/dead-letters/redrive")
    for path in ("/", *(path for path in VIEWS if "{" not in path and path not in of_one)):
        page = visitor.get(path)
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8"), path
        twin = visitor.get(f"{path if path != '/' else '/now'}.json")
        assert (twin.status, twin.headers["content-type"]) == (200, "application/json"), path
        assert twin.data.keys() == visitor.get(f"{path}?format=json").data.keys()
        assert f'href="{path if path != "/" else "/now"}.json"' in page.text
    assert visitor.get("/report").status == 404
    assert visitor.get("/tasks/unknown").status == 404
    assert visitor.get("/tasks/code").status == 200, "it is configured"
    assert visitor.get("/drift/99999999999999999999999").status == 404
    assert visitor.get("/nowhere").status == 404


def test_a_task_is_explained_as_the_command_does(database: Database, visitor: Visitor, database_url: SecretStr) -> None:
    fill(database, plans(1), now=datetime.now(UTC))
    deadline = time.monotonic() + WAIT_S
    while (shown := visitor.get("/tasks/code.json").data)["explained_at"] is None:
        assert time.monotonic() < deadline, shown
    settings = Settings(postgres=PostgresSettings(url=database_url))
    request = usual_request(figures_of(database, "code"), datetime.now(UTC), is_now=True)
    found = explain_task(database, settings, request)
    assert shown["opening"] == " ".join(opening(found))
    explained = shown["explanation"]["decision"]
    assert (explained["drafter"], explained["num_draft_tokens"]) == (
        found.decision.drafter,
        found.decision.num_draft_tokens,
    )
    expected = [one["speedup"] for one in explained["alternatives"]]
    assert expected == pytest.approx([one.speedup for one in found.decision.alternatives], rel=1e-3)
    assert escape(shown["opening"]) in visitor.get("/tasks/code").text.replace("\N{NO-BREAK SPACE}", " ")


def test_what_goes_on_now(database: Database, visitor: Visitor) -> None:
    fill(database, plans(4), now=datetime.now(UTC))
    now = visitor.read("/now.json")
    tasks = {task.task: task for task in recent_tasks(database)}
    assert now["num_held"] == sum(task.jobs.get("running", 0) for task in tasks.values()) > 0
    assert {task["task"]: task["num_held"] for task in now["tasks"]} == {
        name: task.jobs.get("running", 0) for name, task in tasks.items()
    }
    seen = WorkerStore(database).seen()
    assert [worker["owner"] for worker in now["workers"]] == [one.load.owner for one in seen]
    assert now["num_slots"] == sum(one.load.num_slots for one in seen)
    assert now["tokens_per_s"] == pytest.approx(sum(one.load.tokens_per_s or 0.0 for one in seen))
    assert now["errors"].keys() == {"broker"}, "no broker is configured here"
    assert "Broker not read" in visitor.get("/").text


def test_the_last_measurement_is_told_running_ended_or_failed(database: Database, visitor: Visitor) -> None:
    schedule, now = ScheduleStore(database), datetime.now(UTC)
    outcomes: dict[str, dict[str, str] | None] = {
        "and has not ended": None,
        "All is well.": {"headline": "All is well."},
        "it failed: the broker is away": {"error": "broker_unavailable", "message": "the broker is away"},
        "it failed: KeyError": {"error": "KeyError"},
    }
    for number, (told, outcome_of_run) in enumerate(outcomes.items()):
        due = now + timedelta(minutes=number)
        schedule.claim("measure", due, "s1", now)
        if outcome_of_run is not None:
            schedule.finish("measure", due, outcome_of_run, now)
        assert told in visitor.get("/").text


def test_pages_are_shown_while_the_broker_is_still_asked(
    database_url: SecretStr, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_requests(monkeypatch, 3.0)
    silent = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    with console(database_url, kafka=silent) as visitor:
        first = visitor.get("/")
        assert first.status == 200
        assert "being read" in first.text
        assert visitor.get("/tasks").status == visitor.get("/tasks/code").status == 200


def test_tasks_come_in_pages_and_are_found_by_a_part_of_their_name(database: Database, visitor: Visitor) -> None:
    fill(database, plans(90), now=datetime.now(UTC))
    address, seen = "/tasks.json", []
    while True:
        page = visitor.read(address)
        seen += [task["task"] for task in page["tasks"]]
        if page["behind"] is None:
            break
        address = f"/tasks.json?behind={page['behind']}"
    assert seen == [now.task for now in recent_tasks(database)]
    assert len(seen) > 50
    (found,) = visitor.read("/tasks.json?q=sum")["tasks"]
    assert found["task"] == "summarization"
    assert found["last_change"]["after"] == {"mode": "speculative", "drafter": "lookup", "num_draft_tokens": 5}
    assert sum(hour["trials"] for hour in found["by_hour"]) > 0
    assert "No task of the last day has" in visitor.get("/tasks?q=nobody").text


def test_jobs_are_found_by_task_status_and_time_in_the_address(database: Database, visitor: Visitor) -> None:
    """A link has the whole question, and goes on with it; the form shows it again."""
    for number in range(130):
        claim(database, f"j-{number:03d}", owner="w1", task=("code", "sql")[number % 2])
    run = decoded(drawn_counts(random.Random(1), 0.5, num_tokens=48, num_draft_tokens=3), datetime.now(UTC))
    run = replace(run, chances=(run.counts.rounds // 2, 1))  # one drafted round makes no speculative job
    OutcomeStore(database).record([outcome(f"j-{number:03d}", run=run) for number in range(120)], owner="w1")
    address, seen = "/jobs?task=code&status=succeeded&since=1h", []
    while address:
        page = visitor.get(address)
        data = visitor.get(address.replace("/jobs?", "/jobs.json?")).data
        assert data["asked"] == {"task": "code", "status": "succeeded", "since": "1h"}
        assert 'name="task" value="code"' in page.text
        assert '<option value="succeeded" selected>succeeded</option>' in page.text
        assert 'name="since" value="1h"' in page.text
        seen += data["jobs"]
        links = re.findall(r'rel="next" href="([^"]+)"', page.text)
        address = html.unescape(links[0]) if links else ""
    assert [job["job_id"] for job in seen] == [f"j-{number:03d}" for number in range(118, -1, -2)]
    share = run.chances[0] / (run.counts.rounds - 1)
    told = {"mode": "speculative", "drafter": "lookup", "num_draft_tokens": run.num_draft_tokens, "num_tokens": 48}
    told |= {"drafted_share": share, "num_rounds": run.counts.rounds - 1}
    assert f"<small>asked in {percent(share)} of its rounds</small>" in visitor.get("/jobs").text
    assert all({**job["decoded"], "latency_s": 0} == {**told, "latency_s": 0} for job in seen)
    assert f"{run.queue_s + run.wall_s:.2f}&nbsp;s" in visitor.get("/jobs?status=succeeded").text
    assert [job["decoded"] for job in visitor.get("/jobs.json?status=running").data["jobs"]] == [None] * 10
    assert "No job that a worker has claimed matches." in visitor.get("/jobs?status=cancelled").text
    assert "No job that a worker has claimed matches." in visitor.get("/jobs?until=1h").text


def test_a_page_that_could_not_look_at_all_jobs_says_so_and_goes_on(
    database: Database, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_jobs, "_FIRST_ROWS", 3)
    monkeypatch.setattr(known_jobs, "LOOK_S", 0.0)
    for number in range(5):
        task = "sql" if number == 1 else "code"
        claim(database, f"j-{number}", task=task, owner="w1")
    page = visitor.get("/jobs?task=sql").text
    assert "Looked at: 3 jobs" in page
    assert "none matches" in page
    (link,) = re.findall(r'rel="next" href="([^"]+)">look further back', page)
    assert "j-1" in visitor.get(html.unescape(link)).text


def test_everything_from_outside_is_escaped(database: Database, visitor: Visitor) -> None:
    open_event(database, NASTY)
    open_incident(database, NASTY)
    DraftRegistry(database).register(NASTY, "r", "t")
    record(database, "j-1", error=Failure(code="decode_failed", message=NASTY, hint=NASTY))
    at = datetime.now(UTC)
    ReportStore(database).save(StoredReport(at, at, at, NASTY, {}, "", "<p>a report</p>"))
    script = "%22%3E%3Cscript%3Ealert(1)"
    claim(database, NASTY, batch_id=NASTY, owner="w1")
    asked = [f"/jobs?{name}={script}" for name in ("task", "status", "since", "until", "batch", "behind")]
    for path in (*PATHS, f"/job?id={script}", f"/tasks?q={script}", *asked, f"/jobs?batch={quote(NASTY)}"):
        assert not re.search(
            r"<script(?! src=\"/static/console\.js\?[0-9a-f]{12}\" defer></script>)", visitor.get(path).text
        )
    assert "&lt;script&gt;" in visitor.get("/drift").text


def test_a_report_is_shown_as_it_was_published_and_runs_no_script(database: Database, visitor: Visitor) -> None:
    html, at = render_page(reports.full()), datetime.now(UTC)
    ReportStore(database).save(StoredReport(at, at, at, "All is well.", {"drift": []}, "", html))
    newest, named = visitor.get("/report"), visitor.get(f"/report?at={at.isoformat().replace('+', '%2B')}")
    back = '<p><a href="/">alphaloop</a> · <a href="/reports">Reports</a></p>'
    assert newest.text == named.text == html.replace("<main>", f"<main>\n{back}", 1)
    assert "script-src" not in newest.headers["content-security-policy"]
    assert newest.headers["content-security-policy"].startswith("default-src 'none'")
    assert visitor.get("/report.json").data["summary"] == "All is well."
    assert visitor.get(f"/report?at={at.isoformat()}").status == 200, "a plus that arrived as a blank"


def test_texts_are_shown_to_nobody_where_nobody_signs_in(database: Database, visitor: Visitor) -> None:
    record(database, "j-1")
    for path in ("/job?id=j-1", "/job.json?id=j-1", "/jobs", "/jobs.json"):
        answer = visitor.get(path)
        assert answer.status == 200
        assert SECRET_TEXT not in answer.text
    assert visitor.get("/job.json?id=j-1").data["result"]["status"] == "succeeded"


def test_reasoning_calls_and_several_texts_are_shown_escaped_and_only_to_who_signs_in(
    database: Database, visitor: Visitor, guest: Visitor
) -> None:
    said = [
        AnswerMessage(content=f"{SECRET_TEXT} <b>", reasoning=f"{SECRET_TEXT} <i>"),
        AnswerMessage(tool_calls=(call(0, NASTY, f"{SECRET_TEXT} {NASTY}"),)),
    ]
    choices = tuple(Choice(index=i, message=one, finish_reason="stop") for i, one in enumerate(said))
    record(database, "j-1", choices=choices)
    guest.sign_in()
    shown = guest.get("/job?id=j-1").text
    for title in ("Reasoning of text 1", "Text 1", f"Call of <code>{escape(NASTY)}</code> in text 2"):
        assert f"<h2>{title}</h2>" in shown
    for text in (f"{SECRET_TEXT} <i>", f"{SECRET_TEXT} <b>", f"{SECRET_TEXT} {NASTY}"):
        assert f'<pre class="text">{escape(text)}</pre>' in shown
    assert len(guest.get("/job.json?id=j-1").data["result"]["choices"]) == 2
    for path in ("/job?id=j-1", "/job.json?id=j-1"):
        assert SECRET_TEXT not in visitor.get(path).text


def test_a_job_that_nobody_claimed_is_not_found(visitor: Visitor) -> None:
    answer = visitor.get("/job?id=j-2")
    assert answer.status == 404
    assert "No worker has claimed a job of this id" in answer.text


def test_a_request_that_no_link_makes_is_refused_in_words(visitor: Visitor) -> None:
    asked = ("status=odd", "since=soon", "until=2999-01-01", "at=yesterday", "at=2026-11-23T07:00:00")
    for address in (*(f"/jobs?{one}" for one in asked), "/tasks?q=" + "x" * 400, "/job?id=%00"):
        answer = visitor.get(address)
        assert (answer.status, "xpected" in answer.text) == (400, True), address


def test_headers_of_every_answer(visitor: Visitor) -> None:
    for path in (*PATHS, "/nowhere", "/now.json", "/static/console.js", "/sign-in"):
        headers = visitor.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "server" not in headers
        assert headers["cache-control"] in ("no-store", "no-cache")
    (address,) = re.findall(r'src="(/static/console\.js\?[^"]+)"', visitor.get("/").text)
    assert "immutable" in visitor.get(address).headers["cache-control"]


def test_another_sites_name_for_this_address_is_refused(visitor: Visitor, database_url: SecretStr) -> None:
    assert visitor.get("/now.json", Host="evil.example").status == 400
    with console(database_url, public_url="https://alphaloop.example") as public:
        assert public.get("/now.json", Host="alphaloop.example").status == 200


def test_with_a_password_nothing_is_shown_before_signing_in(guest: Visitor, database: Database) -> None:
    record(database, "j-1")
    for path in PATHS:
        answer = guest.get(path)
        assert answer.status == 303
        assert answer.headers["location"].startswith("/sign-in?to=%2F")
    refused = guest.get("/now.json")
    assert (refused.status, refused.headers["www-authenticate"]) == (401, 'Basic realm="alphaloop console"')
    assert guest.sign_in("wrong").status == 401
    assert guest.get("/now.json").status == 401
    welcome = guest.sign_in(to="/job?id=j-1")
    assert (welcome.status, welcome.headers["location"]) == (303, "/job?id=j-1")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(welcome.headers["set-cookie"].split("; "))
    assert SECRET_TEXT in guest.get("/job.json?id=j-1").text
    guest.post("/sign-out", {})
    assert guest.get("/now.json").status == 401


def test_a_program_may_read_with_basic_authentication(guest: Visitor) -> None:
    def asking(login: str) -> int:
        return guest.get("/now.json", Authorization=f"Basic {base64.b64encode(login.encode()).decode()}").status

    assert asking(f"alphaloop:{PASSWORD}") == 200
    assert asking("alphaloop:wrong") == 401


def test_signing_in_leads_to_no_other_site(guest: Visitor) -> None:
    for to in ("https://evil.example", "//evil.example", "/\\evil.example", ""):
        assert guest.sign_in(to=to).headers["location"] == "/", to


def test_a_database_that_is_away_is_told_in_words() -> None:
    with console(SecretStr("postgresql://nobody@127.0.0.1:1/none"), kafka=KafkaSettings()) as visitor:
        answer = visitor.get("/jobs")
    assert answer.status == 503
    assert "127.0.0.1" in answer.text


def test_a_seeded_walk_over_odd_addresses_never_crashes(visitor: Visitor, rng: random.Random) -> None:
    """Whatever stands in an address, the answer is a page, no page, or a refusal."""
    characters = "aZ09-_.~%/?&=+:;@!$'()*,[]"
    for _ in range(150):
        path = "/" + "".join(rng.choice(characters) for _ in range(rng.randint(0, 30)))
        start = rng.choice(("", "/tasks", "/jobs?behind=", "/jobs?at=", "/drift", "/report?at=", "/job?id="))
        assert visitor.get(start + path).status in (200, 303, 400, 404, 405, 307), start + path


def test_drafts_that_are_trained_anew_stand_on_their_page(database: Database, visitor: Visitor) -> None:
    drafts, store = DraftRegistry(database), RefreshStore(database)
    drafts.register("heads", "h1", "t1", trained_for="t0")
    now = datetime.now(UTC)
    store.open("heads", "t1", "h1", RefreshReason.NEW_TARGET, now)
    refresh = store.lease("trainer", now, 60)
    assert refresh is not None
    figures = {"total": {"parent": 1.41, "candidate": 1.78, "ratio": 1.26, "low": 1.1, "high": 1.42}}
    store.trial(refresh.id, 1, name="heads-2", revision="h2", location="file:///d", figures=figures, sentence=NASTY)
    page = visitor.get("/drafts")
    shown = " ".join(re.sub(r"<[^>]+>", " ", page.text.replace("<wbr>", "")).split())
    for told in ("trained for another target, t0", "heads-2", "new target", "1.41", "1.78", "1.26× [1.10 1.42]"):
        assert told in shown, told
    assert NASTY not in page.text
    (line,) = visitor.get("/drafts.json").data["refreshes"]
    assert (line["state"], line["stale"], line["after"]) == ("trial", 1.41, 1.78)
