"""The walk: pages in the order in which they are read, each step carried out."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.first_hour.comparing import difference
from tests.first_hour.pages import ROOT, Prints, Saves, Typed, steps
from tests.first_hour.terminal import Ended, NothingCame, Terminal

#: The first page comes first; each later one may use what the ones before have made.
PAGES: Final = (
    "README.md",
    "docs/guides/enqueue.md",
    "docs/guides/streams.md",
    "docs/guides/batches.md",
    "docs/guides/explain.md",
    "docs/guides/ask-the-database.md",
    "docs/guides/probes.md",
    "docs/guides/measure.md",
)
COMMAND_S: Final = 300.0
#: What the README states of the way to a first result.
_STATED: Final = re.compile(r"(\w+) commands from nothing to a first result")
_WORDS: Final = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5}


class Promised(AssertionError):
    """A page promises what did not happen."""


@dataclass(frozen=True, slots=True)
class FirstResult:
    """What it took to see a first result."""

    num_commands: int
    seconds: float  #: from the first command to the result, without the time to read and to type

    def __str__(self) -> str:
        return f"{self.num_commands} commands, {self.seconds:.0f} s"


class Walk:
    """A context manager: two terminals in a checkout. `tell` gets a line for each command."""

    def __init__(
        self,
        checkout: Path,
        environment: Mapping[str, str],
        *,
        tell: Callable[[str], object] = lambda line: None,
        make: str = "make",
    ) -> None:
        """`make` is typed where a page says `make`: a folder with the installed program only has no Makefile."""
        self._checkout = checkout
        self._make = make
        self._tell = tell
        self._own = Terminal(checkout, environment)
        self._other = Terminal(checkout, environment)
        self._num_commands = 0
        self._began = time.monotonic()
        self._last: tuple[str, Ended] | None = None
        self.first_result: FirstResult | None = None
        self.skipped: list[str] = []

    def __enter__(self) -> Walk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for terminal in (self._own, self._other):
            terminal.__exit__(kind, error, trace)

    def read(self, page: str) -> None:
        """Do what a page says. Raises Promised at the first step that does not do what the page promises."""
        for step in steps(page):
            try:
                match step:
                    case Typed():
                        self._type(step)
                    case Prints():
                        self._compare(step)
                    case Saves():
                        (self._checkout / step.name).write_text(step.text, encoding="utf-8")
            except NothingCame as missing:
                raise Promised(f"{step.place}: {missing}") from missing

    def type(self, command: str) -> Ended:
        """A command of the reader's own, which no page shows. Raises NothingCame."""
        return self._own.run(command, timeout_s=COMMAND_S)

    def expect(self, command: str) -> Ended:
        """As `type`. Raises Promised where it fails."""
        ended = self.type(command)
        self._tell(f"{command}  # {ended.seconds:.1f} s")
        if ended.code:
            raise Promised(f"{command}: expected exit code 0, found {ended.code}:\n{ended.text}")
        return ended

    def check_first_result(self) -> None:
        """Raises Promised where a walk that has read the README took another number of commands than it states."""
        found = _STATED.search((ROOT / "README.md").read_text(encoding="utf-8"))
        if found is None or self.first_result is None:
            raise Promised(f"README.md: expected a first result, and {_STATED.pattern!r}")
        if (stated := _WORDS[found[1].lower()]) != self.first_result.num_commands:
            raise Promised(f"README.md: states {stated} commands to a first result, found {self.first_result}")

    def take_down(self) -> None:
        """`make down`; the command in the other terminal ends, too. Raises Promised."""
        for ended, said in ((self.type(f"{self._make} down"), "stopped"), (self.end_other(), "stopping the servers")):
            if ended.code or said not in ended.text:
                raise Promised(
                    f"{self._make} down: expected {said!r} and exit code 0, found {ended.code}:\n{ended.text}"
                )

    def stay(self, command: str, until: str) -> None:
        """Type a command that stays into the other terminal, and wait until it prints this. Raises NothingCame."""
        self._other.type(command)
        self._other.until(until, timeout_s=COMMAND_S)

    def end_other(self) -> Ended:
        """Wait for the end of the command in the other terminal. Raises NothingCame."""
        return self._other.end(timeout_s=COMMAND_S)

    def _type(self, step: Typed) -> None:
        self._last = None
        if step.program is not None and shutil.which(step.program) is None:
            self.skipped.append(f"{step.place}: {step.program} is not installed")
            return
        for number, shown in enumerate(step.commands, start=1):
            command = re.sub(r"^make\b", self._make, shown)
            self._num_commands += 1
            if step.until is not None:
                began = time.monotonic()
                self.stay(command, step.until)
                self._tell(f"{step.place}: {command}  # up after {time.monotonic() - began:.1f} s")
                continue
            ended = self.type(command)
            self._tell(f"{step.place}: {command}  # {ended.seconds:.1f} s")
            self._last = (command, ended)
            code = step.code if number == len(step.commands) else 0
            if ended.code != code:
                raise Promised(f"{step.place}: {command}: expected exit code {code}, found {ended.code}:\n{ended.text}")

    def _compare(self, step: Prints) -> None:
        if self._last is None:
            if not self.skipped:
                raise Promised(f"{step.place}: no command that ends stands before what is printed")
            return
        command, ended = self._last
        if missing := difference(step.text, ended.text):
            raise Promised(f"{step.place}: {command}: {missing}")
        if step.is_first_result:
            self.first_result = FirstResult(self._num_commands, time.monotonic() - self._began)
