"""What a draft learns from: its prompts, texts that come back from disk, and notes that are the target's own."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.errors import ConfigError
from alphaloop.settings import Settings, TaskSettings
from engine.device import find_device
from engine.models import load_weights
from engine.training.data import (
    FREE,
    TeacherNotes,
    TextRequest,
    TextStore,
    WrittenText,
    answer_prompt,
    plan_requests,
)
from engine.training.distil import choose_vocabulary, columns_of
from engine.training.recipe import Recipe
from worker.commands import read_prompts

TASKS = {
    "code": TaskSettings(description="Write code"),
    "sql": TaskSettings(description="Queries"),
    "x": TaskSettings(),
}
DESCRIPTIONS = {name: task.description for name, task in TASKS.items()}
RECIPE = Recipe(num_texts=7, num_held_out=3)


def read(folder: Path, tokenizer: Any, *lines: object, task: str | None = None) -> list[TextRequest]:
    """The prompts of a file with these lines."""
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines), encoding="utf-8")
    return read_prompts(Settings(tasks=TASKS), task, print, file, tokenizer)


def test_prompts_are_tokenized_as_when_served(tmp_path: Path, tiny_tokenizer: Any) -> None:
    lines = (
        {"task": "code", "prompt": "add two numbers"},
        {"task": "code", "body": {"prompt": "def f("}},
        {"body": {"messages": [{"role": "user", "content": "hello"}]}},
    )
    found = read(tmp_path, tiny_tokenizer, *lines, task="sql")
    assert [request.task for request in found] == ["code", "code", "sql"]
    assert found[0].prompt == answer_prompt(tiny_tokenizer, "add two numbers")
    assert tiny_tokenizer.decode(found[1].prompt) == "def f("
    assert tiny_tokenizer.decode(found[2].prompt) == "<user>hello<answer>"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"task": "code", "prompt": "a"}\nno json', r"1 wrong lines; the first: .*prompts.jsonl:2"),
        ('{"task": "code", "prompt": "a", "temperature": 9}', r"prompts.jsonl:1: temperature"),
        ('{"prompt": "a"}', r"prompts.jsonl:1: task"),
        ('{"task": "unknown", "prompt": "a"}', r"prompts.jsonl:1: task: no task 'unknown'"),
        ("\n\n", "no line with text"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, tiny_tokenizer: Any, content: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, tiny_tokenizer, content)


def test_the_target_writes_as_many_as_asked_half_of_them_steered(tiny_tokenizer: Any) -> None:
    requests, num_held_out = plan_requests(tiny_tokenizer, DESCRIPTIONS, RECIPE, None, None)
    assert (len(requests), num_held_out) == (10, 3)
    assert [request.number for request in requests] == list(range(10))
    assert [request.task for request in requests] == [FREE, "code", FREE, "sql"] * 2 + [FREE, "code"]
    assert {request.prompt for request in requests} == {None}
    assert tiny_tokenizer.decode(requests[0].opening) == "<user>"
    assert "Write code" in tiny_tokenizer.decode(requests[1].opening)
    assert tiny_tokenizer.decode(requests[1].opening).endswith("<user>")


def test_a_template_without_system_messages_leaves_all_free(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    refusing += "<user>{{ messages[0]['content'] }}"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", refusing)
    requests, _ = plan_requests(tiny_tokenizer, DESCRIPTIONS, RECIPE, None, None)
    assert {request.task for request in requests} == {FREE}


def test_a_base_model_writes_from_its_first_token_or_says_that_it_cannot(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", None)
    requests, _ = plan_requests(tiny_tokenizer, DESCRIPTIONS, RECIPE, None, None)
    assert {request.opening for request in requests} == {(tiny_tokenizer.eos_token_id,)}
    assert tiny_tokenizer.decode(answer_prompt(tiny_tokenizer, "hello")) == "hello"
    nameless = copy.deepcopy(tiny_tokenizer)
    nameless.eos_token = None
    with pytest.raises(ConfigError, match="neither a chat template nor a first token"):
        plan_requests(nameless, DESCRIPTIONS, RECIPE, None, None)


def test_a_fifth_of_ones_own_prompts_is_held_out(tmp_path: Path, tiny_tokenizer: Any) -> None:
    prompts = read(tmp_path, tiny_tokenizer, *({"task": "code", "prompt": f"p{i}"} for i in range(10)))
    requests, num_held_out = plan_requests(tiny_tokenizer, DESCRIPTIONS, RECIPE, prompts, None)
    assert (len(requests), num_held_out) == (10, 2)
    assert {request.prompt for request in requests} == {request.prompt for request in prompts}
    again, _ = plan_requests(tiny_tokenizer, DESCRIPTIONS, RECIPE, prompts, None)
    other, _ = plan_requests(tiny_tokenizer, DESCRIPTIONS, RECIPE.model_copy(update={"seed": 1}), prompts, None)
    assert requests == again != other
    with pytest.raises(ConfigError, match="at least two prompts"):
        plan_requests(tiny_tokenizer, DESCRIPTIONS, RECIPE, prompts[:1], None)


def test_a_file_to_judge_with_is_never_trained_on(tmp_path: Path, tiny_tokenizer: Any) -> None:
    judged, own = (read(tmp_path, tiny_tokenizer, {"task": task, "prompt": "p"}) for task in ("sql", "code"))
    requests, num_held_out = plan_requests(tiny_tokenizer, DESCRIPTIONS, RECIPE, own, judged)
    assert [request.task for request in requests] == ["sql", "code"]
    assert num_held_out == 1
    requests, num_held_out = plan_requests(tiny_tokenizer, DESCRIPTIONS, RECIPE, None, judged)
    assert (len(requests), num_held_out) == (1 + RECIPE.num_texts, 1)
    assert [request.number for request in requests] == list(range(8))
    assert all(request.prompt is None for request in requests[1:])


TOKENS = st.lists(st.integers(0, 200_000), min_size=1, max_size=9).map(tuple)
TEXTS = st.lists(
    st.builds(WrittenText, st.integers(0, 500), st.sampled_from(["any", "code", "à-la"]), TOKENS, TOKENS),
    min_size=1,
    max_size=12,
    unique_by=lambda text: text.number,
)


@settings(max_examples=15)
@given(TEXTS)
def test_every_text_comes_back_in_order_and_half_a_line_is_none(
    tmp_path_factory: pytest.TempPathFactory, texts: list[WrittenText]
) -> None:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    assert TextStore(file).all() == []
    for text in texts:
        TextStore(file).add(text)
    assert TextStore(file).all() == sorted(texts, key=lambda text: text.number)
    file.write_bytes(file.read_bytes()[:-1])
    assert TextStore(file).all() == sorted(texts[:-1], key=lambda text: text.number)
    TextStore(file).add(texts[-1])
    assert TextStore(file).all() == sorted(texts, key=lambda text: text.number)


KEPT, LONGEST = 6, 24


@pytest.fixture(scope="module")
def target(tiny_models: dict[str, Path]) -> Any:
    return load_weights(str(tiny_models["qwen2"]), None, "float64", find_device("cpu")).model


@pytest.fixture
def texts(rng: random.Random) -> list[WrittenText]:
    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(384) for _ in range(rng.randint(1, most)))

    return [WrittenText(i, "any", tokens(20), tokens(30)) for i in range(80)]


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
    assert len(chosen) == 50
    assert rarest in chosen.tolist()
    assert bool((chosen.diff() > 0).all())
    others = [token for token in range(384) if token not in set(chosen.tolist())]
    assert min(float(mass[token]) for token in chosen.tolist() if token != rarest) >= float(mass[others].max()) - 1e-9
    columns = columns_of(chosen, 384)
    assert torch.equal(columns[chosen], torch.arange(50))
    assert set(columns[others].tolist()) == {-1}
