"""The queries of the documents, read from their pages: what a reader copies is what is measured and tested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
#: The pages with SQL for people; the cookbook first.
PAGES: Final = (
    "docs/reference/sql.md",
    *sorted(
        page.relative_to(ROOT).as_posix()
        for page in (ROOT / "docs").rglob("*.md")
        if "```sql" in page.read_text(encoding="utf-8") and page.name != "sql.md"
    ),
)
_HEADING: Final = re.compile(r"^#{2,3} (.+)$", re.MULTILINE)
_BLOCK: Final = re.compile(r"^```sql\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Question:
    """A block of SQL, and what it answers: the heading above it."""

    page: str
    title: str
    sql: str

    @property
    def is_query(self) -> bool:
        """Whether it only reads."""
        return self.sql.lstrip().upper().startswith(("SELECT", "WITH"))

    @property
    def name(self) -> str:
        """Page and heading: unique."""
        return f"{Path(self.page).name}: {self.title}"


def questions(page: str) -> list[Question]:
    """The blocks of a page, in order. A second block under one heading gets a number."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[Question] = []
    for block in _BLOCK.finditer(text):
        heading = [match[1] for match in _HEADING.finditer(text, 0, block.start())][-1]
        before = sum(re.sub(r" \(\d+\)$", "", one.title) == heading for one in found)
        found.append(Question(page, f"{heading} ({before + 1})" if before else heading, block[1]))
    return found


def all_questions() -> list[Question]:
    """Those of every page."""
    return [question for page in PAGES for question in questions(page)]
