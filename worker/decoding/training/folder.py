"""The folder of a run: the draft at its top, and under `.training`, what a stopped run needs to continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from alphaloop.embedded.process import FolderLock
from alphaloop.errors import ConfigError, StartFailed
from alphaloop.files import replace_file

_FORMAT: Final = 1


class RunFolder:
    """One run's folder, locked while it is open."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        """Open it for a run of this plan (JSON). Raises ConfigError if it holds something else, or another plan."""
        self.folder = folder
        self.state = folder / ".training"
        if not self.state.is_dir() and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"expected a new folder or one of an earlier run, found something else at {folder}")
        try:
            self.state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror or error}") from error
        try:
            self._lock = FolderLock(self.state / "lock", what="a training run", wait_s=0.0)
        except StartFailed as error:
            raise ConfigError(error.message, hint="let it end, or give another folder") from None
        try:
            self._agree({"format": _FORMAT, **plan})
        except BaseException:
            self._lock.close()
            raise

    @property
    def state_file(self) -> Path:
        """Weights and optimiser of the training."""
        return self.state / "state.safetensors"

    def close(self) -> None:
        """Release the folder for other processes."""
        self._lock.close()

    def _agree(self, plan: dict[str, Any]) -> None:
        file = self.state / "run.json"
        if not file.exists():
            replace_file(file, json.dumps(plan, indent=2) + "\n")
            return
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: {error}", hint="delete the folder to begin again") from None
        for name in sorted({*plan, *found}):
            if json.loads(json.dumps(plan.get(name))) != found.get(name):
                raise ConfigError(
                    f"{self.folder} holds a run with another {name}: {_short(found.get(name))}, now "
                    f"{_short(plan.get(name))}",
                    hint="give a new folder, or delete this one to begin again",
                )


def digest_of(file: Path | None) -> str | None:
    """The first 12 digits of a file's SHA-256. Raises ConfigError."""
    if file is None:
        return None
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}", hint="expected a JSONL file") from None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
