"""`alphaloop kafka install` against a server on this machine: a good archive, and every bad one."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from alphaloop.embedded.install import find_kafka_home, install_kafka, installed_home, parse_sha512
from alphaloop.errors import ConfigError, InstallFailed
from alphaloop.settings import EmbeddedSettings, Settings

VERSION = "4.3.1"
TOP = f"kafka_2.13-{VERSION}"
ARCHIVE_NAME = f"{TOP}.tgz"


class Mirror:
    """A web server with one release, which can be told to misbehave."""

    def __init__(self) -> None:
        self.archive = b""
        self.checksum: bytes | None = None
        self.cut_after: int | None = None  #: close the connection after so many bytes of each answer
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/kafka"

    def publish(self, archive: bytes) -> None:
        self.archive = archive
        digest = hashlib.sha512(archive).hexdigest().upper()
        words = [digest[i : i + 8] for i in range(0, 128, 8)]
        # As gpg --print-md prints it, and as Apache publishes it.
        lines = [" ".join(words[i : i + 4]) for i in range(0, 16, 4)]
        self.checksum = f"{ARCHIVE_NAME}: {lines[0]}\n".encode() + b"".join(b"  %s\n" % x.encode() for x in lines[1:])

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(mirror) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.requests.append(self.path)
                if self.path == f"/kafka/{VERSION}/{ARCHIVE_NAME}.sha512" and mirror.checksum is not None:
                    self._answer(200, mirror.checksum)
                elif self.path == f"/kafka/{VERSION}/{ARCHIVE_NAME}":
                    self._answer(200, mirror.archive, mirror.cut_after)
                else:
                    self.send_error(404)

            def _answer(self, status: int, body: bytes, cut_after: int | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[:cut_after])

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    one = Mirror()
    try:
        yield one
    finally:
        one.close()


@pytest.fixture(scope="session")
def small_release(kafka_home: Path) -> bytes:
    """A release with the two jars by which a home is known."""
    jars = [next(kafka_home.glob(f"libs/{pattern}")) for pattern in ("kafka-clients-*.jar", "kafka_2.13-*.jar")]
    return pack({f"{TOP}/libs/{jar.name}": jar.read_bytes() for jar in jars})


def pack(files: dict[str, bytes], change: Callable[[tarfile.TarInfo], None] = lambda member: None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            change(member)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def install(mirror: Mirror, cache: Path, deadline_s: float = 60.0) -> Path:
    return install_kafka(VERSION, mirrors=[mirror.url], cache=cache, deadline_s=deadline_s)


@pytest.mark.kafka
def test_a_release_is_installed_once(mirror: Mirror, small_release: bytes, kafka_home: Path, tmp_path: Path) -> None:
    mirror.publish(small_release)
    seen: list[tuple[int, int | None]] = []
    cache = tmp_path / "cache"
    home = install_kafka(
        VERSION, mirrors=[mirror.url], cache=cache, on_progress=lambda done, total: seen.append((done, total))
    )
    assert home == installed_home(VERSION, cache=cache) == cache / TOP
    assert seen[0] == (0, len(mirror.archive))
    assert seen[-1] == (len(mirror.archive), len(mirror.archive))
    assert sorted(p.name for p in cache.iterdir()) == ["install.lock", TOP], (
        "no download, no half-unpacked folder stays"
    )
    requests = len(mirror.requests)
    assert install(mirror, cache) == home
    assert len(mirror.requests) == requests, "what is there is not fetched again"
    jars = [path for path in home.rglob("*") if path.is_file()]
    assert len(jars) == 2
    assert all(jar.read_bytes() == (kafka_home / "libs" / jar.name).read_bytes() for jar in jars)


def test_an_archive_that_is_cut_or_not_what_its_checksum_says_is_refused_and_forgotten(
    mirror: Mirror, small_release: bytes, tmp_path: Path
) -> None:
    mirror.publish(small_release)
    middle = len(small_release) // 2
    changed = small_release[:middle] + bytes([small_release[middle] ^ 1]) + small_release[middle + 1 :]
    for archive, cut_after, found in ((small_release, 500_000, "bytes early"), (changed, None, "expected SHA-512")):
        mirror.archive, mirror.cut_after = archive, cut_after
        with pytest.raises(InstallFailed, match=found):
            install(mirror, tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["install.lock"]


def test_the_next_mirror_is_asked_when_one_fails(mirror: Mirror, small_release: bytes, tmp_path: Path) -> None:
    mirror.publish(small_release)
    home = install_kafka(
        VERSION, mirrors=["http://127.0.0.1:9/kafka", f"{mirror.url}/nowhere", mirror.url], cache=tmp_path
    )
    assert home.is_dir()


def test_every_mirrors_reason_is_told(mirror: Mirror, tmp_path: Path) -> None:
    with pytest.raises(InstallFailed) as caught:
        install_kafka(VERSION, mirrors=["http://127.0.0.1:9/kafka", mirror.url], cache=tmp_path)
    assert re.search(r"127\.0\.0\.1:9/.*refused.*404", caught.value.message)
    assert "KAFKA_HOME" in (caught.value.hint or "")


def climbing(name: str) -> Callable[[], bytes]:
    return lambda: pack({f"{TOP}/LICENSE": b"x", name: b"evil"})


def linking(kind: bytes, target: str) -> Callable[[], bytes]:
    def turn(member: tarfile.TarInfo) -> None:
        if member.name.endswith("link"):
            member.type, member.linkname, member.size = kind, target, 0

    return lambda: pack({f"{TOP}/link": b"", f"{TOP}/LICENSE": b"x"}, turn)


@pytest.mark.parametrize(
    ("archive", "found"),
    [
        (climbing("../evil"), "outside of"),
        (climbing(f"{TOP}/../../evil"), "outside of"),
        (climbing(f"{TOP}/libs/../../../evil"), "outside of"),
        (climbing("/tmp/evil"), "outside of"),
        (climbing("other/evil"), "outside of"),
        (linking(tarfile.SYMTYPE, "/etc"), "neither a file nor a folder"),
        (linking(tarfile.LNKTYPE, "../../evil"), "neither a file nor a folder"),
        (linking(tarfile.CHRTYPE, ""), "neither a file nor a folder"),
        (lambda: pack({f"{TOP}/LICENSE": b"x"}), "expected .*kafka-clients"),
        (lambda: b"not an archive at all", "cannot be unpacked"),
        (lambda: pack({f"{TOP}/LICENSE": b"x" * 100_000})[:-40], "cannot be unpacked"),
    ],
)
def test_an_archive_that_reaches_outside_or_is_no_kafka_installs_nothing(
    mirror: Mirror, tmp_path: Path, archive: Callable[[], bytes], found: str
) -> None:
    mirror.publish(archive())
    cache = tmp_path / "a" / "b" / "cache"
    with pytest.raises(InstallFailed, match=found):
        install(mirror, cache)
    assert installed_home(VERSION, cache=cache) is None
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"a/b/cache/install.lock"}
    assert not list(cache.glob("unpacking-*"))


def test_a_failed_install_leaves_the_old_folder_and_a_good_one_replaces_it(
    mirror: Mirror, small_release: bytes, tmp_path: Path
) -> None:
    (tmp_path / TOP).mkdir()
    (tmp_path / TOP / "half").write_text("left by a copy that was cut off")
    mirror.publish(b"nonsense")
    with pytest.raises(InstallFailed):
        install(mirror, tmp_path)
    assert (tmp_path / TOP / "half").exists()
    mirror.publish(small_release)
    home = install(mirror, tmp_path)
    assert not (home / "half").exists()


def test_the_time_limit_holds(mirror: Mirror, small_release: bytes, tmp_path: Path) -> None:
    mirror.publish(small_release)
    mirror.cut_after = 10_000
    with pytest.raises(InstallFailed, match="not done in the time"):
        install(mirror, tmp_path, deadline_s=0.0001)


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://host/kafka", "downloads.apache.org/kafka"])
def test_only_http_addresses_are_opened(tmp_path: Path, address: str) -> None:
    with pytest.raises(InstallFailed, match="expected an http"):
        install_kafka(VERSION, mirrors=[address], cache=tmp_path)


DIGEST = "0123456789abcdef" * 8


@pytest.mark.parametrize(
    "text",
    [
        DIGEST,
        f"{DIGEST.upper()}\n",
        f"{DIGEST}  {ARCHIVE_NAME}\n",
        f"{DIGEST} *{ARCHIVE_NAME}\n",
        f"{ARCHIVE_NAME}: {DIGEST}",
        f"{ARCHIVE_NAME}: 01234567 89ABCDEF\n" + "   01234567 89ABCDEF\r\n" * 7,
    ],
)
def test_every_published_form_of_a_checksum_is_read(text: str) -> None:
    assert parse_sha512(text, ARCHIVE_NAME) == DIGEST


@pytest.mark.parametrize(
    "text",
    ["", "<html>not found</html>", DIGEST[:-1], f"other.tgz: {DIGEST}", f"{DIGEST}  other.tgz", f"{DIGEST[:-1]}g"],
)
def test_what_is_no_checksum_of_this_file_is_refused(text: str) -> None:
    with pytest.raises(InstallFailed, match=f"expected the SHA-512 of {ARCHIVE_NAME}"):
        parse_sha512(text, ARCHIVE_NAME)


def test_a_named_home_is_used_or_refused_never_passed_over(
    kafka_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KAFKA_HOME", raising=False)
    named = Settings(embedded=EmbeddedSettings(kafka_home=kafka_home))
    assert find_kafka_home(named, cache=tmp_path) == kafka_home
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        find_kafka_home(Settings(), cache=tmp_path)
    assert find_kafka_home(named, cache=tmp_path) == kafka_home
