"""`alphaloop measure`: whether speculation pays on a user's own prompts. Needs neither a broker nor a database."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

from alphaloop.commands.events import LOADING, Event, Note, Report, Stage, Tell
from alphaloop.commands.orders import MeasureOrder
from alphaloop.job_lines import JobLine
from alphaloop.payoff.figures import VANILLA
from alphaloop.settings import Settings
from worker.commands.stopping import INTERRUPTED, stopped_by_signals
from worker.measuring.busy import busy_note, load_average
from worker.measuring.candidates import choose_candidates, choose_drafters
from worker.measuring.prompts import draw, prepare, read_lines
from worker.measuring.session import Plan, Session, refuse_few


def measure(order: MeasureOrder, settings: Settings, tell: Tell) -> int:
    """Measure and report; 130 when interrupted, after a report of what was measured. Raises AlphaloopError."""
    lines, notes = draw(read_lines(order, settings), order.num, random.Random(order.seed))
    configured = settings.models.drafters
    drafters = {name: configured[name] for name in choose_drafters(configured, order.drafter)}
    settings = settings.model_copy(update={"models": settings.models.model_copy(update={"drafters": drafters})})
    # Checks the candidates before anything is loaded, so that a wrong one is reported at once.
    candidates = choose_candidates([drafter.state(name, "") for name, drafter in drafters.items()], order.k)
    refuse_few(len(lines), order.batch, len(candidates))
    return _measure(order, settings, lines, notes, tell)


def _measure(
    order: MeasureOrder, settings: Settings, lines: Sequence[JobLine], notes: Sequence[str], tell: Tell
) -> int:
    tell(Stage(name=LOADING))
    # Imported here, because torch takes four seconds to load and a wrong option should be reported at once.
    from worker.decoding.load import load_engine
    from worker.measuring.records import MemoryWatch, records_of

    watch = MemoryWatch(settings.models)
    engine = load_engine(settings.models, num_slots=order.batch)
    candidates = choose_candidates(engine.drafters, order.k)
    prepared = prepare(lines, engine, settings.tasks)
    plan = Plan(prepared, candidates, order.batch, order.repeats, order.bar, order.seed)
    parts, records, more_notes = records_of(settings, engine)

    def on_event(event: Event) -> None:
        tell(event)
        watch.sample()

    with stopped_by_signals() as should_stop:
        session = Session(engine, plan, should_stop=should_stop, tell=on_event)
        session.run()
        if session.measured.turns:
            busy = busy_note(session.measured.of(VANILLA), load_average(), os.cpu_count() or 1)
            notes = [*notes, *more_notes, *([busy] if busy else [])]
            report = session.report(records, lambda: watch.footprint(parts), notes)
            tell(Report(data=report))
    if session.failure is not None:
        raise session.failure
    if session.measured.is_interrupted:
        why = "interrupted" if session.measured.turns else "interrupted before a batch was decoded in every way"
        tell(Note(text=why))
        return INTERRUPTED
    return 0
