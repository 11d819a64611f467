"""Files that a person names, `-` being standard input or output, and files that take the place of others in one step.

An input is UTF-8, perhaps with a byte order mark and compressed with gzip. Its first bytes decide that once.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import io
import os
import secrets
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

from alphaloop.errors import ConfigError

STANDARD: Final = "-"
_GZIP: Final = b"\x1f\x8b"
_OTHERS: Final = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz", b"BZh": "bzip2"}
_HINT: Final = "name a file of JSON lines, or - for standard input"
_NUMBERED: Final = {1: "stdout", 2: "stderr"}
#: Names of this process's own streams. They are written to, not opened again.
_STREAMS: Final = {
    "-": "stdout",
    **{f"{folder}{number}": name for folder in ("/dev/fd/", "/proc/self/fd/") for number, name in _NUMBERED.items()},
    **{f"/dev/{name}": name for name in _NUMBERED.values()},
}


@dataclass(frozen=True, slots=True)
class Source:
    """An input. Its lines raise ConfigError where it breaks off."""

    name: str  #: for reports
    form: str  #: what it is written in, for people; empty for plain UTF-8
    lines: Iterator[bytes]  #: with their line ends; read once


def shown_name(name: Path | str) -> str:
    """The name of an input in reports."""
    return "standard input" if str(name) == STANDARD else str(name)


@contextmanager
def reading(
    name: Path | str, *, max_bytes: int | None = None, say: Callable[[str], object] | None = None
) -> Iterator[Source]:
    """A file, a pipe, or standard input; `say` is told of any other form than plain UTF-8.

    Raises ConfigError for one that cannot be read.
    """
    with ExitStack() as stack:
        source = source_of(_opened(name, stack), shown_name(name), max_bytes=max_bytes)
        if say is not None and source.form:
            say(f"{source.name} is read as {source.form}")
        yield source


def source_of(file: IO[bytes], name: str, *, max_bytes: int | None = None) -> Source:
    """The input in an open file. More than `max_bytes` of it, once decompressed, are a ConfigError.

    Raises ConfigError for an input of a form that is not read.
    """
    head = _head(file)
    stream, forms = _Stream(head, file, name, max_bytes), []
    if head.startswith(_GZIP):
        opened = gzip.GzipFile(fileobj=io.BufferedReader(stream))
        forms.append("gzip")
        with _in_words(name):
            head = _head(cast(IO[bytes], opened))
        stream = _Stream(head, cast(IO[bytes], opened), name, max_bytes)
    for magic, kind in _OTHERS.items():
        if head.startswith(magic):
            raise ConfigError(
                f"{name}: expected JSON lines, found a file of {kind}", hint="decompress it; gzip is read"
            )
    if b"\0" in head or head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(
            f"{name}: expected UTF-8, found what looks like UTF-16 or UTF-32",
            hint="convert it: iconv -t UTF-8 -f UTF-16",
        )
    has_mark = head.startswith(codecs.BOM_UTF8)
    told = ["UTF-8 with a byte order mark", *forms] if has_mark else forms
    return Source(name, " in ".join(told), _lines(stream, name, len(codecs.BOM_UTF8) if has_mark else 0))


@contextmanager
def readable_again(name: Path | str) -> Iterator[Path]:
    """A file that can be read several times: the named one, or a copy of what comes by a pipe or standard input.

    Raises ConfigError.
    """
    with ExitStack() as stack:
        file = _opened(name, stack)
        if str(name) != STANDARD and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            stack.close()
            yield Path(name)
            return
        copy = stack.enter_context(tempfile.NamedTemporaryFile(prefix="alphaloop-", suffix=".jsonl"))  # mode 0600
        with _in_words(shown_name(name)):
            shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
        yield Path(copy.name)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a command writes what a person named. It is checked when it is made, before anything is done for it.

    A regular file is replaced in one step and keeps its rights; of a symbolic link, the file that it leads to.
    Anything else (a device, a pipe, standard output under any of its names) is written through.
    """

    name: str
    _option: str
    _path: Path | None  #: None: standard output or standard error
    _mode: int | None = None  #: rights of the regular file that is there
    _is_through: bool = False

    @classmethod
    def of(cls, name: Path | str, *, option: str, inputs: Iterable[Path | str] = ()) -> Destination:
        """The destination that `option` names. Raises ConfigError where it cannot be written, or is an input."""
        if str(name) in _STREAMS:
            return cls(str(name), option, None)
        path = Path(os.path.realpath(name))
        try:
            try:
                found = os.stat(name)
            except FileNotFoundError:
                if not path.parent.is_dir():
                    raise
                return cls(str(name), option, path)
            if any(_is_same(found, one) for one in inputs):
                raise ConfigError(f"{name}: is the input; {option} would destroy it", hint="name another file")
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not os.access(name, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            is_regular = stat.S_ISREG(found.st_mode)
            if not is_regular:
                return cls(str(name), option, Path(name), _is_through=True)
            mode, is_through = stat.S_IMODE(found.st_mode), not os.access(path.parent, os.W_OK)
            return cls(str(name), option, path, mode, is_through)
        except OSError as error:
            raise _unwritable(str(name), option, error) from None

    @contextmanager
    def writing(self) -> Iterator[IO[str]]:
        """Open for text. An error in the block leaves a regular file as it was. Raises ConfigError."""
        if self._path is None:
            stream: IO[str] = getattr(sys, _STREAMS[self.name])
            yield stream
            stream.flush()
            return
        try:
            with ExitStack() as stack:
                if self._is_through:
                    flags = os.O_WRONLY | (os.O_TRUNC if self._mode is not None else 0)
                    file: IO[bytes] = stack.enter_context(open(os.open(self._path, flags), "wb"))
                else:
                    file = stack.enter_context(replacing(self._path, mode=self._mode))
                text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="\n")
                stack.callback(_let_go, text)
                yield text
                text.flush()
        except OSError as error:
            raise _unwritable(self.name, self._option, error) from None


