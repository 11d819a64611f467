"""The import rules hold."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

import engine

ROOT: Final = Path(__file__).resolve().parents[1]
RULES: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]
#: Who may import what: everybody else must stand in a contract against it.
OWNERS: Final = {
    "torch": ("engine", "alphaloop.inside_vllm"),
    "transformers": ("engine",),
    "sqlalchemy": ("alphaloop.store", "alphaloop.tables", "alphaloop.embedded"),
    "psycopg": ("alphaloop.store", "alphaloop.tables", "alphaloop.embedded"),
    "confluent_kafka": ("alphaloop.kafka",),
    "fsspec": ("alphaloop.claim_check",),
    "rich": ("alphaloop.cli", "alphaloop.demo"),
    "typer": ("alphaloop.cli",),
    "starlette": ("alphaloop.console",),
    "uvicorn": ("alphaloop.console",),
    "aiohttp": ("worker.servers",),
    "vllm": ("alphaloop.inside_vllm",),
}

#: The one module that asks for the time of day, because APScheduler's next run is by the machine's clock.
TIMES_OF_DAY: Final = {"scheduler.timetable"}


def test_every_contract_is_kept() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    for contract in RULES["contracts"]:
        assert f"{contract['name']} KEPT" in done.stdout


def modules() -> dict[str, str]:
    """Source of every module by its dotted name."""
    found = {}
    for package in RULES["root_packages"]:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def imported(source: str) -> list[str]:
    """Modules that a source imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return plain + [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize("library", sorted(OWNERS))
def test_only_its_owner_imports_a_library(library: str) -> None:
    for name, source in modules().items():
        imports = [
            line.split()[1] for line in map(str.strip, source.splitlines()) if line.startswith(("import ", "from "))
        ]
        uses = any(module == library or module.startswith(f"{library}.") for module in imports)
        assert not uses or name.startswith(OWNERS[library]), f"{name} imports {library}"


def test_the_processes_never_ask_their_machine_for_the_time_of_day() -> None:
    """It comes from alphaloop.store.database: a machine whose clock is wrong must not expire jobs."""
    asked = {"datetime.now", "datetime.utcnow", "datetime.today", "date.today", "time.time"}
    for name, source in modules().items():
        calls = (ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
        if name.split(".")[0] in ("engine", "worker", "scheduler") and name not in TIMES_OF_DAY:
            assert not asked & set(calls), name


def test_a_command_line_is_declared_once() -> None:
    """`alphaloop.cli` declares the commands in typer; the two services alone have options of their own."""
    found = {name for name, source in modules().items() if "argparse" in imported(source)}
    assert found == {"worker.__main__", "scheduler.__main__"}


def test_the_engine_offers_at_run_time_what_its_types_say() -> None:
    """They are imported when they are first asked for, so a type checker reads them from a block of their own."""
    package = ast.parse((ROOT / "engine" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in package.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    typed = {
        name.name: found.module for found in block.body if isinstance(found, ast.ImportFrom) for name in found.names
    }
    assert typed == engine._OFFERED
    assert all(getattr(engine, name) is not None for name in typed)
