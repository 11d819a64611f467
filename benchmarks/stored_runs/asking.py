"""How long queries take, and how the database carries them out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.errors import QueryCanceled

from benchmarks.stored_runs.questions import Question

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
