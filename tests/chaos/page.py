"""The figures of a run on a page of the documentation, between two marks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.chaos.report import RunReport, ended, seconds
from tests.chaos.size import Size

BEGIN: Final = "<!-- last run -->"
END: Final = "<!-- end of last run -->"


def write(page: Path, report: RunReport, size: Size) -> None:
    """Replace what stands between the marks of `page`. Raises ValueError without both marks."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END} in {page}")
    figures = "\n".join(_lines(report, size))
    page.write_text(f"{before}{BEGIN}\n{figures}\n{END}{after}", encoding="utf-8")


def _lines(report: RunReport, size: Size) -> Iterator[str]:
    peak = max(report.peak_bytes.values(), default=0) >> 20
    settled = ", ".join(f"{seconds(one)} s" for one in report.settled_s)
    yield (
        f"Seed {report.seed}, {size.num_brokers} brokers, {size.num_workers} workers, {os.cpu_count()} cores: "
        f"{report.num_jobs:,} jobs in {report.seconds:.0f} s. {report.num_results:,} results, of which "
        f"{report.num_repeated_results:,} repeat an earlier one of their job; {report.num_letters} dead letters; "
        f"{report.num_failures} failures tried again; {report.num_chunks:,} chunks of {report.num_ended_streams:,} "
        f"streams; {_by_status(report)}; {report.num_starts} starts of workers; {report.num_cut_connections} "
        f"connections cut; {peak} MiB in the largest worker; settled {settled} after the last job. "
        f"**Promises broken: {len(report.violations)}.**"
    )
    yield ""
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


def _by_status(report: RunReport) -> str:
    return ", ".join(f"{number:,} {status}" for status, number in sorted(report.num_by_status.items()))
