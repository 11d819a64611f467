"""The console in a real Chromium: no error, by keyboard, on a phone, without its script."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

import pytest
from playwright.sync_api import Browser, expect
from pydantic import SecretStr

from alphaloop.store.database import Database
from alphaloop.store.drift import DriftEventStore
from alphaloop.store.reports import ReportStore, StoredReport
from alphaloop.store.switchback import SwitchbackStore
from benchmarks.console.filling import fill, plans
from benchmarks.console.pictures import settle
from scheduler.report.pages import render_page
from tests.fixtures import reports
from tests.fixtures.console import PASSWORD, WAIT_MS, Visitor, astray, console, opened, overhang, read_every_second
from tests.fixtures.runs import DecodedJobs, block_rows, claim, subject

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

LONG: Final = "lookup_and_recycling_in_one_tree_of_2026_11"


@pytest.fixture
def visitor(database_url: SecretStr, monkeypatch: pytest.MonkeyPatch) -> Iterator[Visitor]:
    read_every_second(monkeypatch)
    with console(database_url) as found:
        yield found


def test_no_page_complains_or_is_wider_than_the_window(browser: Browser, database: Database, visitor: Visitor) -> None:
    now, rng = datetime.now(UTC), random.Random(1)
    fill(database, plans(6), now=now)
    DecodedJobs(database, rng).decoded("extraction", 0.6, 3, drafter=LONG)
    slices = SwitchbackStore(database)
    slices.add(block_rows(subject("extraction", drafter=LONG), now - timedelta(minutes=5), 12))
    slices.refresh(now)
    full = reports.full(tasks=("code", "sql"), drafter=LONG)
    content = full.model_dump(mode="json")
    ReportStore(database).save(StoredReport(now, now, now, "All is well.", content, "", render_page(full)))
    job = visitor.get("/jobs.json").data["jobs"][-1]["job_id"]
    (event,) = DriftEventStore(database).open_events()
    for is_phone_in_the_dark in (False, True):
        with opened(browser, is_phone=is_phone_in_the_dark, is_dark=is_phone_in_the_dark) as page:
            for path in ("/", "/tasks", "/tasks/code", "/tasks/extraction", "/cost"):
                settle(page, visitor.url + path)
            for path in (
                *(
                    "/",
                    "/tasks",
                    "/tasks/code",
                    "/tasks/extraction",
                    "/jobs",
                    f"/job?id={job}",
                    "/drift",
                    f"/drift/{event.id}",
                ),
                *("/drafts", "/reports", "/report", "/cost"),
            ):
                page.goto(visitor.url + path)
                assert overhang(page) == 0, path
                assert not is_phone_in_the_dark or astray(page) == [], path
                paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
                assert paper == ("rgb(20, 24, 29)" if is_phone_in_the_dark else "rgb(255, 255, 255)"), path
                assert not re.search(r"\d (%|s|ms)\b|\d\.\d+ [\d.]+\]", page.inner_text("main")), (
                    f"{path}: a unit may wrap"
                )
            for path, rows in (("/jobs", "tbody tr"), ("/tasks/code", "table.figures tbody tr")):
                page.goto(visitor.url + path)
                heights = page.eval_on_selector_all(rows, "all => all.map(one => one.offsetHeight)")
                assert heights, path
                assert not is_phone_in_the_dark or max(heights) < 100, f"{path}: a card a row"
            page.goto(visitor.url + "/report")
            page.get_by_role("link", name="Reports").click()
            expect(page.get_by_role("heading", name="Reports")).to_be_visible()
            page.goto(visitor.url + "/tasks/code")
            expect(page.locator("svg.plot .band")).to_have_count(2)
            page.goto(visitor.url)
            expect(page.locator(".event.fault")).to_contain_text("open since")


def test_a_person_goes_through_it_by_keyboard(browser: Browser, database: Database, visitor: Visitor) -> None:
    fill(database, plans(3), now=datetime.now(UTC))
    with opened(browser) as page:
        settle(page, visitor.url + "/tasks")
        page.goto(visitor.url)
        page.keyboard.press("g")
        page.keyboard.press("t")
        page.wait_for_url("**/tasks")  # until it is loaded: its script takes the keys
        expect(page.get_by_role("heading", name="Tasks")).to_be_visible()
        page.keyboard.press("j")
        page.keyboard.press("j")
        expect(page.locator("tbody tr.at")).to_contain_text("sql")
        page.keyboard.press("Enter")
        page.wait_for_url("**/tasks/sql")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("g")
        page.keyboard.press("j")
        page.wait_for_url("**/jobs")
        expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
        page.keyboard.press("/")
        expect(page.get_by_role("searchbox", name="Id of a job")).to_be_focused()


def test_an_open_page_reads_itself_anew_but_what_is_chosen_and_not_sent_yet_stays(
    browser: Browser, database: Database, visitor: Visitor
) -> None:
    with opened(browser) as page:
        page.goto(visitor.url + "/jobs")
        expect(page.get_by_text("No worker has claimed a job yet.")).to_be_visible()
        claim(database, "a-new-job", owner="w1")
        expect(page.get_by_role("link", name="a-new-job")).to_be_visible(timeout=WAIT_MS)
        page.get_by_label("Status").select_option("failed")
        page.locator("h1").click()  # nothing has the focus any more
        readings = list[str]()
        page.on("request", lambda request: readings.append(request.url))
        page.evaluate("readAnew()")  # what the page's clock does
        assert readings == []
        expect(page.get_by_label("Status")).to_have_value("failed")
        page.get_by_label("Status").select_option("")
        page.locator("h1").click()
        page.evaluate("readAnew()")
        assert readings != []


def test_it_works_and_filters_jobs_without_its_script_and_on_a_phone(
    browser: Browser, database: Database, visitor: Visitor
) -> None:
    fill(database, plans(3), now=datetime.now(UTC))
    visitor.read("/tasks.json")
    with opened(browser, has_script=False, is_phone=True) as page:
        page.goto(visitor.url)
        page.get_by_role("link", name="Tasks", exact=True).click()
        page.get_by_role("searchbox").fill("sq")
        page.get_by_role("button", name="Find").click()
        page.get_by_role("link", name="sql").click()
        expect(page.get_by_role("heading", name="sql", exact=True)).to_be_visible()
        page.goto(visitor.url + "/jobs")
        page.get_by_label("Task").fill("sql")
        page.get_by_label("Status").select_option("succeeded")
        page.get_by_label("Claimed since").fill("1h")
        page.get_by_role("button", name="Filter").click()
        page.wait_for_url("**/jobs?task=sql&status=succeeded&since=1h**")
        assert overhang(page) == 0
        rows = page.locator("tbody tr")
        assert rows.count() > 0
        for row in rows.all():
            expect(row.locator("[data-label=Task]")).to_have_text("sql")
            expect(row.locator("[data-label=Status]")).to_have_text("succeeded")
            expect(row.locator("[data-label=Tokens]")).to_have_text(re.compile(r"^\d+ tokens$"))
            expect(row.locator("[data-label=Latency]")).to_have_text(re.compile(r"^\d+\.\d\d\ss$"))
            expect(row.locator("[data-label=Decoded]")).to_have_text(
                re.compile(r"^(vanilla|lookup k=\d+asked in \d+% of its rounds)$")
            )


def test_a_person_signs_in_and_acknowledges(browser: Browser, database: Database, database_url: SecretStr) -> None:
    fill(database, plans(1), now=datetime.now(UTC))
    (event,) = DriftEventStore(database).open_events()
    with console(database_url, password=SecretStr(PASSWORD)) as visitor, opened(browser) as page:
        page.goto(f"{visitor.url}/drift/{event.id}")
        page.get_by_label("Name").fill("alphaloop")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_label("What they do about it").fill("a new draft is in training")
        page.get_by_role("button", name="Acknowledge").click()
        expect(page.get_by_text("took note of it")).to_be_visible()
        page.get_by_role("link", name="Drift", exact=True).click()
        page.locator("summary").click()
        page.get_by_label("What they do about it").fill("the kernel is being looked at")
        page.get_by_role("button", name="Acknowledge").click()
        told = re.compile(r"took note of it \S+\s\S+ ago: the kernel is being looked at")
        expect(page.get_by_text(told)).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
