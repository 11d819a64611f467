"""The report: as data, as text for a terminal, and as one self-contained page."""

from __future__ import annotations

from scheduler.report.build import build_report
from scheduler.report.changes import changes_between
from scheduler.report.data import Report
from scheduler.report.files import write_index, write_report
from scheduler.report.index import render_index
from scheduler.report.page import render_page
from scheduler.report.text import render_text

__all__ = [
    "Report",
    "build_report",
    "changes_between",
    "render_index",
    "render_page",
    "render_text",
    "write_index",
    "write_report",
]
