"""Text for the demo: the sources and licences of the running Python."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Final

from alphaloop.errors import ConfigError

_LICENCE_NAMES: Final = ("LICENSE.txt", "LICENSE")
_MIN_LETTERS: Final = 0.9


@dataclass(frozen=True, slots=True)
class Function:
    """A documented function of the standard library."""

    module: str
    name: str
    signature: str  #: from `def` to the colon, on one line
    docstring: str
    body: str  #: without the docstring, indented as in the file

    @property
    def source(self) -> str:
        """The function without its docstring."""
        return f"{self.signature}\n{self.body}"


@dataclass(frozen=True, slots=True)
class ModuleDoc:
    """The documentation at the top of a module."""

    module: str
    text: str


def stdlib_folder() -> Path:
    """Where this Python's own sources lie. Raises ConfigError where there are none to read."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not any(folder.glob("*.py")):
        raise ConfigError(f"expected the sources of Python's standard library in {folder}, found no .py file")
    return folder


def modules(folder: Path, rng: Random) -> Iterator[tuple[str, ast.Module, str]]:
    """Public top-level modules as (name, tree, source), in an order that depends only on the seed."""
    paths = sorted(path for path in folder.glob("*.py") if not path.stem.startswith(("_", "test")))
    rng.shuffle(paths)
    for path in paths:
        try:
            source = path.read_text(encoding="utf-8")
            yield path.stem, ast.parse(source), source
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue  # a distribution may patch or drop single files


def functions(module: str, tree: ast.Module, source: str) -> Iterator[Function]:
    """The documented top-level functions of a module that take something, in their order."""
    lines = source.splitlines()
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.decorator_list:
            continue
        docstring = ast.get_docstring(node)
        arguments = node.args
        has_parameters = bool(arguments.posonlyargs or arguments.args or arguments.kwonlyargs)
        if not docstring or not has_parameters or len(node.body) < 2:
            continue
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield Function(
            module,
            node.name,
            f"def {node.name}({ast.unparse(arguments)}){returns}:",
            docstring,
            "\n".join(lines[node.body[1].lineno - 1 : node.end_lineno]),
        )


def module_doc(module: str, tree: ast.Module) -> ModuleDoc | None:
    """A module's documentation; None without one."""
    docstring = ast.get_docstring(tree)
    return ModuleDoc(module, docstring) if docstring else None


def licence_clauses(folder: Path) -> list[str]:
    """Paragraphs of Python's licence, and where that is not installed, of the installed packages' licences.

    Tables and signatures are left out: a clause is mostly letters.
    """
    text = next((text for path in _licence_files(folder) if (text := _read(path))), None)
    texts = [text] if text is not None else [found for found in map(_read, _package_licences()) if found]
    clauses: dict[str, None] = {}
    for text in texts:
        clauses.update(dict.fromkeys(" ".join(part.split()) for part in text.split("\n\n")))
    return [clause for clause in clauses if sum(c.isalpha() or c == " " for c in clause) > _MIN_LETTERS * len(clause)]


def _licence_files(folder: Path) -> Iterator[Path]:
    for place in (folder, folder.parent, Path(sys.base_prefix)):
        yield from (place / name for name in _LICENCE_NAMES)


def _package_licences() -> Iterator[Path]:
    for distribution in sorted(metadata.distributions(), key=lambda found: found.name or ""):
        for file in distribution.files or ():
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
                yield Path(str(distribution.locate_file(file)))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
