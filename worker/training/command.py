"""Two commands of the user's: one that trains in alphaloop's place, and one that starts servers with what was trained.

`[refresh] command` is called with DATASET TARGET PARENT OUT. It writes events of `alphaloop.commands` to its standard
output, and heads into the folder OUT. Exit code 0: done, 75: again later, any other: failed. Only safetensors and JSON
are taken from what it leaves, and only regular files: weights are never unpickled, and a link could lead out of the
folder.

`[refresh] hook` is called with TARGET DRAFTER REVISION FOLDER, once a draft of a target that servers decode is kept:
they load their drafts themselves, so nothing else can begin to use it.

Both run in an environment of their own, without alphaloop's addresses and passwords, and are ended where they take too
long, too much memory or too much room.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from alphaloop.commands import EVENT, CommandEvent, FailedEvent
from alphaloop.embedded.process import ChildProcess
from alphaloop.errors import AlphaloopError, StartFailed
from alphaloop.wording import one_line
from worker.training.keep import FILE_NAME

#: Exit code of a command that asks for another attempt: EX_TEMPFAIL of sysexits.h.
AGAIN: Final = 75
#: What the command finds in its environment, where the trainer has it.
_PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "TZ", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
_GRACE_S: Final = 5.0
_LOOK_S: Final = 0.1
_MAX_JSON_BYTES: Final = 16 << 20
_MAX_LINE_BYTES: Final = 64 << 10
#: Bytes of output read between two looks at what a command takes, because one that prints without end has no end of
#: its log to be read to.
_READ_BYTES: Final = 1 << 20
#: What is said of an output: its last lines, and characters of a message or a line.
_NUM_LAST_LINES: Final = 3
_MAX_SAID_CHARS: Final = 300


class CommandFailed(AlphaloopError):
    """The command gave no heads that can be tried."""


class CommandAgain(AlphaloopError):
    """The command asks for another attempt."""


class _Ended(AlphaloopError):
    """A command could not be run, or was ended because it took more than it may."""


@dataclass(frozen=True, slots=True)
class CommandLimits:
    """What a command may take."""

    seconds: float
    max_bytes: int  #: of memory, and as many of files
    num_threads: int


def run_command(
    command: Sequence[str],
    arguments: Sequence[str | Path],
    work: Path,
    limits: CommandLimits,
    *,
    on_event: Callable[[CommandEvent], object],
    should_stop: Callable[[], bool],
) -> bool:
    """Run it in the folder `work` to its end; False when stopped before.

    `arguments` ends with OUT, a folder below `work`: what lies there counts as what the command writes.

    Raises CommandFailed, CommandAgain.
    """
    out = Path(arguments[-1])
    out.mkdir(parents=True, exist_ok=True)
    events = _Events(work / "command.log", on_event)
    try:
        code = _run("the command", [*command, *arguments], work, limits, events, should_stop)
    except _Ended as error:
        raise CommandFailed(error.message) from None
    if code is None:
        return False
    if code == AGAIN:
        raise CommandAgain(events.failure or "the command asks for another attempt")
    if code != 0:
        raise CommandFailed(f"the command ended with code {code}: {events.failure or events.last_line or 'no word'}")
    check_files(out, limits.max_bytes)
    return True


def run_hook(
    hook: Sequence[str],
    arguments: Sequence[str],
    work: Path,
    limits: CommandLimits,
    *,
    should_stop: Callable[[], bool],
) -> str | None:
    """Run it in the folder `work` to its end. Returns its exit code and last lines as a sentence, None when stopped."""
    work.mkdir(parents=True, exist_ok=True)
    events = _Events(work / "hook.log", lambda event: None)
    try:
        code = _run("the hook", [*hook, *arguments], work, limits, events, should_stop)
    except _Ended as error:
        return error.message
    if code is None:
        return None
    return f"the hook ended with code {code}: {' / '.join(events.last_lines) or 'no word'}"


def _run(
    name: str,
    command: Sequence[str | Path],
    work: Path,
    limits: CommandLimits,
    events: _Events,
    should_stop: Callable[[], bool],
) -> int | None:
    """The exit code, or None when stopped. Raises _Ended."""
    events.log.unlink(missing_ok=True)
    child = ChildProcess(
        name, command, log=events.log, env=_environment(work, limits.num_threads), grace_s=_GRACE_S, folder=work
    )
    deadline = time.monotonic() + limits.seconds
    try:
        child.start()
        while child.is_running:
            events.read(_READ_BYTES)
            if should_stop():
                return None
            _refuse_excess(child, work, limits, deadline)
            time.sleep(_LOOK_S)
        code = child.ended_with()
    except StartFailed as error:
        raise _Ended(error.message) from None
    finally:
        child.stop()
    events.read(limits.max_bytes)
    events.end()
    return code


def check_files(out: Path, max_bytes: int) -> None:
    """Raise CommandFailed unless the folder holds regular safetensors and JSON files alone, `max_bytes` at most."""
    names, num_bytes = set[str](), 0
    for entry in sorted(os.scandir(out), key=lambda entry: entry.name):
        facts = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
            raise CommandFailed(f"{entry.name!r}: expected a regular file, found a link, a folder or a device")
        if not FILE_NAME.fullmatch(entry.name):
            raise CommandFailed(f"expected safetensors and JSON files alone, found {entry.name!r}")
        if entry.name.endswith(".json") and facts.st_size > _MAX_JSON_BYTES:
            raise CommandFailed(f"{entry.name}: expected at most {_MAX_JSON_BYTES} bytes, found {facts.st_size}")
        names.add(entry.name)
        num_bytes += facts.st_size
    if num_bytes > max_bytes:
        raise CommandFailed(f"expected at most {max_bytes} bytes of files, found {num_bytes}")
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise CommandFailed(
            f"expected config.json and safetensors in OUT, found {', '.join(sorted(names)) or 'nothing'}"
        )


def _environment(work: Path, num_threads: int) -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, "HOME": str(work), "TMPDIR": str(work), "OMP_NUM_THREADS": str(num_threads)}


def _refuse_excess(child: ChildProcess, work: Path, limits: CommandLimits, deadline: float) -> None:
    """Raise _Ended where the command has taken more than it may."""
    if time.monotonic() > deadline:
        raise _Ended(f"{child.name} was ended after {limits.seconds:.0f} s, the longest that it may take")
    memory = 0 if child.pid is None else _memory_of(child.pid)
    for num_bytes, what in ((_bytes_of(work), "files"), (memory, "memory")):
        if num_bytes > limits.max_bytes:
            raise _Ended(
                f"{child.name} was ended: expected at most {limits.max_bytes} bytes of {what}, found {num_bytes}"
            )


def _bytes_of(folder: Path) -> int:
    """The sizes of all files below a folder together, holes included; what goes away meanwhile counts nothing."""
    num_bytes = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                num_bytes += os.lstat(Path(path, name)).st_size
    return num_bytes


def _memory_of(pid: int) -> int:
    """Resident bytes of a process and of all below it, by Linux's /proc; 0 elsewhere."""
    parents, resident = dict[int, int](), dict[int, int]()
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                parents[int(name)], resident[int(name)] = int(fields[1]), int(fields[21])
    ours = {pid}
    while more := {child for child, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(resident.get(each, 0) for each in ours) * os.sysconf("SC_PAGE_SIZE")


class _Events:
    """Reads events from what the command writes; other lines are its log."""

    def __init__(self, log: Path, on_event: Callable[[CommandEvent], object]) -> None:
        self.log, self._on_event = log, on_event
        self._position, self._rest = 0, b""
        self.failure = ""  #: what a FailedEvent said
        self.last_lines = deque[str](maxlen=_NUM_LAST_LINES)  #: those that are no events and not empty

    @property
    def last_line(self) -> str:
        """The last of them; empty where there is none."""
        return self.last_lines[-1] if self.last_lines else ""

    def read(self, max_bytes: int) -> None:
        """What was written since the last call, or the first `max_bytes` of it."""
        end = self._position + max_bytes
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self._position)
            while part := file.read(min(_READ_BYTES, end - self._position)):
                self._position += len(part)
                *lines, rest = (self._rest + part).split(b"\n")
                self._rest = rest[-_MAX_LINE_BYTES:]
                for line in lines:
                    self._take(line[-_MAX_LINE_BYTES:])

    def end(self) -> None:
        """Take a last line without its end."""
        rest, self._rest = self._rest, b""
        self._take(rest)

    def _take(self, line: bytes) -> None:
        line = line.strip()
        event = None
        # Not every line is parsed, because a command may print millions of them.
        if line.startswith(b"{"):
            with contextlib.suppress(ValueError, RecursionError, ValidationError):
                event = EVENT.validate_python(json.loads(line))
        if event is None:
            if said := line.decode("utf-8", "replace").strip():
                self.last_lines.append(one_line(said[-_MAX_SAID_CHARS:]))
            return
        if isinstance(event, FailedEvent):
            self.failure = one_line(event.message[:_MAX_SAID_CHARS])
        self._on_event(event)
