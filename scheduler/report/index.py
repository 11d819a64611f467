"""The index of past reports in the folder of reports: `index.html`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.pages.templates import environment
from alphaloop.store.reports import ReportHeading
from scheduler.report.files import page_name
from scheduler.report.wording import moment

#: Reports that the index lists.
MAX_ENTRIES: Final = 200


@dataclass(frozen=True, slots=True)
class _Entry:
    heading: ReportHeading
    name: str  #: of the page's file


def render_index(headings: Sequence[ReportHeading], pages: Collection[str]) -> str:
    """The index as HTML: of `headings`, the newest first, those whose page is among the file names `pages`.

    It lists at most MAX_ENTRIES and counts the other pages.
    """
    present = frozenset(pages)
    by_name = {page_name(one.created_at): one for one in reversed(headings)}
    entries = [_Entry(one, name) for name, one in reversed(by_name.items()) if name in present][:MAX_ENTRIES]
    page = environment("scheduler.report").get_template("index.html.j2")
    return page.render(entries=entries, num_others=len(present) - len(entries), moment=moment)
