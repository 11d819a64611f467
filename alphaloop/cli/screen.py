"""Output: data on standard output, everything else on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich import progress as bars
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from alphaloop.errors import AlphaloopError, MessageError
from alphaloop.wording import harmless, json_text

#: Tables must be readable in a pipe and in a narrow window alike.
PIPE_WIDTH: Final = 100


def out() -> Console:
    """Standard output: the data that was asked for."""
    return _console(sys.stdout)


def err() -> Console:
    """Standard error: progress, notes and errors."""
    return _console(sys.stderr)


def print_json(value: Any) -> None:
    """Print one JSON document to standard output; times and paths become text."""
    sys.stdout.write(json_text(value, indent=2) + "\n")


def print_json_line(value: Any) -> None:
    """Print one line of JSON to standard output at once."""
    sys.stdout.write(json_text(value) + "\n")
    sys.stdout.flush()


def as_shown(text: str) -> str:
    """A generated text as standard output takes it: for a file or a pipe as it is, for a terminal without its acts."""
    return harmless(text) if sys.stdout.isatty() else text


def paragraph(text: str, *, style: str = "", indent: int = 0) -> None:
    """Print text to standard output, wrapped to the window's width."""
    screen = out()
    for line in Text(text, style=style).wrap(screen, screen.width - indent):
        screen.print(Text(" " * indent).append_text(line), no_wrap=True, overflow="ignore", crop=False)


def note(text: str) -> None:
    """A line for the person on standard error."""
    err().print(Text(text), soft_wrap=True)


def show_error(error: AlphaloopError) -> None:
    """`error: …` and `hint: …` on standard error, without a traceback."""
    field = getattr(error, "field", None) if isinstance(error, MessageError) else None
    console = err()
    console.print(
        Text.assemble(("error: ", "bold red"), f"{field}: {error.message}" if field else error.message), soft_wrap=True
    )
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold cyan"), error.hint), soft_wrap=True)


def progress(*, is_shown: bool = True) -> bars.Progress:
    """A progress bar on standard error; silent where that is not a terminal, or where it is not to be shown."""
    return bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=30),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[note]}", markup=False),
        console=(console := err()),
        transient=True,
        disable=not (is_shown and console.is_terminal),
    )


def table(*columns: str, right: Sequence[str] = (), title: str | None = None) -> Table:
    """A plain table; the columns named in `right` hold figures."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        # In a narrow window the name of a row stays whole and the other columns shrink.
        is_name = column == columns[0]
        made.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=is_name)
    return made


def _console(file: Any) -> Console:
    is_terminal = file.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else PIPE_WIDTH
    return _HarmlessConsole(file=file, width=width, highlight=False, markup=False, emoji=False)


class _HarmlessConsole(Console):
    """Shows every text without what it would do to the terminal, whoever wrote it."""

    def render_str(self, text: str, **given: Any) -> Text:
        return super().render_str(harmless(text), **given)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and (shown := harmless(renderable.plain)) != renderable.plain:
            plain = renderable.blank_copy(shown)
            return super().render(plain, options)
        return super().render(renderable, options)
