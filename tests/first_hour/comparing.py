"""Whether a command printed what its page shows.

Lines are compared one by one, and words exactly. Figures stand for any figures, because speeds, times and ports
differ from run to run; runs of spaces for any spaces, because columns are as wide as their figures. `…` stands for any
text in a line, and for any lines where it is alone.
"""

from __future__ import annotations

import re
from typing import Final

_PIECE: Final = re.compile(r"(?P<figure>\.?\d[\d.,]*)|(?P<spaces>[ \t]+)|(?P<any>…)|(?P<rest>[^\d.…\s]+|\.)")
_PATTERNS: Final = {"figure": r"\.?\d[\d.,]*", "spaces": r"[ \t]+", "any": ".*"}


def difference(shown: str, printed: str) -> str | None:
    """What of `shown` was not printed, in words; None if all was, and nothing else."""
    expected, found = _lines(shown), "".join(f"{line}\n" for line in _lines(printed))
    patterns = [_pattern(line) for line in expected]
    if re.fullmatch("".join(patterns), found):
        return None
    fits = max(number for number in range(len(patterns) + 1) if re.match("".join(patterns[:number]), found))
    missed = f"the line {expected[fits]!r}" if fits < len(expected) else "the end"
    return f"{missed} was expected behind {fits} lines that fit; printed:\n{found}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _pattern(line: str) -> str:
    if line == "…":
        return r"(?:.*\n)*?"
    pieces = (_PATTERNS.get(piece.lastgroup or "", re.escape(piece[0])) for piece in _PIECE.finditer(line))
    return "".join(pieces) + r"\n"
