"""Processor time of a process and all that it started: unlike the clock, it hardly depends on what else runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Of the process and its living descendants, in user and kernel mode. A process that has ended counts nothing."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The name may hold spaces and brackets: what counts stands behind the last bracket.
                fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(folder.name))
            seconds[int(folder.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    waiting, total = [pid], 0.0
    while waiting:
        one = waiting.pop()
        total += seconds.get(one, 0.0)
        waiting += children.get(one, [])
    return total
