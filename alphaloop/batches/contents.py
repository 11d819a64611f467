"""The content of the API's files: in the claim-check store, where there is one, else in the data folder.

In the store a file is cut into parts, each written and read with the bounds of any content there, and verified. Every
scheduler reads it then. A file of the data folder is read by the schedulers of that folder only.

Content holds prompts and texts: in the folder only the account of the process may read it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from alphaloop.claim_check.store import ContentStore
from alphaloop.errors import ConfigError, ContentError, ContentMissing, ContentStoreUnavailable
from alphaloop.messages.job import ContentReference
from alphaloop.settings import Settings

_FOLDER: Final = "api"
_PART_BYTES: Final = 8 << 20
_CHUNK_BYTES: Final = 1 << 18

Parts = Sequence[Mapping[str, Any]]


class FileContents:
    """Writes, reads and deletes content by the id of its file. Threads share it."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where the store's package is missing."""
        self._store = ContentStore.of(settings.claim_check)
        self._part_bytes = min(_PART_BYTES, settings.claim_check.max_bytes)
        self._folder = settings.api_files

    def write(self, file_id: str, chunks: Iterable[bytes]) -> tuple[int, Parts | None]:
        """Keep content; again under the same id it takes the place of what was there.

        Returns its length, and where it lies in the store. Raises ContentStoreUnavailable, ConfigError.
        """
        writer = Writer(self, file_id)
        try:
            for chunk in chunks:
                writer.add(chunk)
            return writer.close()
        except BaseException:
            writer.give_up()
            raise

    def read(self, file_id: str, parts: Parts | None) -> Iterator[bytes]:
        """The content, piece by piece. Raises ContentMissing, ContentAltered, ContentStoreUnavailable."""
        if parts is None:
            with self._opened(file_id) as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
            return
        for part in parts:
            yield self._reachable().read(ContentReference.model_validate(part))

    @contextmanager
    def as_file(self, file_id: str, parts: Parts | None) -> Iterator[Path]:
        """A path where the content lies until the end of the block. Raises as `read`."""
        if parts is None:
            with self._opened(file_id):
                yield self._path(file_id)
            return
        with tempfile.NamedTemporaryFile(prefix="alphaloop-", suffix=".jsonl") as copy:  # mode 0600
            for chunk in self.read(file_id, parts):
                copy.write(chunk)
            copy.flush()
            yield Path(copy.name)

    def delete(self, file_id: str, parts: Parts | None) -> None:
        """Delete the content; nothing there is as good. Raises ContentStoreUnavailable."""
        for part in parts or ():
            self._reachable().delete(part["url"])
        if parts is None:
            self._path(file_id).unlink(missing_ok=True)

    def _path(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.jsonl"

    @contextmanager
    def _opened(self, file_id: str) -> Iterator[Any]:
        try:
            file = self._path(file_id).open("rb")
        except FileNotFoundError:
            hint = "is it another machine's folder? Set claim_check.url, and every scheduler reads the same files"
            raise ContentMissing(f"no content of {file_id} in the data folder", hint=hint) from None
        except OSError as error:
            raise ContentStoreUnavailable(f"{file_id}: {error.strerror or error}") from None
        with file:
            yield file

    def _reachable(self) -> ContentStore:
        if self._store is None:
            raise ContentStoreUnavailable(
                "files lie in a claim-check store, and none is set", hint="set claim_check.url"
            )
        return self._store


class Writer:
    """Writes one file. What it holds in memory is bounded. One thread uses it."""

    def __init__(self, contents: FileContents, file_id: str) -> None:
        self.file_id: Final = file_id
        self._store, self._part_bytes = contents._store, contents._part_bytes
        self._held = bytearray()
        self._num_bytes = 0
        self._parts: list[dict[str, Any]] = []
        self._path = contents._path(file_id)
        self._file: Any = None

    def add(self, chunk: bytes) -> None:
        """Write what comes next. Raises ContentStoreUnavailable, ConfigError."""
        self._num_bytes += len(chunk)
        self._held += chunk
        while len(self._held) >= self._part_bytes:
            self._put(bytes(self._held[: self._part_bytes]))
            del self._held[: self._part_bytes]

    def close(self) -> tuple[int, Parts | None]:
        """Write the rest; returns the length, and where it lies in the store."""
        if self._held or not self._num_bytes:
            self._put(bytes(self._held))
            self._held.clear()
        if self._store is not None:
            return self._num_bytes, self._parts
        with self._told():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._file.name, self._path)
        return self._num_bytes, None

    def give_up(self) -> None:
        """Leave nothing of what was written, if the store answers."""
        if self._store is not None:
            for part in self._parts:
                with suppress(ContentError):
                    self._store.delete(part["url"])
        if self._file is not None:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)

    def _put(self, part: bytes) -> None:
        if self._store is not None:
            if part:
                reference = self._store.write(f"{_FOLDER}/{self.file_id}/{len(self._parts):06d}", part)
                self._parts.append(reference.model_dump())
            return
        with self._told():
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - mode 0600; closed by close or give_up
                    dir=self._path.parent, suffix=".part", delete=False
                )
            self._file.write(part)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"{self._path.parent}: {error.strerror or error}"
            raise ConfigError(problem, hint="data_dir must be writable and have room") from None
