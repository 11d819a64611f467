"""A search of all logs of a run for what must never be in a log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def leaks(folder: Path, forbidden: Mapping[str, str]) -> list[str]:
    """Where a file under `folder` holds one of the texts (name → text); the texts themselves are not repeated."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        found += [f"{path.name} holds {name}" for name, text in forbidden.items() if text.encode() in content]
    return found


def num_bytes(folder: Path) -> int:
    """How much was searched."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
