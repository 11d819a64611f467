"""How a benchmark reports: the machine it ran on, words on standard error, and a last line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from alphaloop.errors import AlphaloopError

REPOSITORY: Final = Path(__file__).resolve().parents[1]
#: Where servers keep their data and contestants their words.
FOLDER: Final = REPOSITORY / ".alphaloop" / "benchmarks"

#: A file or a pipe has no width of its own; tables need this one.
console = Console(stderr=True, width=None if sys.stderr.isatty() else 150)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser for the options of the module that runs; `doc` is its docstring."""
    spec = sys.modules["__main__"].__spec__
    name = spec.name.removesuffix(".__main__") if spec else "the benchmark"
    return argparse.ArgumentParser(
        prog=f"python -m {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def table_of(title: str, *headings: str) -> Table:
    """A table whose first column has words and the others numbers."""
    made = Table(title=title)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left")
    return made


def machine() -> dict[str, Any]:
    """Hardware and versions, and how busy the machine is."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def checkout() -> dict[str, Any]:
    """The commit of this checkout, and whether tracked files differ from it."""
    changed = git(REPOSITORY, "status", "--porcelain", "--untracked-files=no").stdout.strip()
    return {"commit": commit_of(REPOSITORY, "HEAD"), "has_changes": bool(changed)}


def commit_of(repository: Path, name: str) -> str:
    """The full hash of a commit. Raises ValueError where this checkout has no such commit."""
    done = git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if done.returncode:
        raise ValueError(f"{name}: no such commit in {repository}; name another, or leave the baseline out")
    return done.stdout.strip()


def git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Ask git; its exit status is the caller's to read."""
    return subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, timeout=120)


def print_found(measure: Callable[[], Mapping[str, Any]], is_wrong: Callable[[Mapping[str, Any]], bool]) -> int:
    """Print what was found as the last line. The exit code: 0, 1 where it is wrong, 2 where measuring failed."""
    try:
        found = measure()
    except (AlphaloopError, OSError, RuntimeError, ValueError) as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    print(json.dumps(found))
    return int(is_wrong(found))
