"""The figures of a run on a page of the documentation, between two marks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.chaos.report import RunReport, ended, said, seconds
from tests.chaos.size import Size

#: What is written where: the phases of a run, or outages one after the other.
PHASES: Final = "last run"
OUTAGES: Final = "last outages"


def write(page: Path, report: RunReport, size: Size, *, where: str = PHASES) -> None:
    """Replace what stands between the two marks of `where` on `page`. Raises ValueError without both marks."""
    begin_mark, end_mark = f"<!-- {where} -->", f"<!-- end of {where} -->"
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise ValueError(f"expected {begin_mark} and {end_mark} in {page}")
    table = _outages(report) if where == OUTAGES else _phases(report)
    figures = "\n".join([_summary(report, size), "", *table])
    page.write_text(f"{before}{begin_mark}\n{figures}\n{end_mark}{after}", encoding="utf-8")


def _summary(report: RunReport, size: Size) -> str:
    peak = max(report.peak_bytes.values(), default=0) >> 20
    settled = ", ".join(f"{seconds(one)} s" for one in report.settled_s)
    loads = ", ".join(f"{load:.1f}" for load in report.load)
    return (
        f"Seed {report.seed}, {size.num_brokers} brokers, {size.num_workers} workers, {os.cpu_count()} cores, "
        f"load {loads} (start, end), session {size.session_timeout_s:.0f} s, lease {size.lease_s:.0f} s: "
        f"{report.num_jobs:,} jobs in {report.seconds:.0f} s. {report.num_results:,} results, of which "
        f"{report.num_repeated_results:,} repeat an earlier one of their job; {report.num_letters} dead letters; "
        f"{report.num_failures} failures tried again; {report.num_chunks:,} chunks of {report.num_ended_streams:,} "
        f"streams; {_by_status(report)}; {report.num_starts} starts of workers; "
        f"{report.num_measured} runs of the scheduler; {report.num_cut_connections} "
        f"connections cut; {peak} MiB in the largest process; settled {settled} after the last job; "
        f"a full disk {'was full' if report.has_small_disk else 'was played by triggers'}. "
        f"**Promises broken: {len(report.violations)}.**"
    )


def _phases(report: RunReport) -> Iterator[str]:
    yield (
        "| phase | fault lasts s | sent meanwhile | ended meanwhile | starts | ended by themselves | restarted as sick "
        "| first outcome after s | caught up after s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for phase in report.phases:
        yield (
            f"| {phase.name} | {phase.fault_s:.0f} | {phase.num_sent} | {phase.num_ended} | {phase.num_started} "
            f"| {ended(phase)} | {phase.num_sick} | {seconds(phase.first_outcome_s)} | {seconds(phase.caught_up_s)} |"
        )


def _outages(report: RunReport) -> Iterator[str]:
    yield (
        "| outage | lasts s | what the workers say in `/readyz` | messages held by one worker | ended by themselves "
        "| sent meanwhile | ended meanwhile | longest without a result s | first result after s | caught up after s "
        "| lost | twice |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for phase in report.phases:
        yield (
            f"| {phase.name} | {phase.fault_s:.0f} | {said(phase)} | {phase.num_held} | {ended(phase)} "
            f"| {phase.num_sent} | {phase.num_ended} | {phase.silence_s:.1f} | {seconds(phase.first_result_s)} "
            f"| {seconds(phase.caught_up_s)} | {phase.num_lost} | {phase.num_twice} |"
        )


def _by_status(report: RunReport) -> str:
    return ", ".join(f"{number:,} {status}" for status, number in sorted(report.num_by_status.items()))
