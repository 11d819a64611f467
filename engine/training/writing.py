"""Texts of a training run: the target writes those that are missing, and its states are recorded meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from alphaloop.settings.models import ModelSettings, TargetSettings
from engine.own import load_engine
from engine.proposal import Drafter
from engine.training.data import Answering, TextRequest, TextStore, TextWriter, WrittenText
from engine.training.recipe import Recipe
from engine.training.recording import RECORDED, RECORDER, StateRecorder


class TrainingProgress(Protocol):
    """Where a run reports how far it is."""

    def stage(self, name: str, total: int, done: int) -> None:
        """A stage of `total` steps begins; an earlier run did `done` of them."""

    def advance(self, num: int, note: str) -> None:
        """`num` more steps are done; `note` says what else there is to say of them."""

    def note(self, text: str) -> None:
        """A line for a person."""


@contextmanager
def stage(progress: TrainingProgress, name: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
    """A stage of `total` steps, `done` of them by an earlier run; call what it yields with how many more."""
    began = time.monotonic()
    count = done
    progress.stage(name, total, done)

    def advance(num: int = 1, note: str = "") -> None:
        nonlocal count
        count += num
        progress.advance(num, note)

    yield advance
    kept = f", {done} of them by an earlier run" if done else ""
    progress.note(f"{name}: {count} of {total}{kept}, {time.monotonic() - began:.0f} s")


def written_texts(
    served: TargetSettings,
    tokenizer: Any,
    requests: Sequence[TextRequest],
    recipe: Recipe,
    recorder: StateRecorder | None,
    *,
    state: Path,
    progress: TrainingProgress,
    should_stop: Callable[[], bool],
) -> list[WrittenText] | None:
    """Every text in the folder `state`, after the target wrote those of `requests` that were missing.

    `recorder` keeps the states of what is written. None when stopped before the end.
    """
    store = TextStore(state / "texts.jsonl")
    known = {text.number for text in store.all()}
    if missing := [request for request in requests if request.number not in known]:
        beside: dict[str, Drafter] = {} if recorder is None else {RECORDER: recorder}
        answering = None if recorder is None else Answering(RECORDED, recorder.keep)
        models = ModelSettings(target=served, drafters={})
        engine = load_engine(models, num_slots=recipe.batch_size, extra_drafters=beside)
        writer = TextWriter(engine, tokenizer, recipe, store, answering)
        with stage(progress, "texts written", len(requests), len(requests) - len(missing)) as advance:
            if not writer.write(missing, should_stop, advance):
                return None
    return store.all()
