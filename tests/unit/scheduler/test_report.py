"""The report: the same bytes twice, nothing fetched, everything escaped, and lines that fit."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path

import pytest

from alphaloop.errors import ConfigError
from alphaloop.store.reports import ReportHeading
from scheduler.report.data import DriftReport
from scheduler.report.pages import (
    drop_reports,
    page_name,
    render_index,
    render_page,
    render_text,
    write_index,
    write_report,
)
from tests.fixtures.reports import AT, NASTY, empty, full


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
        *(f"var(--{name})" for name in ("ink", "muted", "line", "blue", "green", "grey", "paper")),
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
    assert re.search(r"^code .* 0\.72 \(small, k 3-8\)$", render_text(report), re.MULTILINE), "pooled α with its k"
    assert '<td data-label="α">0.72<small>k 3-8</small></td>' in render_page(report)
    probed = report.tasks[0].model_copy(update={"acceptance_from": "probes", "acceptance_drafter": "tiny"})
    assert "0.72 (probes, tiny, k 3-8)" in render_text(report.model_copy(update={"tasks": (probed,)}))


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
