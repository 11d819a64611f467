"""A terminal with a shell in it, into which commands are typed as a person types them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

_COLUMNS, _ROWS = 100, 50
_END: Final = "the-command-has-ended"
_INTERRUPT: Final = b"\x03"


class NothingCame(Exception):
    """A command did not end, or did not print what was awaited, in time. The message has what it printed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended: what the terminal showed, its exit code, and how long it took."""

    text: str
    code: int
    seconds: float


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A process that a script started with `&` or nohup ignores these signals, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Terminal:
    """A context manager: bash in a terminal of 100 columns that cannot draw, so programs print plain lines."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        modes = termios.tcgetattr(theirs)
        modes[1] &= ~termios.OPOST  # the ends of lines stay as they were written
        modes[3] &= ~termios.ECHO
        modes[3] |= termios.NOFLSH  # what is typed ahead outlives Ctrl-C
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "--noediting", "-i"],
            cwd=folder,
            env={
                **environment,
                "TERM": "dumb",
                "PS1": "",
                "PS2": "",
                "VIRTUAL_ENV_DISABLE_PROMPT": "1",
                "HISTFILE": "/dev/null",
            },
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(theirs)
        self._unread = b""
        self._began = time.monotonic()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the window: what runs in it is told to hang up."""
        os.close(self._ours)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGHUP)
        self._shell.wait()

    def type(self, command: str) -> None:
        """Type a command and press return."""
        self._began = time.monotonic()
        # A second line, typed ahead: the shell reads it when the command has ended.
        self._write(f"{command}\nprintf '\\n%s %s\\n' {_END} $?\n".encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._write(_INTERRUPT)

    def until(self, text: str, *, timeout_s: float) -> str:
        """Wait until `text` is shown; what was shown since the last wait, up to its line's end. Raises NothingCame."""
        return self._read(re.compile(re.escape(text.encode()) + rb"[^\n]*\n"), timeout_s)[0]

    def end(self, *, timeout_s: float) -> Ended:
        """Wait until the command has ended. Raises NothingCame."""
        shown, found = self._read(re.compile(rf"\n?{_END} (\d+)\n".encode()), timeout_s)
        return Ended(shown.removesuffix(found[0].decode()), int(found[1]), time.monotonic() - self._began)

    def run(self, command: str, *, timeout_s: float) -> Ended:
        """Type a command and wait for its end. Raises NothingCame."""
        self.type(command)
        return self.end(timeout_s=timeout_s)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._ours, data) :]

    def _read(self, awaited: re.Pattern[bytes], timeout_s: float) -> tuple[str, re.Match[bytes]]:
        deadline = time.monotonic() + timeout_s
        while (found := awaited.search(self._unread)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._ours], [], [], left_s)[0]:
                printed = self._unread.decode(errors="replace")
                raise NothingCame(f"not printed within {timeout_s:g} s: {awaited.pattern!r}; printed:\n{printed}")
            self._unread += os.read(self._ours, 1 << 16)
        shown, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return shown.decode(errors="replace"), found
