"""Processor time of a process and all that it started: unlike the clock, it hardly depends on what else runs."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from alphaloop.embedded.process import ChildProcess

_IDLE: Final = 0.1  #: of a core
_LOOK_S: Final = 0.5
_PATIENCE_S: Final = 60.0
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


def wait_until_idle(processes: Collection[ChildProcess]) -> None:
    """Until they and all below them take less than a tenth of a core. Raises TimeoutError after a minute."""
    pids = [process.pid for process in processes if process.pid is not None]
    began, before = time.monotonic(), sum(map(cpu_seconds, pids))
    while True:
        time.sleep(_LOOK_S)
        now = sum(map(cpu_seconds, pids))
        if now - before < _IDLE * _LOOK_S:
            return
        if time.monotonic() - began > _PATIENCE_S:
            raise TimeoutError(f"an inference server without requests is still busy after {_PATIENCE_S:g} s")
        before = now
