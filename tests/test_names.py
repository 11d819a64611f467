"""What product strings, docstrings, comments and pages name exists: commands, settings, metrics, files, identifiers."""

from __future__ import annotations

import ast
import io
import re
import shlex
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from pydantic import BaseModel

from alphaloop.cli.app import commands
from alphaloop.settings import Settings
from alphaloop.settings.load import ENV_PREFIX, sections_of
from tests.first_hour.pages import commands as typed_in

ROOT: Final = Path(__file__).resolve().parents[1]
_PACKAGES: Final = ("alphaloop", "engine", "worker", "scheduler")
_QUOTED: Final = re.compile(r"`([^`\n]+)`")
_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SNAKE: Final = re.compile(r"[a-z]+(?:_[a-z0-9]+)+")
_SETTING: Final = re.compile(
    rf"(?<![\w./:-])(?:{'|'.join(Settings.model_fields)})(?:\.(?:[a-z_]+|NAME|<[a-z]+>|\*))+(?!\w)"
)
_FILE: Final = re.compile(r"(?<![\w/.…{*:-])((?:[\w-]+/)*[\w-]+\.(?:py|md))\b")
#: Of other programs: OpenAI's fields, the Python of vLLM, the process collector of Prometheus.
_FOREIGN: Final = {
    "accepted_prediction_tokens",
    "draft_len_schedule",
    "process_resident_memory_bytes",
    "raw_logprobs",
    "rejected_prediction_tokens",
    "rejection_sample",
    "user_data",
    "gpu_model_runner.py",
    "sampling_params.py",
    "tokenizer_manager.py",
}
_FOLDERS_OF_VLLM: Final = ("vllm/", "v1/")
#: Files that may name a command, beside those without a suffix: the Makefile, the Dockerfile.
_TEXTS: Final = (".md", ".py", ".sh", ".toml", ".yaml", ".yml")
#: A letter with an index, in a formula.
_FORMULA: Final = re.compile(r"(?:accepts|proposed|reach|trials|[a-z]|tokens)_(?:[a-z]|ij)")


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(name for name in listed.splitlines() if (ROOT / name).is_file())


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def prose() -> dict[str, list[str]]:
    """By file: the strings and comments of the product, and the pages without their blocks of output and code."""
    said: dict[str, list[str]] = {}
    for name in tracked():
        if name.endswith(".md") and name != "CHANGELOG.md":
            said[name] = [re.sub(r"^```.*?^```", "", read(name), flags=re.MULTILINE | re.DOTALL)]
        elif name.endswith(".py") and name.split("/")[0] in _PACKAGES:
            comments = tokenize.generate_tokens(io.StringIO(read(name)).readline)
            said[name] = [*_strings(ast.parse(read(name)))]
            said[name] += [token.string for token in comments if token.type == tokenize.COMMENT]
    return said


def _strings(tree: ast.AST) -> Iterator[str]:
    in_f_strings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            in_f_strings |= set(map(id, node.values))
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_f_strings:
            yield node.value


def quoted() -> Iterator[tuple[str, str]]:
    for name, texts in prose().items():
        for text in texts:
            for match in _QUOTED.finditer(text):
                yield name, match[1]


@cache
def identifiers() -> frozenset[str]:
    """Every name of the code, of its strings that are no docstrings, and of configuration, SQL, schemas and paths."""
    known: set[str] = set()
    for name in tracked():
        known |= {*_WORD.findall(name)}
        if name == Path(__file__).relative_to(ROOT).as_posix():
            continue
        if name.endswith(".py"):
            known |= _names(ast.parse(read(name)))
        elif name.endswith((".toml", ".yaml", ".yml", ".json", ".sql", ".j2", ".js", ".ini", ".html")):
            known |= {*_WORD.findall(read(name))}
    return frozenset(known | {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).lower() for word in known})


