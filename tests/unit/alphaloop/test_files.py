"""Files that a person names: every odd kind of path written, every encoding read."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import stat
import sys
import threading
from pathlib import Path

import pytest

from alphaloop.errors import ConfigError
from alphaloop.files import Destination, Source, readable_again, reading, source_of

TEXT = '{"prompt": "é"}\n{"prompt": "語 🙂"}\n'


def write(path: Path | str, content: str, **given: list[Path | str]) -> None:
    with Destination.of(path, option="--to", **given).writing() as file:
        file.write(content)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_takes_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "new", "x")
    finally:
        os.umask(before)
    assert ((tmp_path / "new").read_text(), mode(tmp_path / "new")) == ("x", 0o640)


@pytest.mark.parametrize("rights", [0o600, 0o644, 0o660, 0o755])
def test_a_file_is_replaced_in_one_step_and_keeps_its_rights(tmp_path: Path, rights: int) -> None:
    path = tmp_path / "there"
    path.write_text("before")
    path.chmod(rights)
    with Destination.of(path, option="--to").writing() as file:
        file.write("after")
        file.flush()
        assert path.read_text() == "before"
        (part,) = (one for one in tmp_path.iterdir() if one != path)
        assert not mode(part) & ~rights, "nobody may read the half file who may not read the whole one"
    assert (path.read_text(), mode(path)) == ("after", rights)
    assert [one.name for one in tmp_path.iterdir()] == ["there"]


def _half(path: Path) -> None:
    with Destination.of(path, option="--to").writing() as file:
        file.write("half")
        file.flush()
        raise ZeroDivisionError


def test_an_error_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError):
        _half(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_relative", [False, True])
def test_of_a_link_the_target_is_replaced_and_the_link_stays(tmp_path: Path, is_relative: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link, outer = tmp_path / "elsewhere" / "target", tmp_path / "link", tmp_path / "outer"
    link.symlink_to(Path("elsewhere/target") if is_relative else target)
    outer.symlink_to(link)
    write(outer, "new")  # a link that leads nowhere yet makes the file
    assert target.read_text() == "new"
    target.chmod(0o600)
    write(outer, "again")
    assert (target.read_text(), mode(target), link.is_symlink(), outer.is_symlink()) == ("again", 0o600, True, True)


def test_a_file_with_another_owner_group_or_name_stays_the_file_that_it_is(tmp_path: Path) -> None:
    there, other = tmp_path / "there", tmp_path / "other"
    there.write_text("longer than what comes after")
    other.hardlink_to(there)
    write(there, "after")
    assert (there.read_text(), other.read_text(), there.stat().st_nlink) == ("after", "after", 2)
    if os.geteuid() != 0:
        pytest.skip("only root gives a file to somebody else")
    other.unlink()
    for owner, group in ((12345, 0), (0, 12345)):
        os.chown(there, owner, group)
        there.chmod(0o640)
        write(there, "again")
        found = there.stat()
        assert (there.read_text(), mode(there), found.st_uid, found.st_gid) == ("again", 0o640, owner, group)


def test_a_folder_that_takes_no_file_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "folder").mkdir(0o500)
    if os.geteuid() == 0:  # who may write everywhere but on a disk that is mounted read-only
        monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    with pytest.raises(ConfigError, match="new: Permission denied"):
        Destination.of(folder / "new", option="--to")


def test_a_name_stays_in_its_line_of_an_error(tmp_path: Path) -> None:
    name = tmp_path / "a\nerror: all is lost\x1b[2J"
    shown = "a\\nerror: all is lost\\x1b[2J"
    with pytest.raises(ConfigError) as unread, reading(name):
        pass
    with pytest.raises(ConfigError) as unwritten:
        Destination.of(name / "file", option="--to")
    name.write_text("")
    with pytest.raises(ConfigError) as is_input:
        Destination.of(name, option="--to", inputs=[name])
    for refused in (unread, unwritten, is_input):
        assert shown in refused.value.message
    with reading(name) as source:
        assert source.name.endswith(shown)


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe, 0o600)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write(pipe, "through")
    reader.join(30)
    assert found == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_written_through() -> None:
    """A terminal, because a mistake with /dev/null would cost whoever runs the tests theirs."""
    reader, device = os.openpty()
    name = os.ttyname(device)
    write(name, "through")
    assert os.read(reader, 100) == b"through"
    assert stat.S_ISCHR(os.stat(name).st_mode)
    os.close(device)
    os.close(reader)


def test_a_full_device_is_an_error_in_words() -> None:
    with pytest.raises(ConfigError, match="/dev/full: No space left"):
        write("/dev/full", "x" * 100_000)


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_is_written_through(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sys.stdout.write("before ")
    write(name, "after")
    assert capsys.readouterr().out == "before after"


def test_a_file_of_an_open_descriptor_is_written_where_it_stands(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        log.write("before ")
        log.flush()
        write(f"/dev/fd/{log.fileno()}", "after")
    assert (tmp_path / "log").read_text() == "before after"


@pytest.mark.parametrize("name", ["input", "link", "hard", "folder/../input"])
def test_the_input_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "input").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "input")
    (tmp_path / "hard").hardlink_to(tmp_path / "input")
    with pytest.raises(ConfigError, match="is the input"):
        write(tmp_path / name, "x", inputs=[tmp_path / "other", tmp_path / "input"])
    assert (tmp_path / "input").read_text() == "precious"


def test_standard_input_from_a_file_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "input").write_text("precious")
    with (tmp_path / "input").open() as standard_input:
        monkeypatch.setattr(sys, "stdin", standard_input)
        with pytest.raises(ConfigError, match="is the input"):
            write(tmp_path / "input", "x", inputs=["-"])


@pytest.mark.parametrize("path", [".", "missing/file", "loop", "file/below"])
def test_what_cannot_be_written_is_said_before_the_work(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--to takes a file that can be written"):
        Destination.of(tmp_path / path, option="--to")


def test_a_long_name_and_one_that_is_not_utf_8(tmp_path: Path) -> None:
    for name in ("é" * 127, os.fsdecode(b"d\xe4t")):
        write(tmp_path / name, "x")
        assert (tmp_path / name).read_text() == "x"


def told(source: Source) -> tuple[str, str]:
    return source.form, b"".join(source.lines).decode()


FORMS = {
    "utf-8": (TEXT.encode(), ""),
    "utf-8-sig": (TEXT.encode("utf-8-sig"), "UTF-8 with a byte order mark"),
    "utf-16-le": (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"), "UTF-16"),
    "utf-16-be": (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), "UTF-16"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_encoding_is_decided_once(tmp_path: Path, form: str) -> None:
    content, shown = FORMS[form]
    (tmp_path / "plain").write_bytes(content)
    with reading(tmp_path / "plain") as source:
        assert told(source) == (shown, TEXT)
    (tmp_path / "packed").write_bytes(gzip.compress(content))
    with reading(tmp_path / "packed") as source:
        assert told(source) == (" in ".join(filter(None, [shown, "gzip"])), TEXT)


def test_an_empty_file_has_no_line(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with reading(tmp_path / "empty") as source:
        assert list(source.lines) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TEXT.encode("utf-16-le"), "UTF-16 without a byte order mark"),
        (TEXT.encode("utf-16-be"), "UTF-16 without a byte order mark"),
        (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le") + b"\n", "expected UTF-16-LE to the end"),
        (gzip.compress(TEXT.encode(), mtime=0)[:-9], "gzip"),
        (b"\x1f\x8bnot gzip at all", "gzip"),
    ],
)
def test_what_is_not_read_is_named(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^f: .*{message}"):
        list(source_of(io.BytesIO(content), "f").lines)


def test_a_small_file_that_grows_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 1 MB"):
        list(source_of(io.BytesIO(gzip.compress(b" " * 20_000_000)), "f", max_bytes=1_000_000).lines)


def test_lines_of_a_pipe_come_as_they_are_written() -> None:
    read, write_end = os.pipe()
    with open(read, "rb") as file, open(write_end, "wb", buffering=0) as writer:
        writer.write(b'{"a": 1}\n')
        lines = source_of(file, "pipe").lines
        assert next(lines) == b'{"a": 1}\n'
        writer.write(b"2\n")
        assert next(lines) == b"2\n"


def test_a_pipe_is_copied_to_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write_end = os.pipe()
    os.write(write_end, b"content")
    os.close(write_end)
    with readable_again(f"/dev/fd/{read}") as file:
        assert [file.read_bytes(), file.read_bytes()] == [b"content"] * 2
        assert mode(file) == 0o600
    os.close(read)
    assert not file.exists()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"typed")))
    with readable_again("-") as file:
        assert file.read_bytes() == b"typed"
    (tmp_path / "plain").touch()
    with readable_again(tmp_path / "plain") as file:
        assert file == tmp_path / "plain"
