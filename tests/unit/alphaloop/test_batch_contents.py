"""The content of the API's files, in a folder and in a store: the same bytes back, and nothing left behind."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphaloop.batches.contents import FileContents
from alphaloop.errors import ContentAltered, ContentMissing
from alphaloop.settings import ClaimCheckSettings, Settings

MB = 1 << 20


@pytest.fixture(params=["folder", "store"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    (tmp_path / "store").mkdir()
    check = ClaimCheckSettings(url=str(tmp_path / "store") if request.param == "store" else None, max_bytes=3 * MB)
    return Settings(data_dir=tmp_path / "my data, ü", claim_check=check)


def files(settings: Settings) -> list[Path]:
    """Everything that lies anywhere."""
    return [path for path in settings.data_dir.parent.rglob("*") if path.is_file()]


@pytest.mark.parametrize("num_bytes", [0, 1, 3 * MB, 7 * MB + 5])
def test_content_comes_back_and_goes(settings: Settings, num_bytes: int) -> None:
    contents = FileContents(settings)
    content = bytes(range(256)) * (num_bytes // 256 + 1)
    content = content[:num_bytes]
    pieces = (content[start : start + 100_000] for start in range(0, num_bytes, 100_000))
    found, parts = contents.write("file-1", pieces)
    assert found == num_bytes
    if parts is not None:
        assert [part["num_bytes"] for part in parts] == [3 * MB] * (num_bytes // (3 * MB)) + [num_bytes % (3 * MB)] * (
            num_bytes % (3 * MB) > 0
        )
    assert b"".join(contents.read("file-1", parts)) == content
    with contents.as_file("file-1", parts) as path:
        assert path.read_bytes() == content
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files(settings) if parts is None)
    contents.delete("file-1", parts)
    contents.delete("file-1", parts)
    assert files(settings) == []


def test_what_breaks_off_leaves_nothing(settings: Settings) -> None:
    def half() -> Iterator[bytes]:
        yield b"x" * 4 * MB
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        FileContents(settings).write("file-1", half())
    assert files(settings) == []


def test_content_that_is_gone_or_altered_is_told(settings: Settings) -> None:
    contents = FileContents(settings)
    _, parts = contents.write("file-1", [b"content"])
    (path,) = files(settings)
    if parts is not None:
        path.write_bytes(b"changed")
        with pytest.raises(ContentAltered):
            list(contents.read("file-1", parts))
    path.unlink()
    with pytest.raises(ContentMissing):
        list(contents.read("file-1", parts))
