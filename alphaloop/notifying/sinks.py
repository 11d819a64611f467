"""The services that take notifications, as the settings name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import SecretStr

from alphaloop.errors import ConfigError
from alphaloop.notifying.news import Message


class Sink(Protocol):
    """One address of one service."""

    @property
    def name(self) -> str:
        """The service and a hash of the address: told to people, and the same in every process. No secret."""

    def send(self, message: Message) -> None:
        """Hand a message over, within a minute at most. Raises NotificationFailed."""


def open_sinks(urls: Sequence[SecretStr]) -> tuple[Sink, ...]:
    """A sink for each address, connected at its first message. Raises ConfigError for an address that is none."""
    if not urls:
        return ()
    try:
        from alphaloop.notifying.apprise_sink import AppriseSink
    except ImportError as error:
        raise ConfigError(
            f"scheduler.notify_urls: set, and the package {error.name} is not installed",
            hint="pip install 'alphaloop[notify]', or unset ALPHALOOP_SCHEDULER__NOTIFY_URLS",
        ) from None
    return tuple(AppriseSink(url, f"scheduler.notify_urls[{i}]") for i, url in enumerate(urls))
