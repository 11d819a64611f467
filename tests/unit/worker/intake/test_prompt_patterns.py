"""Patterns that switch speculation off, against regular expressions of the same meaning."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaloop.messages import Purpose
from alphaloop.settings import TaskSettings
from tests.fixtures import publishing
from worker.intake.partitions import Delivery
from worker.intake.validation import ReadyJob, covers

LISTED = {"code": TaskSettings(vanilla_patterns=("*```diff*", "Translate *"))}


def read(
    tasks: dict[str, TaskSettings] = LISTED, *, purpose: Purpose = Purpose.TRAFFIC, task: str = "code", **body: Any
) -> ReadyJob:
    return publishing.validation(tasks=tasks).read(delivery({"purpose": purpose, "body": body}, task))


def delivery(job: dict[str, Any], task: str = "code") -> Delivery:
    return publishing.delivery("", task=task, value=json.dumps(job).encode())


@given(st.text("abA*.\n", max_size=12), st.text("abA.\n*", max_size=30))
def test_a_pattern_means_what_a_regular_expression_of_it_means(pattern: str, text: str) -> None:
    expression = ".*".join(re.escape(literal) for literal in pattern.casefold().split("*"))
    expected = re.fullmatch(expression, text.casefold(), re.DOTALL) is not None
    assert covers(pattern, text.casefold()) == expected


def test_no_prompt_takes_long_to_compare() -> None:
    # A matcher that goes back on its choices tries some 10 ** 200 of them here.
    assert not covers("*a" * 50 + "*b*", "a" * 200_000)


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"prompt": "Review this:\n```DIFF\n+1\n```"}, "*```diff*"),
        ({"prompt": "translate this: ```diff"}, "*```diff*"),
        ({"prompt": "translate this"}, "Translate *"),
        ({"prompt": "Please translate this"}, ""),
        (
            {"messages": [{"role": "system", "content": "Translate it."}, {"role": "user", "content": "Bonjour"}]},
            "Translate *",
        ),
        ({"messages": [{"role": "user", "content": "Translate"}, {"role": "user", "content": " it"}]}, ""),
    ],
)
def test_the_first_pattern_that_covers_a_prompt_or_a_message_counts(body: dict[str, Any], pattern: str) -> None:
    assert read(**body).lane.switched_off == pattern


def test_probes_and_controls_measure_whatever_their_prompts_say() -> None:
    for purpose in (Purpose.PROBE, Purpose.CONTROL):
        assert read(purpose=purpose, prompt="Translate this").lane.switched_off == ""


def test_a_task_list_that_is_read_again_brings_its_patterns() -> None:
    newer = {"code": TaskSettings(vanilla_patterns=("Bonjour",)), "sql": TaskSettings()}
    reading = publishing.validation(tasks=LISTED, reread_tasks=lambda: newer)
    job = {"body": {"prompt": "Bonjour"}}
    assert reading.read(delivery(job)).lane.switched_off == ""
    assert reading.read(delivery(job, "sql")).lane.switched_off == ""
    assert reading.read(delivery(job)).lane.switched_off == "Bonjour"
