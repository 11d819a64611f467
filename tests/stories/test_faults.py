"""What a fault does to an engine: a drafter that wears, also one that was loaded later."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest

from alphaloop.engine import Sampling
from alphaloop.settings.models import HybridDrafterSettings, LookupDrafterSettings, ModelSettings, TargetSettings
from benchmarks.exactness import decode
from benchmarks.jobs import PromptJob, forced
from engine.own import TransformersEngine, load_engine
from tests.stories.faults import WORN_ACTION, WORN_AT, Faults, Worn, inject

LOOKUP: Final = LookupDrafterSettings(max_draft_tokens=4)
SAMPLING: Final = Sampling(max_tokens=160, temperature=0.0)


@pytest.fixture
def engine(tiny_models: dict[str, Path]) -> Iterator[TransformersEngine]:
    target = TargetSettings(name="tiny", source=str(tiny_models["llama"]), dtype="float64", device="cpu", num_threads=1)
    with closing(load_engine(ModelSettings(target=target, drafters={"first": LOOKUP}), num_slots=2)) as opened:
        yield opened


def decoded(engine: TransformersEngine, name: str, drafter: str, task: str = "code") -> tuple[str, int]:
    """The text, and how many drafted tokens the target accepted."""
    job = PromptJob(name, task, "one two three one two three one two", SAMPLING.max_tokens).as_job()
    (generation,) = decode(engine, [job], SAMPLING, forced(drafter, 4), batch=1)
    return generation.text, sum(generation.counts.accepts)


@pytest.mark.parametrize("drafter", ["later", "both"])
def test_a_drafter_that_is_loaded_later_wears_also_inside_a_hybrid(
    engine: TransformersEngine, drafter: str, caplog: pytest.LogCaptureFixture
) -> None:
    inject(engine, Faults(seed=7, worn=Worn(task=None, drafter="later", sound=1, wholly=1, most=1.0)))
    for name, settings in {"later": LOOKUP, "both": HybridDrafterSettings(sources=("later", "first"))}.items():
        engine.add_drafter(name, settings)
    with caplog.at_level(logging.WARNING):
        sound = decoded(engine, "a", drafter)
        assert [record for record in caplog.records if record.__dict__["action"] == WORN_ACTION] == []
        began = datetime.now(UTC)
        worn = decoded(engine, "b", drafter, "sql")
    assert worn[0] == sound[0], "the target verifies every draft"
    assert worn[1] == 0 < sound[1]
    assert decoded(engine, "c", "first")[1] > 0, "another drafter is sound"
    (noted,) = [record.__dict__ for record in caplog.records if record.__dict__["action"] == WORN_ACTION]
    assert began <= datetime.fromisoformat(noted[WORN_AT]) <= datetime.now(UTC)


def test_only_the_named_task_wears(engine: TransformersEngine) -> None:
    inject(engine, Faults(seed=7, worn=Worn(task="code", drafter="first", sound=0, wholly=1, most=1.0)))
    assert decoded(engine, "a", "first", "sql")[1] > 0
    assert decoded(engine, "b", "first", "code")[1] == 0