def _names(tree: ast.AST) -> set[str]:
    known, docstrings = set[str](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            docstrings |= {id(first.value)} if isinstance(first, ast.Expr) else set()
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(word := getattr(node, field, None), str):
                known |= {*_WORD.findall(word)}
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            known |= {*_WORD.findall(_QUOTED.sub("", node.value))}
    return known


def calls(line: str) -> list[list[str]]:
    """The arguments of each call of `alphaloop` in a line of a shell."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    typed: list[list[str]] = []
    arguments: list[str] | None = None  # of the program that is called; None before its name
    for word in words:
        if set(word) <= set("();<>|&$"):
            arguments = None
        elif arguments is not None:
            arguments.append(word)
        elif "=" not in word:
            arguments = []
            typed += [arguments] if Path(word).name == "alphaloop" else []
    return typed


@cache
def options_of() -> dict[str, frozenset[str]]:
    """The options of every command and group, by its full name."""
    known = {name: context.command.params for name, context in commands()}
    return {name: frozenset(option for p in known[name] for option in (*p.opts, *p.secondary_opts)) for name in known}


def wrong_command(line: str) -> str | None:
    """What of a typed line does not exist."""
    known = options_of()
    for words in calls(line):
        command, arguments = "alphaloop", iter(words)
        for word in arguments:
            if word.startswith("-"):
                if (option := word.partition("=")[0]) not in {*known[command], "-", "--help"}:
                    return f"{command} has no {option}"
                if command == "alphaloop":
                    next(arguments, None)  # its value
            elif f"{command} {word}" in known:
                command = f"{command} {word}"
            elif any(name.startswith(f"{command} ") for name in known):
                return f"{command} has no command {word}"
    return None


def test_every_command_exists() -> None:
    typed = [(name, text) for name, text in quoted() if re.match(r"alphaloop( |$)", text)]
    assert len(typed) > 200
    for name in (name for name in tracked() if name.endswith(".md")):
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", read(name), re.MULTILINE | re.DOTALL)
        shown = (line for language, block in blocks if language in ("sh", "bash") for line in typed_in(block))
        typed += [(name, line) for line in shown if re.search(r"(^|[/|] ?|bin/)alphaloop ", line)]
    wrong = [(name, text, why) for name, text in typed if (why := wrong_command(text))]
    assert not wrong, wrong


@pytest.mark.parametrize(
    "typed", ["alphaloop probes add", "alphaloop stat", "alphaloop status --hour 3", "alphaloop --data status"]
)
def test_a_command_that_does_not_exist_is_found(typed: str) -> None:
    assert wrong_command(typed)


def is_setting(path: str) -> bool:
    """Whether settings have this section or setting; `NAME`, `<name>` or any word stands for a chosen name."""
    sections: list[type[BaseModel]] = [Settings]
    is_chosen = False
    for part in path.split("."):
        if is_chosen:
            is_chosen = False
            continue
        fields = [section.model_fields[part] for section in sections if part in section.model_fields]
        if part == "*" and sections:
            return True
        if not fields:
            return False
        sections = [section for field in fields for section in sections_of(field.annotation)]
        is_chosen = any(str(field.annotation).startswith("dict[") for field in fields)
    return True


def is_module(path: str) -> bool:
    where = path.replace(".", "/")
    is_own = any(name.startswith(f"{where}/") or name == f"{where}.py" for name in tracked())
    return is_own or any(name.endswith((f"/{path}", f"/{path}.j2")) for name in tracked())


def test_every_setting_exists() -> None:
    named = [(name, match[0]) for name, texts in prose().items() for text in texts for match in _SETTING.finditer(text)]
    sections = [(name, match[1]) for name, text in quoted() if (match := re.fullmatch(r"\[([a-z_.]+)\S*\]", text))]
    assert len(named) > 100
    others = ("report.html", "kafka.log", "postgres.log", "kafka.ssl_", "kafka.oauth_", "kafka.tools", "tasks.toml")
    wrong = [(name, path) for name, path in named if not (is_setting(path) or is_module(path) or path in others)]
    wrong += [(name, path) for name, path in sections if not is_setting(path.rstrip("."))]
    assert not wrong


def test_every_variable_exists() -> None:
    wrong = []
    for name, texts in prose().items():
        for path in re.findall(rf"\b{ENV_PREFIX}([A-Z]+__[A-Z_]+[A-Z])\b", " ".join(texts)):
            if not is_setting(path.lower().replace("__", ".")):
                wrong.append((name, path))
    assert not wrong


def test_every_file_exists() -> None:
    ends = {"/".join(name.split("/")[begin:]) for name in tracked() for begin in range(name.count("/") + 1)}
    named = [(name, path) for name, texts in prose().items() for text in texts for path in _FILE.findall(text)]
    assert len(named) > 100
    others = {*_FOREIGN, "NAME.py"}
    unknown = [(name, path) for name, path in named if not (path in ends or path.split("/")[-1] in others)]
    assert not [(name, path) for name, path in unknown if not path.startswith(_FOLDERS_OF_VLLM)]


def is_runnable(module: str) -> bool:
    """Whether `python -m` finds it in this checkout."""
    path = module.replace(".", "/")
    return not {f"{path}.py", f"{path}/__main__.py"}.isdisjoint(tracked())


def test_every_module_that_is_run_exists() -> None:
    """Blocks of code, the Makefile and workflows included. A command "at" a commit ran in that checkout."""
    run = re.compile(r"\bpython3? -m ([\w.]*\w)(?![^`\n]*` at [0-9a-f]{8})")
    folders = {name.partition("/")[0] for name in tracked() if "/" in name}
    texts = [name for name in tracked() if Path(name).suffix in {"", *_TEXTS}]
    named = [(name, module) for name in texts for module in run.findall(read(name))]
    ours = [(name, module) for name, module in named if module.partition(".")[0] in folders]
    assert len(ours) > 80
    assert not [(name, module) for name, module in ours if not is_runnable(module)]
    assert not is_runnable("benchmarks.contestants")


def is_identifier(word: str) -> bool:
    if word in identifiers() or word in _FOREIGN or _FORMULA.fullmatch(word):
        return True
    # Some names of metrics and of actions of the log are put together, from a prefix and a name.
    rest = re.sub(r"^(alphaloop_(scheduler_|endpoint_)?(expectation_)?|request_)", "", word)
    return rest != word and bool({rest, rest.removesuffix("_total")} & identifiers())


def test_every_metric_table_column_and_field_exists() -> None:
    named = [(name, text) for name, text in quoted() if _SNAKE.fullmatch(text)]
    assert len(named) > 1000
    assert not [(name, word) for name, word in named if not is_identifier(word)]
    assert not is_identifier("alphaloop_jobs_lost_total")
