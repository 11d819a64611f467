"""The queries of the documents, read from their pages: what a reader copies is what is measured and tested.

How long each takes, and how the database carries it out.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
#: Nodes of a plan that are printed: those with the most cost of their own.
TOP_NODES: Final = 5


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


def plan(connection: psycopg.Connection, query: str, parameters: Any = None) -> str:
    """The nodes with the most cost of their own, then the whole plan, with the rows that there really were."""
    explained = f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, {{}}) {query}".encode()
    try:
        ((tree,),) = connection.execute(explained.replace(b"{}", b"FORMAT JSON"), parameters).fetchall()
        lines = connection.execute(explained.replace(b"{}", b"FORMAT TEXT"), parameters).fetchall()
    except QueryCanceled:
        return f"longer than {LIMIT_S} s"
    nodes = sorted(_own_costs(tree[0]["Plan"]), reverse=True)[:TOP_NODES]
    top = [f"{cost:>12,.0f}  {what}" for cost, what in nodes]
    return "\n".join([*top, "", *(line for (line,) in lines)])


def _own_costs(node: dict[str, Any]) -> list[tuple[float, str]]:
    """Each node's cost without that of the nodes below it, and what it is."""
    below: Sequence[dict[str, Any]] = node.get("Plans", ())
    own = max(0.0, node["Total Cost"] - sum(one["Total Cost"] for one in below))
    about = [node["Node Type"], node.get("Index Name") or node.get("Relation Name") or ""]
    about.append(f"{node['Actual Rows']:,.0f} rows x {node['Actual Loops']:,.0f}")
    return [(own, "  ".join(filter(None, about))), *(cost for one in below for cost in _own_costs(one))]
