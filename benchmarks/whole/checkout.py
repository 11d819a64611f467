"""A commit of this repository as a folder of its own, and the proof that a process runs its code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("alphaloop", "worker")
_ASK: Final = "".join(f"import {name}; print({name}.__file__); " for name in _PACKAGES)


def commit_of(repository: Path, name: str) -> str:
    """The full hash of a commit. Raises ValueError where this checkout has no such commit."""
    done = _git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if done.returncode:
        raise ValueError(f"{name}: no such commit in {repository}; name another, or leave the baseline out")
    return done.stdout.strip()


def is_changed(repository: Path) -> bool:
    """Whether tracked files differ from the commit."""
    return bool(_git(repository, "status", "--porcelain", "--untracked-files=no").stdout.strip())


@contextmanager
def worktree(repository: Path, commit: str, folder: Path) -> Iterator[Path]:
    """The commit's files in `folder`, a git worktree; removed afterwards, also when an earlier run left one there."""
    _remove(repository, folder)
    done = _git(repository, "worktree", "add", "--force", "--detach", str(folder), commit)
    if done.returncode:
        raise RuntimeError(f"git worktree add failed: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        _remove(repository, folder)


def check_imports(checkout: Path, environment: Mapping[str, str]) -> None:
    """Ask a process with that environment which files it imports. Raises RuntimeError where they are not `checkout`'s.

    An editable install of another checkout would win silently otherwise.
    """
    command = [sys.executable, "-P", "-c", _ASK]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=True, timeout=60)
    for found in done.stdout.split("\n")[: len(_PACKAGES)]:
        if not Path(found).resolve().is_relative_to(checkout.resolve()):
            raise RuntimeError(f"expected modules of {checkout}, the process imports {found}")


def _remove(repository: Path, folder: Path) -> None:
    if folder.exists():
        _git(repository, "worktree", "remove", "--force", str(folder))
        shutil.rmtree(folder, ignore_errors=True)


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, timeout=120)
