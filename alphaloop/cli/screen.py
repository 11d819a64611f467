"""Output: data on standard output, everything else on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from rich import progress as bars
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from alphaloop.errors import AlphaloopError, MessageError
from alphaloop.wording import harmless, json_text

Row = TypeVar("Row")
#: Tables must be readable in a pipe and in a narrow window alike.
_PIPE_WIDTH: Final = 80
#: Room for the names of addresses.
_NAMES: Final = 20


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


def show_rows(
    rows: Sequence[Row],
    *columns: str,
    cells: Callable[[Row], Sequence[str]],
    nothing: str,
    as_json: bool,
    row_as_json: Callable[[Row], Any],
    right: Sequence[str] = (),
) -> None:
    """Print all that was found: as JSON, as a table with the cells of each row, or a note that there is nothing."""
    if as_json:
        print_json([row_as_json(row) for row in rows])
    elif not rows:
        note(nothing)
    else:
        shown = table(*columns, right=right)
        for row in rows:
            shown.add_row(*cells(row))
        out().print(shown)


def as_shown(text: str) -> str:
    """A generated text as standard output takes it: for a file or a pipe as it is, for a terminal without its acts."""
    return harmless(text) if sys.stdout.isatty() else text


def paragraph(text: str, *, style: str = "", indent: int = 0) -> None:
    """Print text to standard output, wrapped to the window's width."""
    screen = out()
    for line in Text(text, style=style).wrap(screen, screen.width - indent):
        screen.print(Text(" " * indent).append_text(line), no_wrap=True, overflow="ignore", crop=False)


def show_address(name: str, address: str) -> None:
    """A name and its address on standard output: what is to be copied is not folded, and has a line if need be."""
    fits = _NAMES + cell_len(address) <= out().width
    out().print(f"{name:<{_NAMES}}{address}" if fits else f"{name}\n  {address}", markup=False, soft_wrap=True)


def note(text: str, *, is_prose: bool = False) -> None:
    """A line for the person on standard error; prose, in which nothing is to be copied, in the window's width."""
    err().print(Text(text), soft_wrap=not is_prose)


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
    columns = (
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=16),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[note]}", markup=False),
    )
    console = err()
    is_off = not (is_shown and console.is_terminal)
    return bars.Progress(*columns, console=console, transient=True, disable=is_off)


def table(*columns: str, right: Sequence[str] = (), title: str | None = None) -> Table:
    """An empty table that fits its window. The columns named in `right` hold figures. Strings hold no markup."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def _console(file: Any) -> Console:
    is_terminal = file.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else _PIPE_WIDTH
    return _HarmlessConsole(file=file, width=width, highlight=False, markup=False, emoji=False)


class _HarmlessConsole(Console):
    """Shows every text without what it would do to the terminal, whoever wrote it."""

    def render_str(self, text: str, **given: Any) -> Text:
        return super().render_str(harmless(text), **given)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        return super().render(_harmless(renderable) if isinstance(renderable, Text) else renderable, options)


def _harmless(text: Text) -> Text:
    return text if (shown := harmless(text.plain)) == text.plain else text.blank_copy(shown)
