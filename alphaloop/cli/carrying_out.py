"""Run an order in a process `python -m worker.commands`, and show its events.

The command line does not import the worker, because decoding needs torch; it starts a process and shows its events.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any, Final, TypeVar

import typer
from pydantic import TypeAdapter

from alphaloop.cli.children import child_command, child_environment
from alphaloop.cli.options import global_options
from alphaloop.cli.progress_lines import ProgressLines
from alphaloop.cli.screen import err, note, progress
from alphaloop.commands import (
    EVENT,
    LOADING,
    AdvanceEvent,
    FailedEvent,
    MeasureOrder,
    NoteEvent,
    Order,
    ReportEvent,
    StageEvent,
    TrainOrder,
)
from alphaloop.errors import AlphaloopError
from alphaloop.files import STANDARD

INTERRUPTED: Final = 130
Data = TypeVar("Data")


def carry_out(
    context: typer.Context,
    order: Order,
    data: type[Data],
    show: Callable[[Data], None],
    *,
    on_interrupt: str | None = None,
) -> None:
    """Have `order` carried out; `show` is called with the report, whose type is `data`.

    `on_interrupt` is said at once at the first Ctrl-C, where the process then takes a moment to end.

    Raises AlphaloopError for an error that the process reports, and typer.Exit with the process's exit code if that is
    not 0.
    """
    options = global_options(context)
    with subprocess.Popen(
        child_command("worker.commands", []),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(options, options.settings()),
        # A group of its own: Ctrl-C in a terminal reaches a whole group, and the process should get each signal once.
        process_group=0,
    ) as child:
        assert child.stdin is not None  # noqa: S101
        assert child.stdout is not None  # noqa: S101
        try:
            _send(order, child.stdin)
            stopping = _Stopping(child, on_interrupt)
            with _passing_signals_to(stopping):
                failure = _show_events(
                    child.stdout, lambda found: show(TypeAdapter(data).validate_python(found)), stopping.on_stage
                )
                code = child.wait()
                code = INTERRUPTED if stopping.was_ended else code
        except KeyboardInterrupt:
            note("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            child.kill()
    if failure is not None:
        raise AlphaloopError(failure.message, hint=failure.hint)
    if code:
        # A process that a signal ended has minus the signal's number; a shell shows 128 plus the number.
        raise typer.Exit(code if code > 0 else 128 - code)


def _send(order: Order, stdin: IO[bytes]) -> None:
    """Write the order, followed by the prompts if they come from standard input."""
    # If the process has ended, its events say why.
    with contextlib.suppress(BrokenPipeError), stdin:
        stdin.write(order.model_dump_json().encode() + b"\n")
        stdin.flush()
        if isinstance(order, MeasureOrder | TrainOrder) and str(order.prompts) == STANDARD:
            shutil.copyfileobj(sys.stdin.buffer, stdin)


def _show_events(lines: IO[bytes], show: Callable[[Any], None], on_stage: Callable[[str], None]) -> FailedEvent | None:
    """Show events until the process ends; returns the error if it reported one."""
    failure = None
    is_terminal = err().is_terminal
    written = ProgressLines(note)
    in_a_log = contextlib.nullcontext() if is_terminal else written.told_also_while_nothing_happens()
    with progress() as bar, in_a_log:
        task = bar.add_task("starting", total=None, note="")
        for line in lines:
            match event := EVENT.validate_json(line):
                case StageEvent():
                    on_stage(event.name)
                    # The total of a task cannot be set to unknown, so another task replaces it.
                    bar.remove_task(task)
                    task = bar.add_task(event.name, total=event.total, completed=event.done, note="")
                    if not is_terminal:
                        written.stage(event.name, event.done, event.total)
                case AdvanceEvent():
                    bar.update(task, advance=event.num, total=event.total, note=event.note)
                    if not is_terminal:
                        written.advance(event.num, event.total)
                case NoteEvent():
                    note(event.text)
                case ReportEvent():
                    bar.stop()
                    show(event.data)
                case FailedEvent():
                    failure = event
    return failure


class _Stopping:
    """What a signal does to the process: it gets it, and a person reads `said` at the first one.

    A process that loads its models answers late and has nothing to report: it is ended.
    """

    def __init__(self, child: subprocess.Popen[bytes], said: str | None) -> None:
        self._child = child
        self._unsaid = [said] if said else []
        self._is_loading = False
        self.was_ended = False  #: while it loaded

    def on_stage(self, name: str) -> None:
        """The process has begun a stage."""
        self._is_loading = name == LOADING

    def on_signal(self, received: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self._is_loading:
            self.was_ended = True
            self._unsaid = ["interrupted before anything was measured"]
            self._child.kill()
        else:
            self._child.send_signal(received)
        if self._unsaid:  # past the console, in whose middle the signal may have come
            os.write(sys.stderr.fileno(), f"{self._unsaid.pop()}\n".encode())


@contextmanager
def _passing_signals_to(stopping: _Stopping) -> Iterator[None]:
    """While the block runs, SIGINT and SIGTERM are the process's."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stopping.on_signal) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
