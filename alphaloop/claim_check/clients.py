"""The clients of folders and object stores: opened by scheme, and asked with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import fsspec
from fsspec.asyn import AsyncFileSystem

from alphaloop.errors import ConfigError

#: The package that a user installs for a scheme that fsspec itself does not know.
_PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs"}
#: What clients call the moment of the last write.
_WRITTEN_AT: Final = ("LastModified", "mtime", "last_modified", "created")


class Client:
    """fsspec's client of one scheme. Threads share it."""

    def __init__(self, scheme: str, options: Mapping[str, Any], timeout_s: float) -> None:
        """Raises ConfigError where the scheme's package is missing or refuses its options."""
        self._timeout_s = timeout_s
        self._system: Any = _opened(scheme, options)

    def path_of(self, url: str) -> str:
        """What the client calls the object at this address."""
        return str(self._system._strip_protocol(url))

    def ask(self, method: str, *given: Any, **named: Any) -> Any:
        """Call the client's `method`; raises whatever it raises.

        A call over the network is given up after the time limit, with TimeoutError. It is then ended, so that calls to
        a store that hangs do not pile up in the client.
        """
        if not isinstance(self._system, AsyncFileSystem):
            return getattr(self._system, method)(*given, **named)
        call = getattr(self._system, f"_{method}")(*given, **named)
        answer = asyncio.run_coroutine_threadsafe(call, self._system.loop)
        try:
            return answer.result(self._timeout_s)
        finally:
            answer.cancel()


def scheme_of(url: str) -> str:
    """The scheme of an address in its one spelling."""
    return url.partition("://")[0]


def written_at(facts: Mapping[str, Any]) -> datetime | None:
    """When an object was last written, from what `info` or `ls` say of it; None where the client does not say it."""
    found = next((facts[name] for name in _WRITTEN_AT if name in facts), None)
    if isinstance(found, int | float):
        return datetime.fromtimestamp(found, UTC)
    return found if isinstance(found, datetime) and found.tzinfo else None


def _opened(scheme: str, options: Mapping[str, Any]) -> Any:
    # Listings change behind a client's back, and the remembered ones would answer `info` too.
    given = {"use_listings_cache": False, **options} if scheme in _PACKAGES else {}
    try:
        return fsspec.filesystem(scheme, **given)
    except ImportError:
        package = _PACKAGES.get(scheme, scheme)
        raise ConfigError(
            f"claim_check: {scheme}:// needs the package {package}, found none", hint=f"pip install {package}"
        ) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"claim_check.options: {scheme}:// refuses them: {type(error).__name__}") from None
