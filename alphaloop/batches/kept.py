"""Batch files that were uploaded: kept in a folder, so that what became of their lines can be told later.

A file holds prompts: only the account of the process may read it, and it is deleted after some days.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Final

from alphaloop.batches.lines import batch_id_of
from alphaloop.batches.progress import Batch
from alphaloop.errors import ConfigError
from alphaloop.files import replace_file

_BATCH_ID: Final = re.compile(r"batch-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """An uploaded file, and what was said with it."""

    batch_id: str
    name: str  #: of the file on the machine that it came from
    task: str  #: of lines that name none
    by: str  #: who sent it
    at: datetime
    num_bytes: int


class KeptBatches:
    """The folder. Threads and processes may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, content: IO[bytes], *, name: str, task: str, by: str, at: datetime) -> KeptBatch:
        """Keep a file; the same content again is the same batch. Raises ConfigError where it cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".part", delete=False) as part:  # mode 0600
                path = Path(part.name)
                shutil.copyfileobj(content, part, 1 << 20)
            try:
                kept = KeptBatch(batch_id_of(path), name, task, by, at, path.stat().st_size)
                os.replace(path, self._file(kept.batch_id))
            finally:
                path.unlink(missing_ok=True)
            self._say(kept)
        except OSError as error:
            raise ConfigError(f"{self._folder}: {error.strerror or error}", hint="data_dir must be writable") from None
        return kept

    def all(self) -> list[KeptBatch]:
        """Every file, the newest first."""
        return sorted(self._found(), key=lambda one: (one.at, one.batch_id), reverse=True)

    def find(self, batch_id: str) -> KeptBatch | None:
        """The file of this batch."""
        return self._read(batch_id) if _BATCH_ID.fullmatch(batch_id) else None

    def batch(self, batch_id: str) -> Batch:
        """The batch with its file where that is kept, else by its name alone."""
        return Batch(batch_id, self._file(batch_id) if self.find(batch_id) else None)

    def drop_before(self, moment: datetime) -> None:
        """Delete files that were uploaded before then."""
        for one in self._found():
            if one.at < moment:
                self._file(one.batch_id).unlink(missing_ok=True)
                self._facts(one.batch_id).unlink(missing_ok=True)

    def _file(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.jsonl"

    def _facts(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.json"

    def _say(self, kept: KeptBatch) -> None:
        replace_file(self._facts(kept.batch_id), json.dumps({**asdict(kept), "at": kept.at.isoformat()}), mode=0o600)

    def _found(self) -> Iterator[KeptBatch]:
        for path in self._folder.glob("batch-*.json"):
            if (kept := self.find(path.stem)) is not None:
                yield kept

    def _read(self, batch_id: str) -> KeptBatch | None:
        with suppress(OSError, ValueError, TypeError):  # another process deletes it, or is not done
            facts = json.loads(self._facts(batch_id).read_text(encoding="utf-8"))
            if self._file(batch_id).is_file():
                return KeptBatch(**{**facts, "at": datetime.fromisoformat(facts["at"])})
        return None
