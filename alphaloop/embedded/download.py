"""Downloads of large files over HTTP(S): resumable, with limits of time and size."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from alphaloop.errors import InstallFailed

#: Called with the bytes fetched so far and the whole size, None while the server does not say.
OnProgress = Callable[[int, int | None], None]

_CHUNK_BYTES: Final = 256 << 10
_STALL_S: Final = 20.0
_MAX_BYTES: Final = 1 << 30
_MAX_TEXT_BYTES: Final = 64 << 10
_MAX_ATTEMPTS: Final = 20


class Deadline:
    """A time limit over several steps; `None` seconds is no limit."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._end = None if limit_s is None else time.monotonic() + limit_s

    def left_s(self) -> float:
        """Seconds left, infinite without a limit. Raises InstallFailed once there are none."""
        if self._end is None:
            return float("inf")
        left = self._end - time.monotonic()
        if left <= 0:
            raise InstallFailed(
                f"not done within {self._limit_s:g} s", hint="run it again: the download continues where it stopped"
            )
        return left


def fetch_text(url: str, deadline: Deadline) -> str:
    """A small text file. Raises InstallFailed."""
    with _open(url, deadline, start=0) as answer:
        try:
            return answer.read(_MAX_TEXT_BYTES).decode("utf-8", errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise InstallFailed(f"{url}: {_reason(error)}") from error


def fetch(url: str, part: Path, deadline: Deadline, on_progress: OnProgress) -> None:
    """Download `url` into `part`, after the bytes that `part` already holds.

    A broken connection is retried as long as every attempt receives bytes. Raises InstallFailed and keeps `part` for a
    later call.
    """
    for _ in range(_MAX_ATTEMPTS):
        before = _size(part)
        problem = _fetch_once(url, part, deadline, on_progress)
        if problem is None:
            return
        if _size(part) <= before:
            break
    raise InstallFailed(
        f"{url}: {problem}, after {_size(part)} bytes", hint="run it again: the download continues where it stopped"
    )


def _fetch_once(url: str, part: Path, deadline: Deadline, on_progress: OnProgress) -> str | None:
    """One connection; None when the file is whole, else why it is not."""
    start = _size(part)
    try:
        answer = _open(url, deadline, start)
    except _NothingBeyond:
        return None  # the file was complete already; the checksum shows whether it is the right one
    with answer:
        continued = answer.status == http.HTTPStatus.PARTIAL_CONTENT
        done = start if continued else 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length and length.isdigit() else None
        if (total or 0) > _MAX_BYTES:
            raise InstallFailed(f"{url}: expected at most {_MAX_BYTES >> 20} MiB, the server announces {total} bytes")
        with part.open("ab" if continued else "wb") as file:
            try:
                done = _copy(answer, file, done, total, deadline, on_progress)
            except (OSError, http.client.HTTPException) as error:
                return _reason(error)
    if total is not None and done < total:
        return f"the connection ended {total - done} bytes early"
    return None


def _copy(
    answer: http.client.HTTPResponse,
    file: IO[bytes],
    done: int,
    total: int | None,
    deadline: Deadline,
    on_progress: OnProgress,
) -> int:
    on_progress(done, total)
    while chunk := answer.read1(_CHUNK_BYTES):
        file.write(chunk)
        done += len(chunk)
        if done > _MAX_BYTES:
            raise InstallFailed(f"expected at most {_MAX_BYTES >> 20} MiB, and the server sends more")
        on_progress(done, total)
        deadline.left_s()
    return done


class _NothingBeyond(Exception):
    """The server has no bytes after those asked for."""


def _open(url: str, deadline: Deadline, start: int) -> http.client.HTTPResponse:
    if not url.startswith(("https://", "http://")):
        raise InstallFailed(f"expected an http(s) address, found {url}", hint="check embedded.kafka_mirror")
    headers = {"User-Agent": "alphaloop", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the scheme was checked above
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(  # noqa: S310
            request, timeout=min(_STALL_S, deadline.left_s())
        )
    except urllib.error.HTTPError as error:
        with error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
                raise _NothingBeyond from None
            raise InstallFailed(f"{url}: the server answered {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise InstallFailed(f"{url}: {_reason(error)}") from error
    return answer


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error or type(error).__name__)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
