"""`alphaloop measure`: whether speculation pays on a user's own prompts. Needs neither a broker nor a database."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass

from alphaloop.commands import LOADING, CommandEvent, MeasureOrder, NoteEvent, ReportEvent, StageEvent, Tell
from alphaloop.errors import ConfigError
from alphaloop.job_lines import JobLine
from alphaloop.payoff.figures import VANILLA
from alphaloop.payoff.report import Footprint
from alphaloop.settings import ModelSettings, Settings
from worker.commands.stopping import INTERRUPTED, stopped_by_signals
from worker.engine import Engine
from worker.engine_opening import open_engine
from worker.measuring.busy import busy_note, load_average
from worker.measuring.candidates import choose_candidates, choose_drafters
from worker.measuring.process_memory import peak_process_bytes
from worker.measuring.prompts import draw, prepare, read_lines
from worker.measuring.report import Records
from worker.measuring.session import Plan, Session, refuse_few


def measure(order: MeasureOrder, settings: Settings, tell: Tell) -> int:
    """Measure and report; 130 when interrupted, after a report of what was measured. Raises AlphaloopError."""
    lines, notes = draw(
        read_lines(order, settings, lambda text: tell(NoteEvent(text=text))), order.num, random.Random(order.seed)
    )
    chosen = choose_drafters(settings.models.drafter_names, order.drafter)
    # Checks the candidates before anything is loaded, so that a wrong one is reported at once.
    candidates = choose_candidates([settings.models.drafter_state(name, "") for name in chosen], order.k)
    refuse_few(len(lines), order.batch, len(candidates))
    return _measure(order, settings, chosen, lines, notes, tell)


@dataclass(frozen=True, slots=True)
class _Measured:
    """The engine to measure, and what is known beside the measurement."""

    engine: Engine
    records: Records
    notes: Sequence[str]
    sample_memory: Callable[[], None]
    footprint: Callable[[], Footprint]


def _of_servers(models: ModelSettings, batch: int) -> _Measured:
    engine = open_engine(models, num_slots=batch)
    if (room := engine.load().num_slots) < batch:
        raise ConfigError(f"--batch: expected at most {room}, which the endpoints take at once, found {batch}")
    return _Measured(
        engine,
        Records(),
        ["the texts are decoded by servers: memory is this process's alone, and rounds are not timed apart"],
        lambda: None,
        lambda: Footprint((), peak_process_bytes(), None),
    )


def _of_this_process(settings: Settings, drafters: Collection[str], batch: int) -> _Measured:
    # Imported here, because torch takes four seconds to load and a wrong option should be reported at once.
    from worker.measuring.records import MemoryWatch, records_of

    only = {name: one for name, one in settings.models.drafters.items() if name in drafters}
    settings = settings.model_copy(update={"models": settings.models.model_copy(update={"drafters": only})})
    watch = MemoryWatch(settings.models)
    engine = open_engine(settings.models, num_slots=batch)
    parts, records, notes = records_of(settings, engine)
    return _Measured(engine, records, notes, watch.sample, lambda: watch.footprint(parts))


def _measure(
    order: MeasureOrder,
    settings: Settings,
    drafters: Collection[str],
    lines: Sequence[JobLine],
    notes: Sequence[str],
    tell: Tell,
) -> int:
    tell(StageEvent(name=LOADING))
    is_own = settings.models.target.engine == "own"
    found = _of_this_process(settings, drafters, order.batch) if is_own else _of_servers(settings.models, order.batch)
    engine = found.engine
    candidates = choose_candidates([one for one in engine.drafters if one.name in drafters], order.k)
    prepared = prepare(lines, engine, settings.tasks)
    plan = Plan(prepared, candidates, order.batch, order.repeats, order.bar, order.seed)

    def on_event(event: CommandEvent) -> None:
        tell(event)
        found.sample_memory()

    with closing(engine), stopped_by_signals() as should_stop:
        session = Session(engine, plan, should_stop=should_stop, tell=on_event)
        session.run()
        if session.measured.turns:
            busy = busy_note(session.measured.of(VANILLA), load_average(), os.cpu_count() or 1)
            notes = [*notes, *found.notes, *([busy] if busy else [])]
            report = session.report(found.records, found.footprint, notes)
            tell(ReportEvent(data=report))
    if session.failure is not None:
        raise session.failure
    if session.measured.is_interrupted:
        why = "interrupted" if session.measured.turns else "interrupted before a batch was decoded in every way"
        tell(NoteEvent(text=why))
        return INTERRUPTED
    return 0
