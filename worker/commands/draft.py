"""`alphaloop draft train` and `alphaloop draft register`."""

from __future__ import annotations
from alphaloop.commands import NoteEvent
from alphaloop.commands import RegisterOrder
from alphaloop.commands import ReportEvent
from alphaloop.commands import Tell
from alphaloop.commands import TrainOrder
from alphaloop.errors import ConfigError
from alphaloop.errors import StoreError
from alphaloop.files import readable_again
from alphaloop.settings import Settings
from contextlib import ExitStack
from pathlib import Path
from worker.commands.stopping import INTERRUPTED
from worker.commands.stopping import stopped_by_signals
from worker.decoding.training.recipe import read_recipe
from worker.decoding.training.run import TrainingRun
from worker.decoding.training.run import register_folder


def train(order: TrainOrder, settings: Settings, tell: Tell) -> int:
    """Train a draft, or go on with one, and register it; 130 when interrupted. Raises AlphaloopError."""
    recipe = read_recipe(order.recipe, seed=order.seed)
    with ExitStack() as stack:
        if order.prompts is not None:  # they are read more than once
            order = order.model_copy(update={"prompts": stack.enter_context(readable_again(order.prompts))})
        should_stop = stack.enter_context(stopped_by_signals())
        run = TrainingRun(order, settings, recipe, tell, should_stop)
        try:
            card = run.make()
        finally:
            run.close()
    if card is None:
        tell(NoteEvent(text=f"stopped; what was done is in {order.folder}, and the same command continues from there"))
        return INTERRUPTED
    tell(ReportEvent(data=card))
    _register_if_possible(order.folder, settings, tell)
    return 0


def register(order: RegisterOrder, settings: Settings, tell: Tell) -> int:
    """Register a draft that was trained before; the report is a sentence. Raises AlphaloopError."""
    card, status = register_folder(order.folder, settings, order.name)
    registration = f"{order.name or card.name} {card.draft_revision} for target {card.target_revision}: {status}"
    tell(ReportEvent(data=registration))
    return 0


def _register_if_possible(folder: Path, settings: Settings, tell: Tell) -> None:
    try:
        card, status = register_folder(folder, settings)
    except (StoreError, ConfigError) as error:
        registration = f"not registered: {error.message}. Later: alphaloop draft register {folder}"
    else:
        registration = f"registered as {card.name} {card.draft_revision}, {status}"
    tell(NoteEvent(text=registration))
