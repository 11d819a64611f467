"""What the README states of the way to a first result."""

from __future__ import annotations

import re
from typing import Final

from tests.first_hour.pages import ROOT
from tests.first_hour.walk import Promised, Walk

_STATED: Final = re.compile(r"(\w+) commands from nothing to a first result")
_WORDS: Final = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}


def check_first_result(walk: Walk) -> None:
    """Raises Promised where a walk that has read the README took another number of commands than it states."""
    found = _STATED.search((ROOT / "README.md").read_text(encoding="utf-8"))
    if found is None or walk.first_result is None:
        raise Promised(f"README.md: expected a first result, and {_STATED.pattern!r}")
    if (stated := _WORDS[found[1].lower()]) != walk.first_result.num_commands:
        raise Promised(f"README.md: states {stated} commands to a first result, found {walk.first_result}")
