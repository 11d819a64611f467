"""Prompts of eight tasks from this Python's sources: some for probe sets, others for traffic, none in both."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Final, TypeAlias, TypeVar

from alphaloop.errors import ConfigError

# About 60 to 400 tokens: long enough for look-up, short enough for a laptop.
MIN_CHARS: Final = 240
MAX_CHARS: Final = 1300
_MAX_PER_MODULE: Final = 3

Item = TypeVar("Item")
Maker: TypeAlias = Callable[[Item], str]


@dataclass(frozen=True, slots=True)
class DemoPrompts:
    """Prompts by task."""

    traffic: Mapping[str, Sequence[str]]
    probes: Mapping[str, Sequence[str]]

    @property
    def num_traffic(self) -> int:
        """Jobs to send."""
        return sum(len(prompts) for prompts in self.traffic.values())


def harvest(
    seed: int, *, num_traffic: int, num_probes: int, tasks: Collection[str] | None = None, folder: Path | None = None
) -> DemoPrompts:
    """`num_traffic` and `num_probes` prompts of each task, of all tasks if none are named.

    The same for the same arguments and the same Python. Raises ConfigError where this Python came without its sources.
    """
    folder = folder or stdlib_folder()
    rng = Random(seed)
    each = num_traffic + num_probes
    by_function, by_module = _read_library(folder, rng, wanted=each)
    prompts = {
        **_deal(by_function, _of(FROM_FUNCTIONS, tasks), each),
        **_deal(by_module, _of(FROM_MODULES, tasks), each),
        **_deal(_shuffled(licence_clauses(folder), rng), _of(FROM_CLAUSES, tasks), each),
    }
    short = {task: len(found) for task, found in prompts.items() if len(found) < each}
    if short:
        raise ConfigError(
            f"expected {each} prompts a task from {folder}, found too few: {short}",
            hint="the demo reads the sources and the licence of the Python that runs it; use a full installation",
        )
    return DemoPrompts(
        traffic={task: found[num_probes:] for task, found in prompts.items()},
        probes={task: found[:num_probes] for task, found in prompts.items()},
    )


def _code(function: Function) -> str:
    lines = function.body.splitlines()
    started = "\n".join(lines[: max(1, len(lines) // 2)])
    return (
        f"Complete this function of Python's module {function.module}. Answer with the rest of its code.\n\n"
        f"```python\n{function.signature}\n{_quoted(function.docstring)}\n{started}\n```"
    )


def _docstring(function: Function) -> str:
    return f"Write the docstring of this Python function.\n\n```python\n{function.source}\n```"


def _test_writing(function: Function) -> str:
    return (
        f"Write a pytest test of {function.module}.{function.name}.\n\n"
        f"```python\n{function.signature}\n{_quoted(function.docstring)}\n{function.body}\n```"
    )


def _function_calling(function: Function) -> str:
    return (
        f"You can call this function:\n\n{function.module}.{function.name}: "
        f"`{function.signature.removeprefix('def ').removesuffix(':')}`\n{function.docstring}\n\n"
        f'Answer with one call as JSON, {{"name": "{function.module}.{function.name}", "arguments": {{…}}}}, '
        "that gives every parameter a sensible value."
    )


def _extraction(function: Function) -> str:
    return (
        "List every parameter of this function as JSON: name, default (null if it has none), meaning.\n\n"
        f"```python\n{function.signature}\n{_quoted(function.docstring)}\n```"
    )


def _question_answering(doc: ModuleDoc) -> str:
    return (
        f"This is the documentation of Python's module {doc.module}:\n\n{doc.text}\n\n"
        f"What is {doc.module} for, and when would one use it? Answer in two sentences."
    )


def _summarization(doc: ModuleDoc) -> str:
    return f"Summarise this text in one sentence.\n\n{doc.text}"


def _legal(clause: str) -> str:
    return f"Explain in plain words what this clause of a licence allows, demands or excludes.\n\n{clause}"


FROM_FUNCTIONS: Final[Mapping[str, Callable[[Function], str]]] = {
    "code": _code,
    "docstring": _docstring,
    "test_writing": _test_writing,
    "function_calling": _function_calling,
    "extraction": _extraction,
}
FROM_MODULES: Final[Mapping[str, Callable[[ModuleDoc], str]]] = {
    "summarization": _summarization,
    "question_answering": _question_answering,
}
FROM_CLAUSES: Final[Mapping[str, Callable[[str], str]]] = {"legal": _legal}
#: All tasks that prompts can be made for, in the order of tables.
TASKS: Final = (*FROM_FUNCTIONS, *FROM_MODULES, *FROM_CLAUSES)


def _of(makers: Mapping[str, Maker[Item]], tasks: Collection[str] | None) -> dict[str, Maker[Item]]:
    return {task: maker for task, maker in makers.items() if tasks is None or task in tasks}


def _read_library(folder: Path, rng: Random, *, wanted: int) -> tuple[list[Function], list[ModuleDoc]]:
    """At least `wanted` functions and module docs, because parsing the whole library would take seconds."""
    found: list[Function] = []
    docs: list[ModuleDoc] = []
    for name, tree, source in modules(folder, rng):
        some = list(functions(name, tree, source))
        found.extend(rng.sample(some, min(_MAX_PER_MODULE, len(some))))
        doc = module_doc(name, tree)
        if doc is not None:
            docs.append(_cut_doc(doc))
        if len(found) > 4 * wanted * len(FROM_FUNCTIONS) and len(docs) > 4 * wanted * len(FROM_MODULES):
            break
    return found, docs


def _deal(items: Sequence[Item], makers: Mapping[str, Callable[[Item], str]], each: int) -> dict[str, list[str]]:
    """Give each item to the task with the fewest prompts among those that make a prompt of the right size of it."""
    dealt: dict[str, list[str]] = {task: [] for task in makers}
    for item in items:
        for task in sorted(makers, key=lambda task: len(dealt[task])):
            if len(dealt[task]) < each and _fits(prompt := makers[task](item)):
                dealt[task].append(prompt)
                break
    return dealt


def _fits(prompt: str) -> bool:
    return MIN_CHARS <= len(prompt) <= MAX_CHARS


def _cut_doc(doc: ModuleDoc) -> ModuleDoc:
    """The first paragraphs of a long documentation, whole ones."""
    kept = ""
    for part in doc.text.split("\n\n"):
        if len(kept) + len(part) > MAX_CHARS - 300:
            break
        kept = f"{kept}\n\n{part}" if kept else part
    return ModuleDoc(doc.module, kept)


def _quoted(docstring: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in f'"""{docstring}\n"""'.splitlines())


def _shuffled(items: list[str], rng: Random) -> list[str]:
    rng.shuffle(items)
    return items


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
