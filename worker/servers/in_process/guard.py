"""Ends the processes of vLLM when the worker has ended, even by kill -9: they would keep the memory of the GPU.

Run as a script by `Guard`, with the standard library only. Standard input is a pipe from the worker: when it closes,
every process whose environment has the mark is killed. vLLM's processes inherit the mark from the worker, which sets
it after its own start and so does not carry it in /proc.

    python -I -S guard.py MARK
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

#: The environment variable of the mark.
NAME = "STARTED_BY_ALPHALOOP_WORKER"
_MOST_LOOKS = 50
_BETWEEN_S = 0.1
_END_S = 10.0


class Guard:
    """Stands by until `close`, or until this process ends, whatever way. Where there is no /proc it does nothing.

    Processes that are started from its making on have the mark, until another guard is made.
    """

    def __init__(self) -> None:
        mark = f"{os.getpid()}-{time.time_ns()}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != NAME},
        )
        os.environ[NAME] = mark

    def close(self) -> None:
        """Kill what has the mark, and end the guard."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_END_S)


def main(mark: str) -> None:
    """Wait for the worker's end, then kill what it left."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for _ in range(_MOST_LOOKS):
        if not (left := marked(mark)):
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_BETWEEN_S)


def marked(mark: str) -> list[int]:
    """The processes whose environment has the mark."""
    wanted, found = f"{NAME}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
