"""Whether a broker answers: one that is still starting may answer before it can serve."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from alphaloop.errors import BrokerUnavailable
from alphaloop.kafka.topics import is_reachable, list_topics
from alphaloop.settings import KafkaSettings

API_VERSIONS = 18


def knows_few_requests(request: bytes) -> bytes:
    """The answer to an ApiVersionsRequest 3: no error, and no other request is known (Kafka's protocol guide)."""
    correlation_id, no_error, no_tags = request[8:12], b"\0\0", b"\0"
    one_range = b"\2" + struct.pack(">hhh", API_VERSIONS, 0, 3) + no_tags
    body = correlation_id + no_error + one_range + struct.pack(">i", 0) + no_tags
    return struct.pack(">i", len(body)) + body


@pytest.fixture
def starting_broker() -> Iterator[KafkaSettings]:
    """The settings of a broker that knows no request but the one that asks what it knows."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):  # the server is closed
                while True:
                    client, _ = server.accept()
                    held.append(client)
                    client.sendall(knows_few_requests(client.recv(4096)))

        held: list[socket.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield KafkaSettings(bootstrap_servers=f"127.0.0.1:{server.getsockname()[1]}")
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        for client in held:
            client.close()


def test_a_broker_that_knows_few_requests_yet_is_not_reachable(starting_broker: KafkaSettings) -> None:
    assert not is_reachable(starting_broker, 30)
    with pytest.raises(BrokerUnavailable, match="_UNSUPPORTED_FEATURE"):
        list_topics(starting_broker)
