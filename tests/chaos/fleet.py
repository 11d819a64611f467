"""The processes of a run, workers or schedulers, and the supervisor that starts again what ended or is sick.

The supervisor does what Kubernetes or systemd does, and no more: it sees exit codes and /healthz.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final

from alphaloop.embedded.process import free_ports
from tests.chaos.asking import Look, ask, look
from tests.chaos.worker_process import CLOCK_SKEW_S

CHECKOUT: Final = Path(__file__).resolve().parents[2]
WORKER: Final = ("tests.chaos.worker_process", "--seed", "1")
_LOOK_S: Final = 0.5
#: How long a worker is down before it is started again, and how long it may be sick before it is killed.
_RESTART_AFTER_S: Final = 1.0
_SICK_S: Final = 10.0
#: Of a process that starts on a busy machine.
_UP_S: Final = 120.0
#: Of a process that was told to drain.
_STOP_S: Final = 90.0


@dataclass(slots=True)
class Member:
    """One place in the fleet; processes come and go on it."""

    number: int
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    is_suspended: bool = False
    skew_s: float = 0.0
    sick_since: float | None = None
    ended_at: float | None = None
    peak_bytes: int = 0
    num_starts: int = 0
    killed: set[int] = field(default_factory=set)  #: process ids that a fault killed

    @property
    def pid(self) -> int:
        """Of its process, which has been started."""
        assert self.process is not None
        return self.process.pid


class Fleet:
    """Processes of one program with a supervisor. All methods may be called from any thread."""

    def __init__(
        self,
        environment: Mapping[str, str],
        folder: Path,
        num_processes: int,
        *,
        name: str,
        program: Sequence[str] = WORKER,
        port_setting: str = "ALPHALOOP_WORKER__HTTP_PORT",
    ) -> None:
        """`program` is what follows `python -m`; `port_setting` tells it where to serve its health."""
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.members: Final = tuple(
            Member(number, port, folder / f"{name}-{number}.log")
            for number, port in enumerate(free_ports(num_processes))
        )
        self.ended_themselves: Counter[int] = Counter()  #: by exit code, processes that no fault killed
        self.num_sick = 0  #: killed because they said for long that they are not healthy
        self._environment = dict(environment)
        self._program = program
        self._port_setting = port_setting
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name=f"{name} supervisor", daemon=True)

    def start(self) -> None:
        """Start every worker and the supervisor."""
        for member in self.members:
            self._start(member)
        self._supervisor.start()

    def ready(self) -> list[int]:
        """The members that have partitions and are not suspended."""
        return [
            member.number
            for member in self.members
            if not member.is_suspended and ask(member.port, "readyz")[0] == HTTPStatus.OK
        ]

    def kill(self, number: int) -> None:
        """kill -9. The supervisor starts another process."""
        member = self.members[number]
        with self._lock:
            if member.process is not None and member.process.poll() is None:
                member.killed.add(member.pid)
                member.process.kill()
                member.process.wait()

    def terminate(self, number: int) -> None:
        """SIGTERM, as a rolling upgrade sends it. The supervisor starts another process."""
        self._signal(number, signal.SIGTERM)

    def suspend(self, number: int) -> None:
        """SIGSTOP: the process keeps its connections and does nothing, as in a long pause of the machine."""
        with self._lock:
            self.members[number].is_suspended = True
            self._signal(number, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        """SIGCONT."""
        with self._lock:
            self._signal(number, signal.SIGCONT)
            self.members[number].is_suspended = False

    def set_clock(self, number: int, skew_s: float) -> None:
        """Start the worker again, with a clock that is wrong by `skew_s`."""
        self.members[number].skew_s = skew_s
        self.kill(number)

    def stop(self) -> dict[str, int]:
        """SIGTERM to all; the exit codes that are not 0, by name of the member. Kills what does not end.

        First it waits for those that are just starting, because a process that cannot hear yet does not drain.
        """
        until_s = time.monotonic() + _UP_S
        while time.monotonic() < until_s and any(ask(one.port, "healthz")[0] is None for one in self.members):
            time.sleep(_LOOK_S)
        self._closing.set()
        self._supervisor.join()
        for member in self.members:
            if member.process is not None:
                member.process.send_signal(signal.SIGTERM)
        codes = {f"{self.name}-{member.number}": self._end(member) for member in self.members}
        return {name: code for name, code in codes.items() if code != 0}

    def close(self) -> None:
        """Kill whatever is left."""
        self._closing.set()
        for member in self.members:
            if member.process is not None:
                member.process.kill()
                member.process.wait()
                _close(member)

    def look(self, at_s: float) -> list[Look]:
        """Ask every worker that is not suspended how it is."""
        return [look(self.name, member.port, at_s) for member in self.members if not member.is_suspended]

    def measure(self) -> None:
        """Note the memory of every process; call it now and then."""
        for member in self.members:
            if member.process is not None:
                member.peak_bytes = max(member.peak_bytes, _peak_bytes(member.pid))

    def _supervise(self) -> None:
        while not self._closing.wait(_LOOK_S):
            for member in self.members:
                with self._lock:
                    self._look_after(member)

    def _look_after(self, member: Member) -> None:
        if member.is_suspended or member.process is None:
            return
        code, now = member.process.poll(), time.monotonic()
        if code is None:
            if self._is_sick(member, now):
                self.num_sick += 1
                self.kill(member.number)
        elif member.ended_at is None:
            member.ended_at = now
            if member.pid not in member.killed:
                self.ended_themselves[code] += 1
        elif now - member.ended_at >= _RESTART_AFTER_S:
            self._start(member)

    def _is_sick(self, member: Member, now: float) -> bool:
        if ask(member.port, "healthz")[0] != HTTPStatus.SERVICE_UNAVAILABLE:
            member.sick_since = None
            return False
        member.sick_since = member.sick_since or now
        return now - member.sick_since >= _SICK_S

    def _start(self, member: Member) -> None:
        environment = {
            **os.environ,
            **self._environment,
            self._port_setting: str(member.port),
            CLOCK_SKEW_S: str(member.skew_s),
        }
        _close(member)
        with member.log.open("ab") as out:
            # The pipe is never written to: it closes when this process ends, however it ends, and so does the worker.
            member.process = subprocess.Popen(
                [sys.executable, "-m", *self._program],
                cwd=CHECKOUT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
            )
        member.ended_at = member.sick_since = None
        member.num_starts += 1

    def _signal(self, number: int, what: signal.Signals) -> None:
        process = self.members[number].process
        if process is not None and process.poll() is None:
            process.send_signal(what)

    def _end(self, member: Member) -> int:
        if member.process is None:
            return 0
        try:
            return member.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            member.process.kill()
            return member.process.wait()


def _close(member: Member) -> None:
    if member.process is not None and member.process.stdin is not None:
        member.process.stdin.close()


def _peak_bytes(pid: int) -> int:
    """Most memory that was resident at once; 0 where /proc does not tell."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0