@contextmanager
def replacing(path: Path, *, mode: int | None = None) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when the block ends without an error, with these rights or the umask's.

    Its name never shows half of it, not even after a power cut. A link is replaced, not followed.
    """
    part = path.with_name(f"{os.fsdecode(os.fsencode(path.name)[:200])}.{secrets.token_hex(16)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if mode is not None:
                os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        try:
            part.replace(path)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            shutil.copyfile(part, path)  # a file that is mounted by itself, as in a container, cannot be replaced
    finally:
        part.unlink(missing_ok=True)


def replace_file(path: Path, content: str | bytes, *, mode: int | None = None) -> None:
    """Write a whole file in one step, text as UTF-8."""
    with replacing(path, mode=mode) as file:
        file.write(content if isinstance(content, bytes) else content.encode())


class _Stream(io.RawIOBase):
    """A stream whose first bytes were read already, up to a limit."""

    def __init__(self, head: bytes, rest: IO[bytes], name: str, max_bytes: int | None) -> None:
        self._head = head
        self._rest = rest
        self._name = name
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        if not found:
            # What a pipe has now: lines are to come out as they are written.
            read: Any = getattr(self._rest, "read1", self._rest.read)
            found = read(len(buffer))
        buffer[: len(found)] = found
        self._num_bytes += len(found)
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            raise ConfigError(
                f"{self._name}: expected at most {self._max_bytes / 1e6:,.0f} MB, found more", hint="split the file"
            )
        return len(found)


def _opened(name: Path | str, stack: ExitStack) -> IO[bytes]:
    if str(name) == STANDARD:
        return sys.stdin.buffer
    try:
        return stack.enter_context(open(name, "rb"))
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}", hint=_HINT) from None


def _head(file: IO[bytes]) -> bytes:
    head = b""
    while len(head) < 4 and (more := file.read(4 - len(head))):
        head += more
    return head


def _lines(stream: _Stream, name: str, num_skipped: int) -> Iterator[bytes]:
    with _in_words(name):
        buffered = io.BufferedReader(stream, 1 << 16)
        buffered.read(num_skipped)
        yield from buffered  # a line that is not UTF-8 is for its reader to refuse


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    """Errors of reading as ConfigError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ConfigError(f"{name}: expected the whole of a gzip file, found a part or a damaged one") from None
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}", hint=_HINT) from None


def _is_same(found: os.stat_result, name: Path | str) -> bool:
    with suppress(OSError, ValueError):  # an input that is not there; standard input without a descriptor
        other = os.fstat(sys.stdin.fileno()) if str(name) == STANDARD else os.stat(name)
        return stat.S_ISREG(found.st_mode) and os.path.samestat(found, other)
    return False


def _let_go(text: io.TextIOWrapper) -> None:
    with suppress(OSError, ValueError):  # what could not be written was said already
        text.detach()


def _unwritable(name: str, option: str, error: OSError) -> ConfigError:
    return ConfigError(f"{name}: {error.strerror or error}", hint=f"{option} takes a file that can be written")
