"""Prompts of eight tasks from this Python's sources: some for probe sets, others for traffic, none in both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final, TypeAlias, TypeVar

from alphaloop.demo.sources import Function, ModuleDoc, functions, licence_clauses, module_doc, modules, stdlib_folder
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
