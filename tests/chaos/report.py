"""The report of a run: a table of phases, what the oracle found, and one line of JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.chaos.faults import FAULTS
from tests.chaos.phases import PhaseReport
from tests.chaos.promises import Promise, Violation

_MOST_SHOWN: Final = 30


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run showed."""

    seed: int
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
        figures = {name: value for name, value in asdict(self).items() if name != "violations"}
        return json.dumps({"sound": self.is_sound, "violations": dict(broken), **figures})


def show(report: RunReport, console: Console) -> None:
    """Print the tables, what was broken, and the JSON."""
    console.print(_phases(report))
    console.print(_promises(report))
    for violation in report.violations[:_MOST_SHOWN]:
        console.print(f"  {violation.promise.name.lower()}: {violation.what}", markup=False)
    if len(report.violations) > _MOST_SHOWN:
        console.print(f"  … and {len(report.violations) - _MOST_SHOWN} more")
    peak = max(report.peak_bytes.values(), default=0) >> 20
    console.print(
        f"{report.num_jobs} jobs in {report.seconds:.0f} s, seed {report.seed}: {report.num_rows} rows, "
        f"{report.num_results} results, of which {report.num_repeated_results} repeat an earlier one, "
        f"{report.num_letters} dead letters, {report.num_failures} failures tried again, {report.num_chunks} chunks of "
        f"{report.num_ended_streams} streams, {report.num_starts} starts of workers, {report.num_measured} runs of "
        f"the scheduler, {report.num_cut_connections} connections cut, {peak} MiB in the largest process"
    )
    console.print(", ".join(f"{number} {status}" for status, number in sorted(report.num_by_status.items())))
    print(report.as_json(), flush=True)


def _phases(report: RunReport) -> Table:
    table = Table(title="phases")
    for heading in ("fault", "what is done", "lasts s", "sent", "ended", "starts", "ended by themselves", "sick"):
        table.add_column(heading)
    table.add_column("workers said")
    for heading in ("held", "first outcome after s", "first result", "caught up", "backlog", "lost", "twice"):
        table.add_column(heading, justify="right")
    for phase in report.phases:
        table.add_row(
            phase.name,
            "; ".join(FAULTS[name].what for name in phase.faults),
            f"{phase.fault_s:.0f}",
            str(phase.num_sent),
            str(phase.num_ended),
            str(phase.num_started),
            ended(phase),
            str(phase.num_sick),
            said(phase),
            f"{phase.num_held}, {phase.num_waiting} waiting",
            seconds(phase.first_outcome_s),
            seconds(phase.first_result_s),
            seconds(phase.caught_up_s),
            str(phase.backlog),
            str(phase.num_lost),
            str(phase.num_twice),
        )
    return table


def _promises(report: RunReport) -> Table:
    table = Table(title="promises")
    table.add_column("promise")
    table.add_column("broken", justify="right")
    broken = Counter(violation.promise for violation in report.violations)
    for promise in Promise:
        table.add_row(promise.value, str(broken[promise]))
    return table


def ended(phase: PhaseReport) -> str:
    """How many processes ended by themselves, by exit code."""
    return ", ".join(f"{number} with {code}" for code, number in sorted(phase.ended_themselves.items())) or "0"


def said(phase: PhaseReport) -> str:
    """What /readyz of the workers said while the fault lasted, the most frequent first."""
    num_looks = sum(phase.said.values())
    return "; ".join(
        f"{what} {number / num_looks:.0%}"
        for what, number in sorted(phase.said.items(), key=lambda item: (-item[1], item[0]))
    )


def seconds(found: float | None) -> str:
    """A time that may not have been seen within the time allowed."""
    return "not seen" if found is None else f"{found:.1f}"
