"""One owner a folder, by a lock that the operating system releases when its owner ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Final, Self

from alphaloop.errors import StartFailed

_POLL_S: Final = 0.1


class FolderLock:
    """An exclusive lock on `path`. A child that inherits `fileno()` holds it beyond `close()`, as long as it lives."""

    def __init__(self, path: Path, *, what: str, wait_s: float) -> None:
        """Take it, waiting up to `wait_s` for its last owner to end. Raises StartFailed naming that owner."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_s
        while not _try_lock(self._file, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                owner = os.pread(self._file, 32, 0).decode("ascii", errors="replace").strip() or "unknown"
                os.close(self._file)
                raise StartFailed(
                    f"{path.parent} is in use: {what} runs there, started by process {owner}",
                    hint="stop it, or choose another folder with --data-dir",
                )
            time.sleep(_POLL_S)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode("ascii"), 0)

    def fileno(self) -> int:
        """The descriptor to hand to a child."""
        return self._file

    def close(self) -> None:
        """Close this process's descriptor of the lock. Safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock at `path`."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    with contextlib.closing(os.fdopen(file)):
        return not _try_lock(file, fcntl.LOCK_SH)


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
