"""The report of a run: a table of phases, what the oracle found, one line of JSON, and a page of the documentation."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from tests.chaos.ledger import Promise, Violation
from tests.chaos.phases import PhaseReport
from tests.chaos.size import Size

_MOST_SHOWN: Final = 30
#: What is written where on the page: the phases of a run, or outages one after the other.
PHASES: Final = "last run"
OUTAGES: Final = "last outages"


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run showed."""

    seed: int
    size: Size
    seconds: float
    phases: tuple[PhaseReport, ...]
    violations: tuple[Violation, ...]
    has_small_disk: bool  #: a full disk was a full file system; else triggers played it
    settled_s: tuple[float | None, ...]  #: of each part: from its last job until nothing was left; None: never
    num_jobs: int
    num_rows: int
    num_results: int
    num_repeated_results: int
    num_asked_again: int
    num_letters: int
    num_by_status: dict[str, int]  #: jobs
    num_failures: int  #: tries that were followed by another one
    num_chunks: int
    num_ended_streams: int
    num_commits: int  #: changes of committed offsets that the watcher saw
    num_starts: int  #: of worker processes
    num_measured: int  #: runs of the scheduler
    num_cut_connections: int
    peak_bytes: dict[str, int]
    num_log_bytes: int
    load: tuple[float, float]  #: of the machine in the last minute: when the run began, when its last job had ended

    @property
    def is_sound(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations

    def as_json(self) -> str:
        """Everything, in one line."""
        broken = Counter(violation.promise.name.lower() for violation in self.violations)
        figures = {name: value for name, value in asdict(self).items() if name not in ("violations", "size")}
        return json.dumps({"sound": self.is_sound, "violations": dict(broken), **figures})


def _ended(phase: PhaseReport) -> str:
    """How many processes ended by themselves, by exit code."""
    return ", ".join(f"{number} with {code}" for code, number in sorted(phase.ended_themselves.items())) or "0"


def _said(phase: PhaseReport) -> str:
    """What /readyz of the workers said while the fault lasted, the most frequent first."""
    num_looks = sum(phase.said.values())
    most_first = sorted(phase.said.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(f"{what} {number / num_looks:.0%}" for what, number in most_first)


def _seconds(found: float | None) -> str:
    """A time that may not have been seen within the time allowed."""
    return "not seen" if found is None else f"{found:.1f}"


_COLUMNS: Final[Mapping[str, Callable[[PhaseReport], object]]] = {
    "phase": lambda one: " + ".join(one.faults),
    "lasts s": lambda one: f"{one.fault_s:.0f}",
    "what the workers say in `/readyz`": _said,
    "messages held by one worker": lambda one: one.num_held,
    "jobs waiting in one worker": lambda one: one.num_waiting,
    "starts": lambda one: one.num_started,
    "ended by themselves": _ended,
    "restarted as sick": lambda one: one.num_sick,
    "sent meanwhile": lambda one: one.num_sent,
    "ended meanwhile": lambda one: one.num_ended,
    "longest without a result s": lambda one: f"{one.silence_s:.1f}",
    "first outcome after s": lambda one: _seconds(one.first_outcome_s),
    "first result after s": lambda one: _seconds(one.first_result_s),
    "caught up after s": lambda one: _seconds(one.caught_up_s),
    "backlog": lambda one: one.backlog,
    "lost": lambda one: one.num_lost,
    "twice": lambda one: one.num_twice,
}
_LEFT_OUT: Final = {
    PHASES: ("what the", "messages", "jobs waiting", "longest", "first result", "backlog", "lost", "twice"),
    OUTAGES: ("jobs waiting", "starts", "restarted", "first outcome", "backlog"),
}


def show(report: RunReport, console: Console) -> None:
    """Print the tables, what was broken, and the JSON."""
    broken = Counter(violation.promise for violation in report.violations)
    lines = [*_table(report, _COLUMNS), *(f"broken {broken[promise]} times: {promise}" for promise in Promise)]
    lines += [f"  {violation.promise.name.lower()}: {violation.what}" for violation in report.violations[:_MOST_SHOWN]]
    if len(report.violations) > _MOST_SHOWN:
        lines.append(f"  … and {len(report.violations) - _MOST_SHOWN} more")
    console.print("\n".join([*lines, _summary(report)]), markup=False, soft_wrap=True)
    print(report.as_json(), flush=True)


def write(page: Path, report: RunReport, where: str) -> None:
    """Replace what stands between the two marks of `where` on `page`. Raises ValueError without both marks."""
    begin_mark, end_mark = f"<!-- {where} -->", f"<!-- end of {where} -->"
    before, begin, rest = page.read_text(encoding="utf-8").partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise ValueError(f"expected {begin_mark} and {end_mark} in {page}")
    columns = (name for name in _COLUMNS if not name.startswith(_LEFT_OUT[where]))
    figures = "\n".join([_summary(report), "", *_table(report, columns)])
    page.write_text(f"{before}{begin_mark}\n{figures}\n{end_mark}{after}", encoding="utf-8")


def _table(report: RunReport, columns: Iterable[str]) -> list[str]:
    names = list(columns)
    rows = [[str(_COLUMNS[name](phase)) for name in names] for phase in report.phases]
    return [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows)]


def _summary(report: RunReport) -> str:
    size, peak = report.size, max(report.peak_bytes.values(), default=0) >> 20
    return (
        f"Seed {report.seed}, {size.num_brokers} brokers, {size.num_workers} workers, {os.cpu_count()} cores, "
        f"load {', '.join(f'{load:.1f}' for load in report.load)} (start, end), "
        f"session {size.session_timeout_s:.0f} s, lease {size.lease_s:.0f} s: "
        f"{report.num_jobs:,} jobs in {report.seconds:.0f} s. {report.num_results:,} results, of which "
        f"{report.num_repeated_results:,} repeat an earlier one of their job; {report.num_letters} "
        f"dead letters; {report.num_failures} failures tried again; {report.num_chunks:,} chunks of "
        f"{report.num_ended_streams:,} streams; "
        f"{', '.join(f'{number:,} {status}' for status, number in sorted(report.num_by_status.items()))}; "
        f"{report.num_starts} starts of workers; {report.num_measured} runs of the scheduler; "
        f"{report.num_cut_connections} connections cut; {peak} MiB in the largest process; "
        f"settled {', '.join(f'{_seconds(one)} s' for one in report.settled_s)} after the last job; "
        f"a full disk {'was full' if report.has_small_disk else 'was played by triggers'}. "
        f"**Promises broken: {len(report.violations)}.**"
    )
