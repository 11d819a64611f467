"""The drift report: text and page, accounts, and what changed since the last report."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest

from alphaloop.acceptance import Interval
from alphaloop.errors import ConfigError
from alphaloop.experiment.estimate import Verdict
from alphaloop.measurements import DriftSubject
from alphaloop.server_identity import ServerIdentity
from alphaloop.store.drift import EventState, Incident, IncidentKind, KnownIncident, PastState
from alphaloop.store.reports import ReportHeading
from alphaloop.store.spending import Spending
from alphaloop.store.workers import ServerLife
from alphaloop.wording import money
from scheduler.report.build import cost_line, gaps
from scheduler.report.data import ChangeKind, DriftReport
from scheduler.report.pages import (
    drop_reports,
    page_name,
    render_index,
    render_page,
    render_text,
    write_index,
    write_report,
)
from scheduler.report.wording import (
    MAX_GAPS,
    changes_between,
    cost_of_all,
    cost_of_jobs,
    freshness,
    gap_lines,
    probe_spend,
    saved,
)
from tests.fixtures.reports import AT, NASTY, empty, full, task_line
from tests.fixtures.runs import task_speedup


class Page(HTMLParser):
    """Tags of a page, checked for balance."""

    VOID = frozenset({"meta", "wbr", "path", "use", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.mark.parametrize("report", [full(), empty()], ids=["full", "empty"])
def test_the_page_is_whole_and_self_contained(report: DriftReport) -> None:
    html = render_page(report)
    page = Page(html)
    assert page.open == []
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    assert not re.search(r"@import|url\(\s*['\"]?https?:|(?:src|href)\s*=\s*['\"]https?:", html)
    assert ("viewport", "width=device-width, initial-scale=1") in {
        (attrs.get("name"), attrs.get("content")) for tag, attrs in page.tags if tag == "meta"
    }


def test_plots_are_light_or_dark_with_their_page() -> None:
    html = render_page(full())
    plots = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert not re.findall(r"(?:fill|stroke|style)\b", plots), "their colours are the style's"
    assert set(re.findall(r"\.plot[^{]*\{[^}]*?(?:fill|stroke): ([^;]+);", html)) <= {
        "none",
        *(f"var(--{name})" for name in ("ink", "muted", "line", "blue", "green", "grey", "paper", "amber-line")),
    }
    variables = set(re.findall(r"var\((--[a-z-]+)\)", html))
    for colours in re.findall(r":root \{(.*?)\}", html, re.DOTALL):
        assert variables <= set(re.findall(r"(--[a-z-]+):", colours)), "each colour is there in light and in dark"
    assert len(re.findall(r":root \{", html)) == 2
    assert "@media print" in html


def test_what_comes_from_outside_is_escaped() -> None:
    html = render_page(full())
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_plots_have_a_text_for_those_who_cannot_see_them() -> None:
    labels = [attrs.get("aria-label") for tag, attrs in Page(render_page(full())).tags if tag == "svg"]
    course, reliability = map(str, labels)
    assert "code: traffic 0.50 to 0.50, probes 0.50 to 0.50, target, draft changed 2026-11-21 11:00 UTC" in course
    assert "code 0.90, 1 of 2 held" in reliability


@pytest.mark.parametrize("report", [full(), empty()], ids=["full", "empty"])
def test_the_same_report_gives_the_same_bytes(report: DriftReport) -> None:
    again = DriftReport.model_validate_json(report.model_dump_json())
    assert render_page(again) == render_page(report)
    assert render_text(again) == render_text(report)


def test_the_pooled_alpha_stands_with_its_k() -> None:
    report = full(("code",))
    assert re.search(r"^code .* 0\.72 \(small, k up to 8\)$", render_text(report), re.MULTILINE), "pooled α with its k"
    assert '<td data-label="α">0.72<small>k up to 8</small></td>' in render_page(report)
    probed = report.tasks[0].model_copy(update={"acceptance_from": "probes", "acceptance_drafter": "tiny"})
    assert "0.72 (probes, tiny, k up to 8)" in render_text(report.model_copy(update={"tasks": (probed,)}))


def test_text_and_page_say_alike_why_no_probe_was_sent() -> None:
    report = full()
    for update, told in (
        ({"num_probe_sets": 0}, "No task has a probe set"),
        ({"probes_waiting": report.probes}, "None: all that were due wait for the budget."),
        ({}, "None was due: no drafter that can be measured lacks fresh evidence."),
    ):
        shown = report.model_copy(update={"probes": (), **update})
        for screen in (render_text(shown), render_page(shown)):
            assert told in screen
            assert ("None was due" in screen) is told.startswith("None was due")


def test_thirteen_tasks_are_all_in_the_text() -> None:
    names = tuple(f"task_{i}" for i in range(13))
    text = render_text(full(names))
    assert all(re.search(rf"^{name} ", text, re.MULTILINE) for name in names)
    assert "12 busiest tasks of 13" in render_page(full(names))


def test_the_files(tmp_path: Path) -> None:
    report = full()
    page = write_report(tmp_path / "reports", report, render_text(report), render_page(report))
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "drift-report-20261121T060000Z.html",
        "drift-report-20261121T060000Z.json",
        "drift-report-20261121T060000Z.txt",
        "latest.html",
    ]
    assert DriftReport.model_validate(json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))) == report


def heading(hours_ago: int, summary: str = NASTY) -> ReportHeading:
    return ReportHeading(AT - timedelta(hours=hours_ago), summary, 2, 1)


def test_the_index_lists_the_newest_reports_whose_pages_are_there(tmp_path: Path) -> None:
    for hours in (0, 1, 2):
        report = full().model_copy(update={"created_at": AT - timedelta(hours=hours)})
        write_report(tmp_path, report, render_text(report), render_page(report))
    (tmp_path / "drift-report-notes.html").write_text("not a report")
    headings = [heading(hours) for hours in range(5)]
    write_index(tmp_path, lambda pages: render_index(headings, pages))
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    names = [page_name(AT - timedelta(hours=hours)) for hours in (0, 1, 2)]
    links = [attrs["href"] for tag, attrs in Page(html).tags if tag == "a"]
    assert links == names, "the newest first"
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 3
    assert "not listed" not in html
    drop_reports(tmp_path, AT - timedelta(hours=1))
    write_index(tmp_path, lambda pages: render_index(headings, pages))
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert [attrs["href"] for tag, attrs in Page(html).tags if tag == "a"] == names[:2]


def test_two_reports_of_one_second_share_a_page_and_a_line() -> None:
    html = render_index([heading(0, "the newer"), heading(0, "the older")], [page_name(AT)])
    assert html.count("<a href=") == 1
    assert "the newer" in html


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("a file")
    with pytest.raises(ConfigError, match="reports"):
        write_index(tmp_path / "reports" / "inside", lambda _: "")
    with pytest.raises(ConfigError, match="reports") as caught:
        write_report(tmp_path / "reports", empty(), "", "")
    assert "data_dir" in (caught.value.hint or "")


NOW = datetime(2026, 11, 21, 6, tzinfo=UTC)
HOUR = timedelta(hours=1)
SPEEDUP = task_speedup(Interval(1.5, 1.2, 1.8), NOW - HOUR)


def test_a_hundred_device_seconds_at_half_as_fast_again_saved_fifty() -> None:
    found = SPEEDUP.saved_device_s
    assert (found.mean, found.low, found.high) == pytest.approx((50.0, 20.0, 80.0))
    lost = replace(SPEEDUP, speedup=Interval(0.8, 0.7, 0.9), verdict=Verdict.SLOWER).saved_device_s
    assert (lost.mean, lost.low, lost.high) == pytest.approx((-20.0, -30.0, -10.0))


def test_without_a_verdict_nothing_is_known() -> None:
    assert replace(SPEEDUP, speedup=None, verdict=Verdict.NO_VERDICT_YET).saved_device_s is None
    assert replace(SPEEDUP, verdict=Verdict.NO_VERDICT_YET).saved_device_s is None
    line = task_line("code").model_copy(update={"saved_device_s": None})
    assert saved(line) == "device time not known, 123,456 target passes in the last day"


def test_a_pause_that_is_too_long_is_a_gap_also_before_now() -> None:
    runs = [NOW - 9 * HOUR, NOW - 8 * HOUR, NOW - 4 * HOUR, NOW - 3 * HOUR]
    found = gaps(runs, NOW, 2 * HOUR)
    assert [(gap.begins, gap.ends) for gap in found] == [(runs[1], runs[2]), (runs[3], NOW)]
    assert gaps([], NOW, HOUR) == ()
    assert gaps([*runs[2:], NOW], NOW, 4 * HOUR) == ()


def test_the_newest_gaps_are_named() -> None:
    runs = [NOW - hours * HOUR for hours in range(60, -1, -3)]
    report = empty().model_copy(update={"gaps": gaps(runs, NOW, HOUR)})
    assert len(report.gaps) == 20
    assert len(gap_lines(report)) == MAX_GAPS
    assert gap_lines(report)[0] == "2026-11-21 03:00 UTC to 2026-11-21 06:00 UTC"


def test_the_spend_of_probes() -> None:
    assert probe_spend(full()) == "In the last day probes took 40 of 5,000 device seconds (0.8%)."
    assert probe_spend(empty()) == "In the last day probes took 0 of 0 device seconds."


def spending(num_jobs: int, num_tokens: int, device_s: float, cost: float | None) -> Spending:
    return Spending("code", num_jobs, 0, num_tokens, device_s, cost, 0)


def test_the_cost_of_jobs_is_their_device_time_at_the_price_of_a_device() -> None:
    found = cost_line(spending(200, 50_000, 1000.0, 1.0), Interval(mean=500.0, low=-100.0, high=900.0))
    assert (found.num_jobs, found.num_tokens, found.device_s) == (200, 50_000, 1000.0)
    assert found.per_1000_jobs == pytest.approx(5.0), "1,000 s cost 1 EUR, and are 200 jobs"
    assert found.per_million_tokens == pytest.approx(20.0)
    assert (found.saved.mean, found.saved.low, found.saved.high) == pytest.approx((0.5, -0.1, 0.9))


def test_without_a_price_a_job_or_a_verdict_there_is_no_amount() -> None:
    unpriced = cost_line(spending(200, 50_000, 1000.0, None), Interval(mean=1.0, low=0.0, high=2.0))
    assert (unpriced.device_s, unpriced.per_1000_jobs, unpriced.per_million_tokens, unpriced.saved) == (
        1000.0, None, None, None,
    )  # fmt: skip
    empty_handed = cost_line(spending(1, 0, 2.0, 0.002), None)
    assert empty_handed.per_1000_jobs == pytest.approx(2.0)
    assert (empty_handed.per_million_tokens, empty_handed.saved) == (None, None)


def test_amounts_are_readable_and_carry_their_currency() -> None:
    shown = [money(amount, "EUR") for amount in (1234.5, 0.0, 0.00123, 0.000069, 0.4, 0.999, -0.25, -12.0)]
    assert shown == [
        "1,234.50 EUR",
        "0.00 EUR",
        "0.0012 EUR",
        "0.000069 EUR",
        "0.40 EUR",
        "1.00 EUR",
        "-0.25 EUR",
        "-12.00 EUR",
    ]
    assert money(1.0, "") == "1.00"


def test_text_and_page_tell_the_same() -> None:
    report = full(tasks=("code",))
    told = "0.93 EUR per 1,000 jobs, 3.62 EUR per million tokens; saved 1.60 EUR [0.069 3.82] in the last day"
    assert cost_of_jobs(report.tasks[0], "EUR") == told
    text, page = (" ".join(shown.split()) for shown in (render_text(report), render_page(report)))
    assert told in text
    for its in (saved(report.tasks[0]), probe_spend(report), *gap_lines(report)):
        assert its in text
        assert its in page
    for part in ("0.93 EUR", "3.62 EUR", "saved 1.60 EUR [0.069 3.82] in the last day", cost_of_all(report)):
        assert part in page
    assert "5,000 device seconds, which cost 3.47 EUR, of which probes 0.028 EUR." in cost_of_all(report)
    assert "segment gold: 1,100 jobs, 4,001.5 device seconds, 2.78 EUR" in render_text(report)
    for part in ("gold", "4,001.5&nbsp;s", "2.78 EUR", "0.00035 EUR"):
        assert part in page


def test_without_a_price_text_and_page_say_which_setting_is_missing() -> None:
    unpriced = tuple(line.model_copy(update={"cost": None}) for line in full().spending)
    report = full().model_copy(update={"cost": None, "probe_cost": None, "spending": unpriced})
    for told in (render_text(report), render_page(report)):
        assert "No price is set: prices.per_hour" in told
        assert "per million tokens" not in told.lower()
        assert "EUR" not in told


SUBJECT = DriftSubject("code", "lookup", "r", "t")


def past(state: EventState, at: datetime, sentence: str = "It fell.", event_id: int = 7) -> PastState:
    return PastState(event_id, at, state, "draft_stale", sentence, "Ada", None)


def told(before: DriftReport, now: DriftReport) -> list[tuple[ChangeKind, str]]:
    return [(line.kind, line.sentence) for line in changes_between(before, now, [], [], []).lines]


def with_task(**update: object) -> DriftReport:
    return later(full(("code",)), tasks=(task_line("code").model_copy(update=update),))


def later(report: DriftReport, **update: object) -> DriftReport:
    return report.model_copy(update={"created_at": AT + HOUR, **update})


def with_verdict(verdict: Verdict, mean: float) -> DriftReport:
    bounds = Interval(mean=mean, low=mean - 0.02, high=mean + 0.02)
    measured = task_line("code").measured
    return with_task(measured=measured and measured.model_copy(update={"verdict": verdict, "speedup": bounds}))


def test_a_flag_has_one_line_with_all_that_became_of_it() -> None:
    states = [
        (SUBJECT, past(EventState.OPENED, AT + HOUR)),
        (SUBJECT, past(EventState.CONFIRMED, AT + 2 * HOUR)),
        (replace(SUBJECT, task="sql"), past(EventState.REOPENED, AT + HOUR, event_id=3)),
        (SUBJECT, past(EventState.CLOSED, AT + 3 * HOUR, "alpha_1 is steady again.")),
        (SUBJECT, past(EventState.ACKNOWLEDGED, AT + HOUR, event_id=9)),
    ]
    lines = changes_between(full(), later(full()), states, [], []).lines
    assert [line.sentence for line in lines] == [
        "code, lookup: flag 7 (draft stale) was opened, then confirmed, then closed: alpha_1 is steady again.",
        "sql, lookup: flag 3 (draft stale) was reopened.",
        "code, lookup: flag 9 (draft stale) was acknowledged by Ada.",
    ]


def test_a_server_that_came_back_as_another_is_named() -> None:
    identity = ServerIdentity("vllm-0.32.0", "m", None, 2048, ())
    life = ServerLife("plain", "t", "e", identity, "it answers as another model does", AT + HOUR, AT + HOUR)
    (line,) = changes_between(full(), later(full()), [], [], [life]).lines
    assert (line.kind, line.about) == (ChangeKind.SERVER, "plain")
    assert line.sentence == "endpoint plain: it answers as another model does."


def test_incidents_come_first() -> None:
    found = Incident(IncidentKind.CUT_SHORT, "sql", "", "", "t", "e", ("j",), "It ended early.", {})
    closed = [
        KnownIncident(1, found, AT - HOUR, AT + HOUR),
        KnownIncident(2, found, AT + HOUR / 2, AT + HOUR),
    ]
    now = later(full(), incidents=(full().incidents[0].model_copy(update={"opened_at": AT + HOUR}),))
    lines = changes_between(full(), now, [(SUBJECT, past(EventState.OPENED, AT + HOUR))], closed, []).lines
    assert [line.kind for line in lines] == [ChangeKind.INCIDENT] * 3 + [ChangeKind.FLAG]
    assert "incident opened, wrong text" in lines[0].sentence
    assert "incident closed, cut short" in lines[1].sentence
    assert "incident opened and closed, cut short" in lines[2].sentence


@pytest.mark.parametrize(
    ("update", "now"),
    [
        ({"num_draft_tokens": 4}, "with lookup k=4"),
        ({"drafter": "small"}, "with small k=8"),
        ({"mode": "vanilla", "num_draft_tokens": 0}, "vanilla"),
    ],
)
def test_a_choice_that_changed(update: dict[str, object], now: str) -> None:
    sentence = f"The next job of code would be decoded {now} at 4 running, before with lookup k=8."
    assert told(full(("code",)), with_task(**update)) == [(ChangeKind.CHOICE, sentence)]


def test_a_vanilla_task_whose_best_tried_drafter_changed_is_decoded_as_before() -> None:
    before = with_task(mode="vanilla", num_draft_tokens=0, drafter="lookup")
    assert told(before, with_task(mode="vanilla", num_draft_tokens=0, drafter="small")) == []


def test_a_new_task() -> None:
    unmeasured = task_line("sql").model_copy(update={"measured": None})
    (line,) = told(full(("code",)), later(full(("code", "sql")), tasks=(with_task().tasks[0], unmeasured)))
    assert line == (
        ChangeKind.CHOICE,
        "The next job of sql would be decoded with lookup k=8 at 4 running, and the task was not in the last report.",
    )


def test_a_speed_up_that_crossed_one_became_known_or_is_lost() -> None:
    faster, slower = with_verdict(Verdict.FASTER, 1.5), with_verdict(Verdict.SLOWER, 0.8)
    none = with_task(measured=None)
    assert told(faster, slower) == [
        (ChangeKind.SPEEDUP, "code: measured speed-up 0.80 [0.78 0.82], slower; before faster.")
    ]
    assert told(none, faster)[0][1].endswith("1.50 [1.48 1.52], faster; before no verdict yet.")
    assert told(faster, none) == [
        (ChangeKind.SPEEDUP, "code: the measured speed-up is not known any more; before faster.")
    ]
    assert told(faster, with_verdict(Verdict.FASTER, 1.6)) == [], "the same verdict"


def test_a_draft_whose_status_changed() -> None:
    now = later(full())
    (draft,) = now.drafts
    before = full().model_copy(update={"drafts": (draft.model_copy(update={"status": "active", "status_reason": ""}),)})
    ((kind, sentence),) = told(before, now)
    assert kind is ChangeKind.DRAFT
    assert sentence.startswith(
        f"lookup {draft.draft_revision} for target {draft.target_revision} is stale, was active: "
    )


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (None, "No job of traffic was ever decoded."),
        (AT - timedelta(minutes=5), "The last job was decoded at 2026-11-21 05:55 UTC."),
        (AT - 3 * HOUR, "No job was decoded for 3 h: the last one at 2026-11-21 03:00 UTC."),
        (AT - 72 * HOUR, "No job was decoded for 3 days: the last one at 2026-11-18 06:00 UTC."),
    ],
)
def test_a_report_says_how_old_its_newest_job_is(last: datetime | None, sentence: str) -> None:
    found = freshness(empty().model_copy(update={"last_decoded_at": last, "next_due": AT + HOUR}))
    assert found[0] == sentence
    assert found[1] == "The next run is due at 2026-11-21 07:00 UTC: from then on this report is old."
