"""docs/reference/cli.md from the commands' help: `python -m alphaloop.cli.reference` writes it, `--check` compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from alphaloop.cli.app import app

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md"
_WIDTH: Final = 96
_HEAD: Final = """\
# The command line

Every command as its `--help` shows it. This page is written by `python -m alphaloop.cli.reference`.

Options of the first section stand before the command: `alphaloop --data-dir ./data status`. Data goes to standard
output; progress, notes and errors go to standard error. Exit codes: 0 done; 1 an error, or a job without a text; 2
wrong usage; 130 interrupted. Where neither the environment nor `configs/` names a broker or a database, a command uses
those of the `alphaloop up` that runs with the same data folder.
"""


def commands() -> Iterator[tuple[str, typer.Context]]:
    """Every command with its full name, the groups among them, in the order of the help."""
    yield from _below("alphaloop", None, typer.main.get_command(app))


def reference() -> str:
    """The page."""
    sections = [_HEAD]
    for name, context in commands():
        told = "\n".join(line.rstrip() for line in context.get_help().splitlines())
        sections.append(f"## {name}\n\n```text\n{told}\n```\n")
    return "\n".join(sections)


def _below(name: str, parent: typer.Context | None, command: object) -> Iterator[tuple[str, typer.Context]]:
    assert isinstance(command, TyperCommand | TyperGroup)  # noqa: S101
    context = typer.Context(
        command, parent=parent, info_name=name.split()[-1], terminal_width=_WIDTH, **command.context_settings
    )
    yield name, context
    if isinstance(command, TyperGroup):
        for child in command.list_commands(context):
            yield from _below(f"{name} {child}", context, command.get_command(context, child))


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == reference() else f"{PAGE} is not what the commands say")
    PAGE.write_text(reference(), encoding="utf-8")
