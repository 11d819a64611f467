"""The closed form against what it must find: the map that makes a draft's states the target's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.decoding.device import find_device
from worker.decoding.models import load_weights
from worker.decoding.training.data import Lesson, TeacherNotes, WrittenText
from worker.decoding.training.distil import cut_draft, fit_map, turn_head


@pytest.fixture(scope="module")
def target(tiny_models: dict[str, Path]) -> Any:
    return load_weights(str(tiny_models["llama"]), None, "float32", find_device("cpu")).model


@pytest.fixture(scope="module")
def lessons(target: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Lesson]:
    rng = random.Random(3)
    texts = [WrittenText(i, "any", (1,), tuple(rng.randrange(384) for _ in range(30))) for i in range(12)]
    notes = TeacherNotes(tmp_path_factory.mktemp("notes"), texts, max_length=64, num_kept=4)
    notes.write(target, lambda: False, lambda num: None)
    return notes.lessons()


def distance(draft: Any, mapping: torch.Tensor, lessons: list[Lesson]) -> float:
    total = 0.0
    for lesson in lessons:
        assert lesson.states is not None
        with torch.inference_mode():
            output = draft(input_ids=lesson.token_ids[None, :-1], use_cache=False, output_hidden_states=True)
        total += float((output.hidden_states[-1][0] @ mapping.T - lesson.states.float()).square().sum())
    return total


def test_a_draft_that_is_the_target_needs_no_turning(target: Any, lessons: list[Lesson]) -> None:
    seen: list[None] = []
    draft = cut_draft(target, (0, 1))
    mapping = fit_map(draft, lessons, lambda: seen.append(None))
    assert len(seen) == len(lessons)
    size = sum(float(lesson.states.float().square().sum()) for lesson in lessons if lesson.states is not None)
    assert distance(draft, mapping, lessons) < 1e-3 * size < 0.1 * distance(draft, torch.zeros(64, 64), lessons)


def test_no_other_map_is_nearer(target: Any, lessons: list[Lesson]) -> None:
    draft = cut_draft(target, (0,))
    mapping = fit_map(draft, lessons, lambda: None)
    found = distance(draft, mapping, lessons)
    assert found < distance(draft, torch.eye(64), lessons)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        nearby = mapping + 0.05 * torch.randn(64, 64, generator=generator)
        assert found < distance(draft, nearby, lessons)


def test_a_turned_head_reads_mapped_states_and_leaves_the_target_alone(target: Any, lessons: list[Lesson]) -> None:
    draft = cut_draft(target, (0,))
    before = target.get_output_embeddings().weight.clone()
    mapping = fit_map(draft, lessons, lambda: None)
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        expected = draft.get_output_embeddings()(states @ mapping.T)
        turn_head(draft, mapping)
        torch.testing.assert_close(draft.get_output_embeddings()(states), expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(target.get_output_embeddings().weight, before)
