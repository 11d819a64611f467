"""A server as a child process, with its log in a file. It ends with this process, and owns its folder while it runs.

The lock of a folder is released by the operating system when its last owner ends; a server inherits it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from alphaloop.embedded import guard
from alphaloop.errors import StartFailed
from alphaloop.files import FolderLock

#: How long a server whose alphaloop was killed may take to shut down before the folder counts as in use.
_LEFTOVER_S: Final = 30.0
_TAIL_LINES: Final = 12
_TAIL_BYTES: Final = 16 << 10
_POLL_S: Final = 0.05

#: User and group that a server runs as.
Account = tuple[int, int]


class EmbeddedServer:
    """A server in a folder of its own. `start()` gives its address, and may be called again after its end."""

    name: str
    part: str  #: in `stack.json`
    log_name: str
    start_s = 60.0  #: the longest that it may take to start

    def __init__(self, data_dir: Path, *, port: int = 0, log_dir: Path | None = None) -> None:
        """`log_dir` None: its own folder. `port` 0 picks a free one, which a new start keeps."""
        self.moved: Callable[[], object] = lambda: None  #: called after a start, with another process id
        self._folder = data_dir.expanduser().absolute()
        self._port = port
        self.log = (log_dir or self._folder) / self.log_name
        self._process: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process and self._process.is_running else None

    def ended_with(self) -> int | None:
        """Its exit code if it ended by itself, 128 and the number for a signal; then `start` starts it again."""
        return self._process.ended_with() if self._process is not None else None

    def start(self) -> str:
        """Start it and return its address. Raises StartFailed."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The server inherits the lock, so one whose alphaloop was killed is waited for.
            with FolderLock(self._folder / "lock", what=f"another {self.name}", wait_s=_LEFTOVER_S) as lock:
                address = self._start(lock)
        except OSError as error:
            raise StartFailed(f"{self.name}: {error}", hint=f"is {self._folder} writable?") from error
        self.moved()
        return address

    def _start(self, lock: FolderLock) -> str:
        raise NotImplementedError

    def failed(self, what: str, *, hint: str | None = None) -> StartFailed:
        """What went wrong, for a person."""
        return StartFailed(f"{self.name} {what}", hint=hint or f"its log is {self.log}")

    def stop(self) -> None:
        """Shut down cleanly; the next start needs no recovery."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def kill(self) -> None:
        """End it as a power cut would; the next start recovers what was acknowledged."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ChildProcess:
    """One server below its guard, in a session of its own, so that Ctrl-C in the terminal does not reach it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
        orphan_signal: signal.Signals | None = None,
        grace_s: float = 20.0,
        run_as: Account | None = None,
        keep_search: bool = False,
        lock: FolderLock | None = None,
        folder: Path | None = None,
    ) -> None:
        """`folder` is its working folder; None: this process's own.

        `orphan_signal`: where the guard is killed; None: `stop_signal`.
        """
        self.name = name
        self.log = log
        self.pid: int | None = None
        self._grace_s = grace_s
        self._folder = folder
        self.env = dict(os.environ if env is None else env)  #: a change acts at the next start
        self._order = {
            "command": [str(part) for part in command],
            "stop_signal": int(stop_signal),
            "orphan_signal": int(stop_signal if orphan_signal is None else orphan_signal),
            "grace_s": grace_s,
            "run_as": run_as,
            "keep_search": keep_search,
            "keep_open": [lock.fileno()] if lock else [],
        }
        self._lock = lock
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the server runs."""
        return self._guard is not None and self._guard.poll() is None

    def ended_with(self) -> int | None:
        """Its exit code, 128 and the number for a signal; None while it runs. Afterwards it can be started again."""
        return None if self._guard is None or self._guard.poll() is None else self._reap(5.0)

    def start(self) -> None:
        """Start it; raises StartFailed when the program cannot be run at all."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, json.dumps(self._order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=self.env,
                cwd=self._folder,
                start_new_session=True,
                pass_fds=[self._lock.fileno()] if self._lock else [],
            )
        assert self._guard.stdout is not None  # noqa: S101
        first_line = self._guard.stdout.readline().strip()
        if not first_line.isdigit():
            self._reap(5.0)
            raise self.failed("could not be run")
        self.pid = int(first_line)

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float, *, hint: str | None = None) -> None:
        """Wait until `is_ready`. Raises StartFailed, the process stopped, when it ends first or time runs out."""
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if not self.is_running:
                code = self._reap(5.0)
                raise self.failed(f"ended with code {code} while starting", hint=hint)
            if time.monotonic() >= deadline:
                self.stop()
                raise self.failed(f"did not answer within {timeout_s:g} s", hint=hint)
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float) -> int:
        """Wait for a program that ends by itself; its exit code. Raises StartFailed when it takes too long."""
        if self._guard is None:
            raise self.failed("was not started")
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            raise self.failed(f"did not end within {timeout_s:g} s") from None
        return self._reap(5.0)

    def stop(self) -> None:
        """The stop signal, then a kill after the grace period. Safe to call twice."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._reap(self._grace_s + 5.0)

    def kill(self) -> None:
        """End it as a power cut would."""
        if self.pid is not None and self.is_running:
            os.kill(self.pid, signal.SIGKILL)
            self._reap(self._grace_s + 5.0)

    def failed(self, what: str, *, hint: str | None = None) -> StartFailed:
        """What went wrong, with the last lines of the log."""
        tail = log_tail(self.log)
        log_end = f"; the log ends:\n{tail}" if tail else ""
        return StartFailed(f"{self.name} {what}{log_end}", hint=hint or f"the whole log is {self.log}")

    def _reap(self, timeout_s: float) -> int:
        assert self._guard is not None  # noqa: S101
        try:
            code = self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            code = self._guard.wait()
        for pipe in (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                pipe.close()
        return code


def log_tail(path: Path) -> str:
    """The last lines of a log file, indented; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def is_listening(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def is_free(port: int) -> bool:
    """Whether 127.0.0.1:port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
