"""Which addresses may be read. Pure.

Whoever may send a job names an address that a worker then reads, so a worker must not be led to anything else: no other
host, no other folder, no other scheme (server-side request forgery). An address is allowed only if it is one of the
configured prefixes, byte for byte, followed by plain names between slashes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

#: What may follow a prefix: no percent signs, because these could hide dots and slashes, and no signs of a query.
_NAMES: Final = re.compile(r"[A-Za-z0-9_=@+,.-]+(?:/[A-Za-z0-9_=@+,.-]+)*")
_PREFIX: Final = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<names>/?[A-Za-z0-9_=+,.-]+(?:/[A-Za-z0-9_=+,.-]+)*)")
#: Folders, and object stores whose clients have time limits.
SCHEMES: Final = ("file", "s3", "gs", "abfs")


def prefix_of(address: str) -> str:
    """A configured folder or prefix in its one spelling: `file:///folder` or `scheme://bucket/path`.

    Raises ValueError with what is wrong; the address may hold a secret, so the error does not repeat it.
    """
    text = address.rstrip("/")
    if text.startswith("/"):
        text = f"file://{text}"
    match = _PREFIX.fullmatch(text)
    if match is None:
        raise ValueError("expected an absolute folder, or scheme://bucket/path of letters, digits and ._-+=,")
    scheme, names = match["scheme"], match["names"]
    if scheme not in SCHEMES:
        raise ValueError(f"expected one of the schemes {', '.join(SCHEMES)}, found {scheme}")
    if names.startswith("/") != (scheme == "file"):
        raise ValueError("expected file:///folder with three slashes, or scheme://bucket with two")
    if _climbs(names):
        raise ValueError("expected names of folders, found . or .. among them")
    return text


def is_below(url: str, prefixes: Sequence[str]) -> bool:
    """Whether `url` lies below one of the prefixes, and nowhere else by any reading of it."""
    for prefix in prefixes:
        names = url.removeprefix(f"{prefix}/")
        if names != url and _NAMES.fullmatch(names) and not _climbs(names):
            return True
    return False


def _climbs(names: str) -> bool:
    return any(name in (".", "..") for name in names.split("/"))
