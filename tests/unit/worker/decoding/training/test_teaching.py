"""The target's notes are its own log-probabilities, however texts share a pass and a file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.decoding.device import find_device
from worker.decoding.models import load_weights
from worker.decoding.training.data import TeacherNotes, WrittenText, plain_lesson
from worker.decoding.training.distil import choose_vocabulary, columns_of

KEPT, LONGEST = 6, 24


@pytest.fixture(scope="module")
def target(tiny_models: dict[str, Path]) -> Any:
    return load_weights(str(tiny_models["qwen2"]), None, "float64", find_device("cpu")).model


@pytest.fixture
def texts(rng: random.Random) -> list[WrittenText]:
    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(384) for _ in range(rng.randint(1, most)))

    return [WrittenText(i, "any", tokens(20), tokens(30)) for i in range(40)]


def notes_on(folder: Path, texts: list[WrittenText]) -> TeacherNotes:
    return TeacherNotes(folder, texts, max_length=LONGEST, num_kept=KEPT)


def test_notes_are_the_targets_own(target: Any, texts: list[WrittenText], tmp_path: Path) -> None:
    notes = notes_on(tmp_path, texts)
    read: list[int] = []
    assert notes.num_missing == len(texts)
    assert notes.write(target, lambda: False, read.append)
    assert sum(read) == len(texts)
    assert notes.num_missing == 0
    lessons = notes.lessons()
    assert [lesson.text for lesson in lessons] == texts
    for lesson in lessons[::7]:
        wanted = lesson.text.token_ids[-LONGEST:]
        assert lesson.token_ids.tolist() == list(wanted)
        assert list(wanted[lesson.first_answer :]) == list(lesson.text.output[-LONGEST:])
        with torch.inference_mode():
            logits = target(input_ids=lesson.token_ids[None, :-1], use_cache=False).logits[0]
            assert lesson.states is not None
            again = target.get_output_embeddings()(lesson.states.double())
        expected = logits.float().log_softmax(dim=-1).topk(KEPT, dim=-1)
        assert torch.equal(lesson.top_ids[:, 0], expected.indices[:, 0])
        torch.testing.assert_close(lesson.top_log_probs, expected.values, atol=0.02, rtol=2e-3)
        # The states are what the head reads, rounded to bfloat16.
        torch.testing.assert_close(again, logits, atol=0.02 * float(logits.abs().max()), rtol=0)


def test_stopped_reading_goes_on_where_it_was(target: Any, texts: list[WrittenText], tmp_path: Path) -> None:
    whole, parts = notes_on(tmp_path / "whole", texts), notes_on(tmp_path / "parts", texts)
    assert whole.write(target, lambda: False, lambda num: None)
    answers = iter([False, True])
    assert not parts.write(target, lambda: next(answers), lambda num: None)
    assert 0 < parts.num_missing < len(texts)
    assert parts.write(target, lambda: False, lambda num: None)
    for a, b in zip(whole.lessons(), parts.lessons(), strict=True):
        assert torch.equal(a.top_ids, b.top_ids)
        assert torch.equal(a.top_log_probs, b.top_log_probs)


def test_a_plain_lesson_teaches_the_texts_own_tokens() -> None:
    lesson = plain_lesson(WrittenText(3, "any", (9, 8, 7, 6), (5, 4)), max_length=4, num_kept=2)
    assert lesson.token_ids.tolist() == [7, 6, 5, 4]
    assert lesson.first_answer == 2
    assert lesson.top_ids[:, 0].tolist() == [6, 5, 4]
    assert lesson.top_log_probs.exp().tolist() == [[1.0, 0.0]] * 3
    assert lesson.states is None


def test_the_vocabulary_holds_what_the_target_is_likeliest_to_say(
    target: Any, texts: list[WrittenText], tmp_path: Path
) -> None:
    notes = notes_on(tmp_path, texts)
    notes.write(target, lambda: False, lambda num: None)
    lessons = notes.lessons()
    mass = torch.zeros(384, dtype=torch.float64)
    for lesson in lessons:
        for ids, log_probs in zip(lesson.top_ids, lesson.top_log_probs, strict=True):
            mass[ids] += log_probs.double().exp()
    rarest = int(mass.argmin())
    chosen = choose_vocabulary(lessons, 50, 384, always=[rarest, 9999])
    assert chosen is not None
    assert len(chosen) == 50
    assert rarest in chosen.tolist()
    assert bool((chosen.diff() > 0).all())
    others = [token for token in range(384) if token not in set(chosen.tolist())]
    assert min(float(mass[token]) for token in chosen.tolist() if token != rarest) >= float(mass[others].max()) - 1e-9
    columns = columns_of(chosen, 384)
    assert columns is not None
    assert torch.equal(columns[chosen], torch.arange(50))
    assert set(columns[others].tolist()) == {-1}


@pytest.mark.parametrize("num", [0, 384, 400])
def test_the_whole_vocabulary_needs_no_list(num: int) -> None:
    assert choose_vocabulary([], num, 384, []) is None
    assert columns_of(None, 384) is None
