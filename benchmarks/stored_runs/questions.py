"""The queries of the documents, read from their pages: what a reader copies is what is measured and tested.

How long each takes.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psycopg
from psycopg.errors import QueryCanceled

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


LIMIT_S: Final = 60


@dataclass(frozen=True, slots=True)
class Asked:
    """A query's figures, medians of the warm ones; None where it took longer than `LIMIT_S`."""

    name: str
    ms: float | None
    cpu_ms: float | None  #: the server's processor time; on a machine with other work, what `ms` would be without it
    num_rows: int | None


def ask(connection: psycopg.Connection, question: Question, repeats: int) -> Asked:
    """Ask a question `repeats` times behind one that warms the caches, and read every row."""
    times: list[float] = []
    cpu: list[float] = []
    num_rows = 0
    try:
        for _ in range(repeats + 1):
            began, cpu_before = time.perf_counter(), cpu_ms(connection)
            num_rows = len(connection.execute(question.sql.encode()).fetchall())
            times.append(1000 * (time.perf_counter() - began))
            cpu.append(cpu_ms(connection) - cpu_before)
    except QueryCanceled:
        return Asked(question.name, None, None, None)
    return Asked(question.name, statistics.median(times[1:]), statistics.median(cpu[1:]), num_rows)


def cpu_ms(connection: psycopg.Connection) -> float:
    """Processor time of the connection's server process so far; it runs on this machine."""
    text = Path(f"/proc/{connection.info.backend_pid}/schedstat").read_text(encoding="ascii")
    return int(text.split()[0]) / 1e6
