"""Prompts of four tasks from this Python's sources: some for probe sets, others for traffic, none in both."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from alphaloop.errors import ConfigError

# About 60 to 400 tokens: long enough for look-up, short enough for a laptop.
MIN_CHARS: Final = 240
MAX_CHARS: Final = 1300
_MAX_PER_MODULE: Final = 3


@dataclass(frozen=True, slots=True)
class DemoPrompts:
    """Prompts by task."""

    traffic: Mapping[str, Sequence[str]]
    probes: Mapping[str, Sequence[str]]

    @property
    def num_traffic(self) -> int:
        """Jobs to send."""
        return sum(len(prompts) for prompts in self.traffic.values())


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


def _extraction(function: Function) -> str:
    return (
        "List every parameter of this function as JSON: name, default (null if it has none), meaning.\n\n"
        f"```python\n{function.signature}\n{_quoted(function.docstring)}\n```"
    )


FROM_FUNCTIONS: Final[Mapping[str, Callable[[Function], str]]] = {
    "code": _code,
    "docstring": _docstring,
    "test_writing": _test_writing,
    "extraction": _extraction,
}


def harvest(
    seed: int, *, num_traffic: int, num_probes: int, tasks: Collection[str] = tuple(FROM_FUNCTIONS)
) -> DemoPrompts:
    """`num_traffic` and `num_probes` prompts of each task.

    The same for the same arguments and the same Python. Raises ConfigError where this Python came without its sources.
    """
    folder, rng, each = stdlib_folder(), Random(seed), num_traffic + num_probes
    prompts = _deal(_some_of_each_module(folder, rng), tasks, each)
    short = {task: len(found) for task, found in prompts.items() if len(found) < each}
    if short:
        raise ConfigError(
            f"expected {each} prompts a task from {folder}, found too few: {short}",
            hint="the demo reads the sources of the Python that runs it; use a full installation",
        )
    return DemoPrompts(
        traffic={task: found[num_probes:] for task, found in prompts.items()},
        probes={task: found[:num_probes] for task, found in prompts.items()},
    )


def _deal(found: Iterable[Function], tasks: Collection[str], each: int) -> dict[str, list[str]]:
    """Give each function to the task with the fewest prompts among those that it makes a prompt of the right size for.

    Ends when every task has enough, because parsing the whole library would take seconds.
    """
    dealt: dict[str, list[str]] = {task: [] for task in tasks}
    for function in found:
        for task in sorted(dealt, key=lambda task: len(dealt[task])):
            prompt = FROM_FUNCTIONS[task](function)
            if len(dealt[task]) < each and MIN_CHARS <= len(prompt) <= MAX_CHARS:
                dealt[task].append(prompt)
                break
        if all(len(prompts) >= each for prompts in dealt.values()):
            break
    return dealt


def _some_of_each_module(folder: Path, rng: Random) -> Iterator[Function]:
    for name, tree, source in modules(folder, rng):
        some = list(functions(name, tree, source))
        yield from rng.sample(some, min(_MAX_PER_MODULE, len(some)))


def _quoted(docstring: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in f'"""{docstring}\n"""'.splitlines())


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
