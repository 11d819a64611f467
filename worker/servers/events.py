"""Server-sent events, as far as inference servers use them: lines `data: …`, an empty line behind each event."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Final

from alphaloop.errors import ReplyInvalid

DONE: Final = b"[DONE]"


async def events(chunks: AsyncIterable[bytes], *, max_event_bytes: int) -> AsyncGenerator[bytes, None]:
    """The data of every event until [DONE] or the end of the chunks. Raises ReplyInvalid for an event too large.

    Lines end with LF or CRLF; comments and other fields are left out. Where a stream ends inside an event, that event
    is left out.
    """
    rest, data = b"", b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > max_event_bytes:
            raise _too_large(max_event_bytes)
        for line in lines:
            stripped = line.removesuffix(b"\r")
            if not stripped and data:
                if data == DONE:
                    return
                yield data
                data = b""
            elif (found := _data(stripped)) is not None:
                data = data + b"\n" + found if data else found
                if len(data) > max_event_bytes:
                    raise _too_large(max_event_bytes)


def _data(line: bytes) -> bytes | None:
    """What stands behind `data:`. llama.cpp names a failure `error:` instead, and sends the same JSON."""
    name, colon, value = line.partition(b":")
    if not colon or name not in (b"data", b"error"):
        return None
    return value.removeprefix(b" ")


def _too_large(max_event_bytes: int) -> ReplyInvalid:
    return ReplyInvalid(f"expected events of at most {max_event_bytes} bytes, found a larger one")
