"""fsspec's clients of folders and object stores."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import fsspec
from fsspec.asyn import AsyncFileSystem

from alphaloop.errors import ConfigError

#: The longest wait for one answer of an object store.
TIMEOUT_S: Final = 30.0
#: The package that a user installs for a scheme that fsspec itself does not know.
_PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs"}


class StoreClient:
    """fsspec's client of one scheme. Threads share it."""

    def __init__(self, scheme: str, options: Mapping[str, Any]) -> None:
        """Raises ConfigError where the scheme's package is missing or refuses its options."""
        self._system: Any = _opened(scheme, options)

    def path_of(self, url: str) -> str:
        """What the client calls the object at this address."""
        return str(self._system._strip_protocol(url))

    def ask(self, method: str, *arguments: Any, takes_long: bool = False, **named: Any) -> Any:
        """Call the client's `method`; raises whatever it raises.

        A call over the network is given up after TIMEOUT_S, with TimeoutError, unless it `takes_long`. It is then
        ended, so that calls to a store that hangs do not pile up in the client.
        """
        if not isinstance(self._system, AsyncFileSystem):
            return getattr(self._system, method)(*arguments, **named)
        call = getattr(self._system, f"_{method}")(*arguments, **named)
        answer = asyncio.run_coroutine_threadsafe(call, self._system.loop)
        try:
            return answer.result(None if takes_long else TIMEOUT_S)
        finally:
            answer.cancel()


def scheme_of(url: str) -> str:
    """The scheme of an address in its one spelling."""
    return url.partition("://")[0]


def _opened(scheme: str, options: Mapping[str, Any]) -> Any:
    # Others change the listings, and the remembered ones would answer `info` too.
    arguments = {"use_listings_cache": False, **options} if scheme in _PACKAGES else {}
    try:
        return fsspec.filesystem(scheme, **arguments)
    except ImportError:
        package = _PACKAGES.get(scheme, scheme)
        raise ConfigError(
            f"{scheme}:// needs the package {package}, found none", hint=f"pip install {package}"
        ) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{scheme}:// refuses claim_check.options: {type(error).__name__}") from None
