"""Output: data on standard output, everything else on standard error."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from rich import progress as bars
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
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
#: Between two columns of a table.
_GAP: Final = 2
#: Rows by which widths are chosen: the others fit too, perhaps in more lines.
_ROWS_WEIGHED: Final = 40
_WORD: Final = re.compile(r"(?:\S+ )?\[[^\]\n]*\]|\S+")
#: The same where figures and intervals are apart.
_APART: Final = re.compile(r"\[[^\]\n]*\]|\S+")
#: What a long name may be broken into.
_PART: Final = re.compile(r"[^_\-./:,]*[_\-./:,]+|[^_\-./:,]+")


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
    found: Sequence[Row],
    *columns: str,
    cells: Callable[[Row], Sequence[str]],
    nothing: str,
    as_json: bool,
    row_as_json: Callable[[Row], Any],
    right: Sequence[str] = (),
) -> None:
    """Print all that was found: as JSON, as a table with the cells of each row, or a note that there is nothing."""
    if as_json:
        print_json([row_as_json(one) for one in found])
    elif not found:
        note(nothing)
    else:
        shown = FittedTable(*columns, right=right)
        for one in found:
            shown.add_row(*cells(one))
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
    return bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=16),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[note]}", markup=False),
        console=(console := err()),
        transient=True,
        disable=not (is_shown and console.is_terminal),
    )


class FittedTable:
    """A table that fits its window: cells are broken between words, and long names after `_`, `-`, `.` or `/`.

    A figure and its interval in brackets are one word where they fit. Text is shown as it is: a string holds no markup.
    """

    def __init__(self, *columns: str, right: Sequence[str] = (), title: str | None = None) -> None:
        """The columns named in `right` hold figures."""
        self._title = title
        self._columns = [(name, name in right) for name in columns]
        self._rows: list[tuple[list[Text], str]] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """A row."""
        # What foreign text does to a terminal is written out first, because that takes more room.
        self._rows.append(([_harmless(cell) for cell in cells], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Give every column its width, then render."""
        header = [_harmless(name) for name, _ in self._columns]
        by_column = zip(header, *(cells for cells, _ in self._rows), strict=True)
        texts = [[cell.plain for cell in its] for its in by_column]
        widths = _widths(texts, options.max_width - _GAP * (len(texts) - 1))
        made = Table(title=self._title, title_justify="left", box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for (name, is_right), width in zip(self._columns, widths, strict=True):
            made.add_column(
                _broken(Text(harmless(name), "bold"), width),
                justify="right" if is_right else "left",
                width=width,
                no_wrap=True,
            )
        for cells, style in self._rows:
            made.add_row(*map(_broken, cells, widths), style=style or None)
        yield made


def _widths(texts: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths of columns with these cells, `room` together at most.

    No column is narrower than its longest word while the window has room for that; else names are broken that are
    longer than need be. What is left over goes to the columns that lack most, so that the table has fewest lines.
    """
    wide = _least(texts, re.compile(r".+"), room)
    if sum(wide) <= room:
        return wide
    fitting = [its for unit in (_WORD, _APART) if sum(its := _least(texts, unit, room)) <= room]
    broken = (its for most in range(room, 0, -1) if sum(its := _least(texts, _APART, most)) <= room)
    filled = [_filled(texts, its, wide, room) for its in fitting or [next(broken, [1] * len(texts))]]
    return min(filled, key=lambda widths: _height(texts, widths))


def _height(texts: Sequence[Sequence[str]], widths: Sequence[int]) -> int:
    """Lines of the rows together."""
    lines = ([_num_lines(cell, w) for cell in its[:_ROWS_WEIGHED]] for its, w in zip(texts, widths, strict=True))
    return sum(map(max, zip(*lines, strict=True)))


def _least(texts: Sequence[Sequence[str]], unit: re.Pattern[str], most: int) -> list[int]:
    """Width of each column's longest unit, where units longer than `most` are broken."""
    return [
        max((cell_len(part) for t in its for found in unit.findall(t) for part in _parts(found, most)), default=0)
        for its in texts
    ]


def _filled(texts: Sequence[Sequence[str]], widths: Sequence[int], wide: Sequence[int], room: int) -> list[int]:
    """The widths with what is left of the room: each step widens the column that makes most rows tall."""
    filled, rows = list(widths), [its[:_ROWS_WEIGHED] for its in texts]
    heights = [[_num_lines(cell, width) for cell in its] for its, width in zip(rows, filled, strict=True)]
    while sum(filled) < min(room, sum(wide)):
        tallest = [max(its) for its in zip(*heights, strict=True)]
        blame = [
            (has < wants, sum(h for h, most in zip(its, tallest, strict=True) if h == most > 1), wants - has)
            for has, wants, its in zip(filled, wide, heights, strict=True)
        ]
        chosen = max(range(len(filled)), key=blame.__getitem__)
        filled[chosen] += 1
        heights[chosen] = [_num_lines(cell, filled[chosen]) for cell in rows[chosen]]
    return filled


def _num_lines(text: str, width: int) -> int:
    """Lines that a cell takes in a column of this width."""
    return sum(len(_lines(line, width)) for line in text.split("\n"))


def _lines(line: str, width: int) -> list[tuple[int, int]]:
    """Where the lines begin and end into which a line is broken."""
    if cell_len(line) <= width:
        return [(0, len(line))]
    found: list[tuple[int, int]] = []
    begin = end = -1  # of the line that is being filled; nothing is in it yet
    for word in _WORD.finditer(line):
        at = word.start()
        for part in _parts(word.group(), width):
            if begin >= 0 and cell_len(line[begin : at + len(part)].rstrip()) > width:
                found.append((begin, end))
                begin = -1
            begin = at if begin < 0 else begin
            at += len(part)
            end = at
    return [*found, (begin, end)] if begin >= 0 else [(0, 0)]


def _parts(word: str, most: int) -> list[str]:
    """The parts of a word between which a line may end: the word itself where it fits."""
    if cell_len(word) <= most:
        return [word]
    return [piece for part in _atoms(word) for piece in ([part] if cell_len(part) <= most else chop_cells(part, most))]


def _atoms(word: str) -> list[str]:
    """What a word may be broken into: a figure and its interval, or a name behind its marks."""
    if not word.endswith("]"):
        return _PART.findall(word)
    figure, _, interval = word.partition(" [")
    return [f"{figure} ", f"[{interval}"] if interval and not word.startswith("[") else [word]


def _broken(text: Text, width: int) -> Text:
    """The text in lines of this width."""
    lines = []
    for line in text.split("\n", allow_blank=True):
        for begin, end in _lines(line.plain, width):
            lines.append(line[begin:end])
            lines[-1].rstrip()
    return Text("\n").join(lines)


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


def _harmless(cell: str | Text) -> Text:
    """A string as a Text, without markup; of a Text only what acts upon a terminal is written out."""
    if isinstance(cell, str):
        return Text(harmless(cell))
    return cell if (shown := harmless(cell.plain)) == cell.plain else cell.blank_copy(shown)
