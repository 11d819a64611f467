"""What a page tells its reader to type, to save, and to expect: its blocks of code, in order.

Blocks of `sh` are typed, and the blocks of `text` behind them are what they print. A comment above a block says
otherwise:

    <!-- walk: another terminal, until "TEXT" -->   typed in a terminal of its own, where it stays until it prints TEXT
    <!-- walk: exits 1 -->                          the exit code of the last command, 0 if nothing is said
    <!-- walk: needs kcat -->                       left out where that program is not installed
    <!-- walk: first result -->                     what a reader waits for first: the commands so far are counted
    <!-- walk: file NAME -->                        the block is saved under this name
    <!-- walk: no, REASON -->                       for reading only
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
_BLOCK: Final = re.compile(
    r"(?:^<!-- walk: (?P<order>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_ORDERS: Final = {
    "sh": r'another terminal, until "(?P<until>.+)"|exits (?P<code>\d+)|needs (?P<program>\w+)|no, (?P<reason>.+)',
    "text": r"(?P<first>first result)|no, (?P<reason>.+)",
    "json": r"file (?P<name>[\w.]+)",
}


@dataclass(frozen=True, slots=True)
class Typed:
    """Commands, one a line of the page."""

    place: str
    commands: tuple[str, ...]
    code: int = 0
    until: str | None = None  #: printed by a command that stays
    program: str | None = None  #: that has to be installed


@dataclass(frozen=True, slots=True)
class Prints:
    """What the last command of the block before prints."""

    place: str
    text: str
    is_first_result: bool = False


@dataclass(frozen=True, slots=True)
class Saves:
    """A file of the reader."""

    place: str
    name: str
    text: str


Step = Typed | Prints | Saves


def steps(page: str, *, root: Path = ROOT) -> list[Step]:
    """The steps of a page, in its order. Raises ValueError for a comment that is not understood."""
    text = (root / page).read_text(encoding="utf-8")
    found: list[Step] = []
    is_shown = False  # a block for reading only: so is what it prints
    for block in _BLOCK.finditer(text):
        place = f"{page}:{text.count(chr(10), 0, block.start('text'))}"
        language, order = block["language"], block["order"]
        if order is None and language not in ("sh", "text"):
            continue
        said = re.fullmatch(_ORDERS.get(language, "(?!)"), order) if order else None
        if order and said is None:
            raise ValueError(f"{place}: a block of {language or 'no language'} cannot have the comment {order!r}")
        found_in = said.groupdict() if said else {}
        if language == "sh":
            is_shown = bool(found_in.get("reason"))
        if is_shown or found_in.get("reason"):
            continue
        found.append(_step(language, place, block["text"], found_in))
    return found


def commands(text: str) -> tuple[str, ...]:
    """The commands of a block: its lines, without comments; a line that ends with a backslash goes on in the next."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return tuple(bare for line in lines if (bare := re.sub(r"(^|\s+)# .*$", "", line).strip()))


def _step(language: str, place: str, text: str, said: dict[str, str | None]) -> Step:
    if language == "sh":
        return Typed(place, commands(text), int(said.get("code") or 0), said.get("until"), said.get("program"))
    if language == "text":
        return Prints(place, text, is_first_result=bool(said.get("first")))
    return Saves(place, f"{said['name']}", text)
