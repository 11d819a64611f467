"""A sink behind apprise, which knows the services. The only module that imports it."""

from __future__ import annotations

import hashlib
import logging
import re
from typing import Final

from apprise import Apprise, AppriseAsset, NotifyFormat, NotifyType
from apprise.result import AppriseResult, AppriseResultStatus
from pydantic import SecretStr

from alphaloop.errors import ConfigError, NotificationFailed
from alphaloop.notifying.news import Message

_LONGEST_S: Final = 30.0
_HTTP_STATUS: Final = re.compile(r"\berror=(\d{3})\b")

# What they log may hold the path of an address, which is a secret of many services.
logging.getLogger("apprise").propagate = False
# A refusal's status is read from what apprise logs as a warning, also where a process logs errors alone.
logging.getLogger("apprise").setLevel(logging.WARNING)
logging.getLogger("urllib3.connectionpool").setLevel(logging.WARNING)


class AppriseSink:
    """One address."""

    def __init__(self, url: SecretStr, setting: str) -> None:
        """`setting` is named where the address is none. Raises ConfigError."""
        asset = AppriseAsset(app_id="alphaloop", app_desc="alphaloop", secure_logging=True, service_timeout=_LONGEST_S)
        service = Apprise.instantiate(url.get_secret_value(), asset=asset)
        if service is None:
            raise ConfigError(
                f"{setting}: expected an address that apprise knows, found another one (not shown, it may be secret)",
                hint="json://host:port/path, mailtos://user:password@host, slack://…: docs/guides/notifications.md",
            )
        self._apprise = Apprise(asset=asset)
        self._apprise.add(service)
        self.name: Final = f"{service.service_name} {_fingerprint(url)}"

    def send(self, message: Message) -> None:
        """Hand a message over. Raises NotificationFailed."""
        try:
            result = self._apprise.notify(
                title=message.title,
                body=message.body,
                notify_type=NotifyType(message.gravity.value),
                body_format=NotifyFormat.TEXT,
            )
        except Exception as error:
            raise NotificationFailed(f"{self.name}: {type(error).__name__}") from None
        if not result:
            raise NotificationFailed(f"{self.name}: {_reason(result)}")


def _reason(result: AppriseResult) -> str:
    """Why it failed. Of what apprise logged only the status of HTTP: the rest may quote the address."""
    if result.status is AppriseResultStatus.TIMEOUT:
        return f"no answer within {_LONGEST_S:.0f} s"
    found = [match[1] for entry in result.logs() if (match := _HTTP_STATUS.search(entry.message))]
    return f"HTTP status {found[-1]}" if found else "refused, or not reachable"


def _fingerprint(url: SecretStr) -> str:
    """Tells two addresses apart. Slow to compute, so that a short password cannot be found by trying."""
    digest = hashlib.scrypt(url.get_secret_value().encode(), salt=b"alphaloop sink", n=2**14, r=8, p=1, dklen=4)
    return digest.hex()
