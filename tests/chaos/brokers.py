"""The brokers of a run: one node, or a cluster of several on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from alphaloop.embedded.process import free_ports
from alphaloop.embedded.servers import EmbeddedKafka, new_cluster_id

_HEAP_MB: Final = 320


class _Node(EmbeddedKafka):
    start_s = 300.0  #: three brokers start beside eight workers that reconnect, on two processors


class Brokers:
    """Apache Kafka nodes that are both broker and controller. Every topic lies on all of them."""

    def __init__(self, home: Path, folder: Path, num_nodes: int) -> None:
        ports = free_ports(2 * num_nodes)
        self._ports, controllers = ports[:num_nodes], ports[num_nodes:]
        cluster_id = new_cluster_id()
        self._folders = [folder / f"node-{number}" for number in range(num_nodes)]
        voters = ",".join(f"{number + 1}@127.0.0.1:{port}" for number, port in enumerate(controllers))
        self._nodes = [
            _Node(
                home,
                self._folders[number],
                port=self._ports[number],
                heap_mb=_HEAP_MB,
                log_dir=folder / "logs" / f"kafka-{number}",
                properties=_properties(number, num_nodes, voters, controllers[number]),
                cluster_id=cluster_id,
            )
            for number in range(num_nodes)
        ]

    @property
    def addresses(self) -> str:
        """`bootstrap.servers`."""
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    @property
    def num_nodes(self) -> int:
        """How many there are, whether they run or not."""
        return len(self._nodes)

    def start(self, numbers: Sequence[int] | None = None) -> None:
        """Start these nodes, or all, at once: none of a cluster answers before most of them run."""
        with ThreadPoolExecutor(self.num_nodes) as threads:
            list(threads.map(lambda number: self._nodes[number].start(), self._chosen(numbers)))

    def kill(self, numbers: Sequence[int] | None = None) -> None:
        """End them as a power cut would."""
        for number in self._chosen(numbers):
            self._nodes[number].kill()

    def stop(self) -> None:
        """Shut all down."""
        with ThreadPoolExecutor(self.num_nodes) as threads:
            list(threads.map(EmbeddedKafka.stop, self._nodes))

    def holds(self, topic: str, topic_id: str) -> bool:
        """Whether some node has a log of that topic yet: it takes messages for it as long as it has.

        Asked of the disks, because a broker's answer may be newer or older than what it does.
        """
        return any(
            f"topic_id: {topic_id}" in _text_of(file)
            for folder in self._folders
            for file in folder.glob(f"data/{topic}-*/partition.metadata")
            if not file.parent.name.endswith("-delete")
        )

    def _chosen(self, numbers: Sequence[int] | None) -> Sequence[int]:
        return range(self.num_nodes) if numbers is None else numbers


def _text_of(file: Path) -> str:
    try:
        return file.read_text("ascii")
    except FileNotFoundError:
        return ""  # its log has just gone


def _properties(number: int, num_nodes: int, voters: str, controller_port: int) -> dict[str, str]:
    num_in_sync = str(max(1, num_nodes - 1))
    replicated = ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
    least = ("transaction.state.log", "share.coordinator.state.topic")
    return {
        "node.id": str(number + 1),
        "controller.quorum.voters": voters,
        "listeners": f"PLAINTEXT://127.0.0.1:{{port}},CONTROLLER://127.0.0.1:{controller_port}",
        "default.replication.factor": str(num_nodes),
        "min.insync.replicas": num_in_sync,
        **{f"{name}.replication.factor": str(num_nodes) for name in replicated},
        **{f"{name}.min.isr": num_in_sync for name in least},
    }
