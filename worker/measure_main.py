"""`python -m worker.measure_main`: whether speculation pays on somebody's own prompts.

`alphaloop measure` becomes this process. Data goes to standard output, the bar and notes to standard error. Neither a
broker nor a database is needed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from alphaloop import logs
from alphaloop.cli import screen
from alphaloop.errors import AlphaloopError
from alphaloop.settings import Settings, load_settings
from worker.measuring.as_json import as_json
from worker.measuring.candidates import Candidate, choose_candidates, choose_drafters
from worker.measuring.prompts import Line, draw, prepare, read_lines
from worker.measuring.session import Plan, Session, refuse_few
from worker.measuring.showing import show

INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 when done, whatever the verdict, 1 after an error in words, 130 when interrupted."""
    options = _options(argv)
    logs.configure("ERROR")
    try:
        settings = load_settings(options.configs, profile=options.profile)
        lines, notes = _lines(options, settings)
        settings = _with_drafters(settings, options.drafter)
        refuse_few(len(lines), options.batch, len(_candidates(settings, options.k)))
        return _measure(options, settings, lines, notes)
    except AlphaloopError as error:
        screen.show_error(error)
        return 1
    except KeyboardInterrupt:
        screen.note("interrupted before anything was measured")
        return INTERRUPTED


def _lines(options: argparse.Namespace, settings: Settings) -> tuple[list[Line], list[str]]:
    lines = read_lines(
        options.prompts, settings, task=options.task, max_tokens=options.max_tokens, temperature=options.temperature
    )
    return draw(lines, options.num, random.Random(options.seed))


def _with_drafters(settings: Settings, wanted: Sequence[str]) -> Settings:
    drafters = settings.models.drafters
    chosen = {name: drafters[name] for name in choose_drafters(drafters, wanted)}
    return settings.model_copy(update={"models": settings.models.model_copy(update={"drafters": chosen})})


def _candidates(settings: Settings, lengths: Sequence[int]) -> list[Candidate]:
    """As they will be, before anything is loaded: what cannot be measured is told at once."""
    drafters = settings.models.drafters
    return choose_candidates([drafter.state(name, "") for name, drafter in drafters.items()], lengths)


def _measure(options: argparse.Namespace, settings: Settings, lines: Sequence[Line], notes: Sequence[str]) -> int:
    with _progress() as bar:
        task = bar.add_task("loading the models", total=None)
        # Loaded here, so that a wrong option is told before four seconds of torch.
        from worker.decoding.load import load_engine
        from worker.measuring.records import MemoryWatch, records_of

        watch = MemoryWatch(settings.models)
        engine = load_engine(settings.models, num_slots=options.batch)
        candidates = choose_candidates(engine.drafters, options.k)
        plan = Plan(
            prepare(lines, engine, settings.tasks),
            candidates,
            options.batch,
            options.repeats,
            options.bar,
            options.seed,
        )
        parts, records, more_notes = records_of(settings, engine)
        notes = [*notes, *more_notes]

        def on_stage(name: str, total: int) -> None:
            # A task cannot be told that its total is not known: another one takes its place.
            nonlocal task
            bar.remove_task(task)
            task = bar.add_task(name, total=total or None)

        def on_decoded(num: int) -> None:
            bar.advance(task, num)
            watch.look()

        with _stopped_by_signals() as should_stop:
            session = Session(engine, plan, should_stop=should_stop, on_stage=on_stage, on_decoded=on_decoded)
            session.run()
            report = session.report(records, lambda: watch.footprint(parts), notes) if session.measured.turns else None
    if report is not None and options.json:
        screen.print_json(as_json(report))
    elif report is not None:
        show(report)
    if session.failure is not None:
        raise session.failure
    if session.measured.is_interrupted:
        screen.note("interrupted" if report else "interrupted before a batch was decoded in every way")
        return INTERRUPTED
    return 0


def _progress() -> Progress:
    console = screen.err()
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def _stopped_by_signals() -> Iterator[Callable[[], bool]]:
    """Whether to stop: the first SIGINT or SIGTERM ends the measuring and has it reported, the second ends at once."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker.measure_main", description=__doc__)
    configs = os.environ.get("ALPHALOOP_CONFIGS")
    parser.add_argument("--configs", type=Path, default=configs and Path(configs), help="folder of TOML files")
    parser.add_argument(
        "--profile", default=os.environ.get("ALPHALOOP_PROFILE"), help="one more file of it, laid over the others"
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL, - for standard input")
    parser.add_argument("--task", help="whose settings the prompts get")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--num", type=int, default=100, help="at most so many prompts")
    parser.add_argument("--drafter", action="append", default=[], help="only this one; may be given again")
    parser.add_argument("--k", type=int, action="append", default=[], help="draft length; may be given again")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--bar", type=float, default=1.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
