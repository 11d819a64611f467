"""Files that a person names, `-` being standard input or output, and files that take the place of others in one step.

What an input is written in is decided once, by its first bytes: UTF-8, or UTF-16 with a byte order mark; each perhaps
compressed with gzip. Its lines come out as UTF-8.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import io
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self, cast

from alphaloop.errors import ConfigError, StartFailed
from alphaloop.wording import one_line

STANDARD: Final = "-"
_LOCK_POLL_S: Final = 0.1
_GZIP: Final = b"\x1f\x8b"
#: Byte order marks with Python's name and that for people.
_MARKS: Final = (
    (b"\xef\xbb\xbf", "utf-8", "UTF-8 with a byte order mark"),
    (b"\xff\xfe", "utf-16-le", "UTF-16"),
    (b"\xfe\xff", "utf-16-be", "UTF-16"),
)
_HINT: Final = "name a file of JSON lines, or - for standard input"
_OWN_DESCRIPTORS: Final = re.compile(rf"/proc/{os.getpid()}(?:/task/[0-9]+)?/fd|/dev/fd")
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class Source:
    """An input. Its lines raise ConfigError where it breaks off, or goes on in another encoding than it began with."""

    name: str  #: for reports
    form: str  #: what it is written in, for people; empty for plain UTF-8
    lines: Iterator[bytes]  #: UTF-8, with their line ends; read once


def shown_name(name: Path | str) -> str:
    """The name of an input in reports."""
    return "standard input" if str(name) == STANDARD else one_line(str(name))


@contextmanager
def reading(
    name: Path | str, *, max_bytes: int | None = None, say: Callable[[str], object] | None = None
) -> Iterator[Source]:
    """A file, a pipe, or standard input; `say` gets a sentence about any other form than plain UTF-8.

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
    if len(head) == 4 and (head[::2] == b"\0\0" or head[1::2] == b"\0\0") and not _mark(head)[0]:
        raise ConfigError(
            f"{name}: expected UTF-8, found what looks like UTF-16 without a byte order mark",
            hint="convert it: iconv -t UTF-8 -f UTF-16LE",
        )
    mark, encoding, encoding_name = _mark(head)
    return Source(
        name,
        " in ".join([encoding_name, *forms] if encoding_name else forms),
        _lines(stream, name, len(mark), encoding),
    )


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
    Anything else (a device, a pipe, standard output under any of its names, a file that has another owner, group or
    further name, which a new one would not have) is written through.
    """

    name: str
    _option: str
    _path: Path | None  #: None: an open descriptor
    _descriptor: int = _STDOUT
    _mode: int | None = None  #: rights of the regular file that is there
    _is_through: bool = False

    @classmethod
    def of(cls, name: Path | str, *, option: str, inputs: Iterable[Path | str] = ()) -> Destination:
        """The destination that `option` names. Raises ConfigError where it cannot be written, or is an input."""
        if str(name) == STANDARD:
            return cls(str(name), option, None)
        try:
            path, descriptor = _followed(Path(name))
            if path is None:
                return cls(str(name), option, None, descriptor)
            status = path.stat() if path.exists() else None
            if status is None:
                if not path.parent.is_dir():
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                if not os.access(path.parent, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                return cls(str(name), option, path)
            if any(_is_same(status, source) for source in inputs):
                raise ConfigError(
                    f"{one_line(str(name))}: is the input; {option} would destroy it", hint="name another file"
                )
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            is_regular = stat.S_ISREG(status.st_mode)
            is_ours_alone = (status.st_uid, status.st_gid, status.st_nlink) == (os.geteuid(), os.getegid(), 1)
            is_through = not (is_regular and is_ours_alone and os.access(path.parent, os.W_OK))
            mode = stat.S_IMODE(status.st_mode) if is_regular else None
            return cls(str(name), option, path, _mode=mode, _is_through=is_through)
        except OSError as error:
            raise _unwritable(str(name), option, error) from None

    @contextmanager
    def writing(self) -> Iterator[IO[str]]:
        """Open for text. An error in the block leaves a regular file as it was. Raises ConfigError."""
        if self._path is None and self._descriptor in (_STDOUT, _STDERR):
            stream = sys.stdout if self._descriptor == _STDOUT else sys.stderr
            yield stream
            stream.flush()
            return
        try:
            with ExitStack() as stack:
                if self._path is None:
                    file: IO[bytes] = stack.enter_context(open(os.dup(self._descriptor), "wb"))
                elif self._is_through:
                    flags = os.O_WRONLY | (os.O_TRUNC if self._mode is not None else 0)
                    file = stack.enter_context(open(os.open(self._path, flags), "wb"))
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
        chunk, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        if not chunk:
            # What a pipe has now: lines are to come out as they are written.
            read: Any = getattr(self._rest, "read1", self._rest.read)
            chunk = read(len(buffer))
        buffer[: len(chunk)] = chunk
        self._num_bytes += len(chunk)
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            raise ConfigError(
                f"{self._name}: expected at most {self._max_bytes / 1e6:,.0f} MB, found more", hint="split the file"
            )
        return len(chunk)


def _opened(name: Path | str, stack: ExitStack) -> IO[bytes]:
    if str(name) == STANDARD:
        return sys.stdin.buffer
    try:
        return stack.enter_context(open(name, "rb"))
    except OSError as error:
        raise ConfigError(f"{shown_name(name)}: {error.strerror or error}", hint=_HINT) from None


def _head(file: IO[bytes]) -> bytes:
    head = b""
    while len(head) < 4 and (more := file.read(4 - len(head))):
        head += more
    return head


def _mark(head: bytes) -> tuple[bytes, str, str]:
    return next((known for known in _MARKS if head.startswith(known[0])), (b"", "utf-8", ""))


def _lines(stream: _Stream, name: str, num_skipped: int, encoding: str) -> Iterator[bytes]:
    with _in_words(name):
        buffered = io.BufferedReader(stream, 1 << 16)
        buffered.read(num_skipped)
        if encoding == "utf-8":  # a line that is not is for its reader to refuse
            yield from buffered
        else:
            for line in io.TextIOWrapper(buffered, encoding=encoding, newline="\n"):
                yield line.encode("utf-8", "surrogatepass")


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    """Errors of reading as ConfigError."""
    try:
        yield
    except UnicodeDecodeError as error:
        problem = f"expected {error.encoding.upper()} to the end, as its byte order mark says, found something else"
        raise ConfigError(f"{name}: {problem}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ConfigError(f"{name}: expected the whole of a gzip file, found a part or a damaged one") from None
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}", hint=_HINT) from None


def _followed(path: Path) -> tuple[Path | None, int]:
    """Where a path leads after its symbolic links: a path, or a descriptor of this process. Raises OSError."""
    for _ in range(40):
        folder = os.path.realpath(path.parent)
        if _OWN_DESCRIPTORS.fullmatch(folder) and path.name.isdecimal():
            return None, int(path.name)
        if not path.is_symlink():
            return Path(folder) / path.name, 0
        path = Path(folder) / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _is_same(status: os.stat_result, name: Path | str) -> bool:
    with suppress(OSError, ValueError):  # an input that is not there; standard input without a descriptor
        other = os.fstat(sys.stdin.fileno()) if str(name) == STANDARD else os.stat(name)
        return stat.S_ISREG(status.st_mode) and os.path.samestat(status, other)
    return False


def _let_go(text: io.TextIOWrapper) -> None:
    with suppress(OSError, ValueError):  # what could not be written was said already
        text.detach()


def _unwritable(name: str, option: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{one_line(name)}: {error.strerror or error}", hint=f"{option} takes a file that can be written"
    )


def read_toml(path: Path, *, required: bool) -> dict[str, Any]:
    """A file of TOML; empty without one where none is `required`. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"expected a file, found nothing at {path}") from None
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: expected TOML, found: {error}") from None


class FolderLock:
    """An exclusive lock on `path`. A child that inherits `fileno()` holds it beyond `close()`, as long as it lives."""

    def __init__(self, path: Path, *, what: str, wait_s: float) -> None:
        """Take it, waiting up to `wait_s` for its last owner to end. Raises StartFailed, naming that owner."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            problem = f"{path.parent}: expected a folder to write in, found: {error.strerror}"
            raise StartFailed(problem, hint="choose another folder with --data-dir") from error
        deadline = time.monotonic() + wait_s
        while not _try_lock(self._file, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                owner = os.pread(self._file, 32, 0).decode("ascii", errors="replace").strip() or "unknown"
                os.close(self._file)
                raise StartFailed(
                    f"{path.parent} is in use: {what} runs there, started by process {owner}",
                    hint="stop it, or choose another folder with --data-dir",
                )
            time.sleep(_LOCK_POLL_S)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode("ascii"), 0)

    def fileno(self) -> int:
        """The descriptor to hand to a child."""
        return self._file

    def close(self) -> None:
        """Close this process's descriptor of the lock. Safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock at `path`."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    with contextlib.closing(os.fdopen(file)):
        return not _try_lock(file, fcntl.LOCK_SH)


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
