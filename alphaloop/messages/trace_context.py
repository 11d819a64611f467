"""The headers of a distributed trace that a job carries and its results repeat: W3C Trace Context.

They come from outside, so they are checked and bounded before they are copied. A job is never refused because of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

#: W3C asks that at least so much of `tracestate` is passed on. We pass on no more.
MAX_TRACESTATE_CHARS: Final = 512
MAX_TRACESTATE_MEMBERS: Final = 32

_TRACEPARENT: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MEMBER: Final = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[ -+\--<>-~]{1,256}")


def trace_context(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, str]:
    """The valid `traceparent` and `tracestate` of a message, of each the last one.

    Without a valid `traceparent` there is no trace. Of a long `tracestate` the first members are kept, because the
    newest one stands first.
    """
    given = {name: value or b"" for name, value in headers if name in ("traceparent", "tracestate")}
    parent = given.get("traceparent", b"")
    if not _TRACEPARENT.fullmatch(parent):
        return {}
    context = {"traceparent": parent.decode("ascii")}
    if state := _bounded(given.get("tracestate", b"")):
        context["tracestate"] = state
    return context


def _bounded(state: bytes) -> str:
    # What is read is bounded too: a header may be as long as a message.
    kept: list[str] = []
    num_chars = -1
    for part in state[: 4 * MAX_TRACESTATE_CHARS].decode("ascii", "replace").split(","):
        member = part.strip(" \t")
        if not member:
            continue
        num_chars += 1 + len(member)
        is_whole = num_chars <= MAX_TRACESTATE_CHARS and len(kept) < MAX_TRACESTATE_MEMBERS
        if not is_whole or not _MEMBER.fullmatch(member):
            break
        kept.append(member)
    return ",".join(kept)
