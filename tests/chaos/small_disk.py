"""A file system in memory for Postgres's tables, which can be made full at any moment.

Mounting takes the rights of root; without them there is none, and the fault "disk full" is played by triggers.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from alphaloop.embedded.servers import service_account

#: More than a run writes. Memory is taken by what is written only.
_SIZE_BYTES: Final = 4 << 30
_NUM_TRIES: Final = 20
_TIMEOUT_S: Final = 60.0


class SmallDisk:
    """Mounted until closed. It is made full by limiting it to what it holds at the moment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def mounted(cls) -> Self | None:
        """One under the folder for temporary files; None where this user or system cannot mount."""
        folder = Path(tempfile.mkdtemp(prefix="chaos-disk-"))
        # Postgres runs as a user of its own, who has to come through, hence the mode.
        if os.geteuid() != 0 or _mount("-t", "tmpfs", "-o", f"size={_SIZE_BYTES},mode=711", "tmpfs", str(folder)):
            folder.rmdir()
            return None
        return cls(folder)

    def hold_tables(self, database_url: str) -> None:
        """Move a database to this file system; nobody may be connected to it. Its write-ahead log stays where it is."""
        place = self._folder / "tables"
        place.mkdir()
        if (account := service_account()) is not None:
            os.chown(place, *account)
        parts = urlsplit(database_url)
        name = parts.path.removeprefix("/")
        with psycopg.connect(parts._replace(path="/postgres").geturl(), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE TABLESPACE small LOCATION {}").format(sql.Literal(str(place))))
            connection.execute(sql.SQL("ALTER DATABASE {} SET TABLESPACE small").format(sql.Identifier(name)))

    def fill(self) -> None:
        """Leave no space: whoever needs a new page gets ENOSPC."""
        for _ in range(_NUM_TRIES):
            found = os.statvfs(self._folder)
            if not (refused := self._resize((found.f_blocks - found.f_bfree) * found.f_frsize)):
                return
        raise OSError(f"cannot limit {self._folder}: {refused}")

    def free(self) -> None:
        """Give the space back."""
        if refused := self._resize(_SIZE_BYTES):
            raise OSError(f"cannot enlarge {self._folder}: {refused}")

    def close(self) -> None:
        """Unmount; what was on it is gone."""
        subprocess.run(["umount", str(self._folder)], check=True, timeout=_TIMEOUT_S)
        self._folder.rmdir()

    def _resize(self, num_bytes: int) -> str:
        return _mount("-o", f"remount,size={num_bytes}", str(self._folder))


def _mount(*options: str) -> str:
    """What was wrong; empty if nothing was."""
    try:
        done = subprocess.run(["mount", *options], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except OSError as error:
        return str(error)
    return done.stderr.strip() or f"code {done.returncode}" if done.returncode else ""
