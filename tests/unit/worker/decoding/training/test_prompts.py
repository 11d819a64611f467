"""Where texts begin: prompts of one's own, held out or not, and openings that the target goes on from."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from alphaloop.errors import ConfigError
from alphaloop.settings import Settings, TaskSettings
from worker.decoding.training.data import FREE, answer_prompt, plan_requests, read_prompts
from worker.decoding.training.recipe import Recipe

TASKS = {
    "code": TaskSettings(description="Write code"),
    "sql": TaskSettings(description="Queries"),
    "x": TaskSettings(),
}
RECIPE = Recipe(num_texts=7, num_held_out=3)


def lines(file: Path, *values: object) -> Path:
    file.write_text("\n".join(json.dumps(value) for value in values), encoding="utf-8")
    return file


def test_prompts_are_tokenized_as_when_served(tmp_path: Path, tiny_tokenizer: Any) -> None:
    file = lines(
        tmp_path / "prompts.jsonl",
        {"task": "code", "prompt": "add two numbers"},
        {"task": "code", "body": {"prompt": "def f("}},
        {"body": {"messages": [{"role": "user", "content": "hello"}]}},
    )
    found = read_prompts(file, Settings(tasks=TASKS), tiny_tokenizer, "sql")
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
    file = tmp_path / "prompts.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        read_prompts(file, Settings(tasks=TASKS), tiny_tokenizer, None)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path, tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "none.jsonl", Settings(), tiny_tokenizer, "code")


def test_the_target_writes_as_many_as_asked_half_of_them_steered(tiny_tokenizer: Any) -> None:
    requests, num_held_out = plan_requests(tiny_tokenizer, TASKS, RECIPE, None, None)
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
    requests, _ = plan_requests(tiny_tokenizer, TASKS, RECIPE, None, None)
    assert {request.task for request in requests} == {FREE}


def test_a_base_model_writes_from_its_first_token_or_says_that_it_cannot(
    tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_tokenizer, "chat_template", None)
    requests, _ = plan_requests(tiny_tokenizer, TASKS, RECIPE, None, None)
    assert {request.opening for request in requests} == {(tiny_tokenizer.eos_token_id,)}
    assert tiny_tokenizer.decode(answer_prompt(tiny_tokenizer, "hello")) == "hello"
    nameless = copy.deepcopy(tiny_tokenizer)
    nameless.eos_token = None
    with pytest.raises(ConfigError, match="neither a chat template nor a first token"):
        plan_requests(nameless, TASKS, RECIPE, None, None)


def test_a_fifth_of_ones_own_prompts_is_held_out(tmp_path: Path, tiny_tokenizer: Any) -> None:
    file = lines(tmp_path / "p.jsonl", *({"task": "code", "prompt": f"p{i}"} for i in range(10)))
    prompts = read_prompts(file, Settings(tasks=TASKS), tiny_tokenizer, None)
    requests, num_held_out = plan_requests(tiny_tokenizer, TASKS, RECIPE, prompts, None)
    assert (len(requests), num_held_out) == (10, 2)
    assert {request.prompt for request in requests} == {request.prompt for request in prompts}
    again, _ = plan_requests(tiny_tokenizer, TASKS, RECIPE, prompts, None)
    other, _ = plan_requests(tiny_tokenizer, TASKS, RECIPE.model_copy(update={"seed": 1}), prompts, None)
    assert requests == again != other
    with pytest.raises(ConfigError, match="at least two prompts"):
        plan_requests(tiny_tokenizer, TASKS, RECIPE, prompts[:1], None)


def test_a_file_to_judge_with_is_never_trained_on(tmp_path: Path, tiny_tokenizer: Any) -> None:
    settings = Settings(tasks=TASKS)
    judged = read_prompts(lines(tmp_path / "j.jsonl", {"task": "sql", "prompt": "j"}), settings, tiny_tokenizer, None)
    own = read_prompts(lines(tmp_path / "p.jsonl", {"task": "code", "prompt": "p"}), settings, tiny_tokenizer, None)
    requests, num_held_out = plan_requests(tiny_tokenizer, TASKS, RECIPE, own, judged)
    assert [request.task for request in requests] == ["sql", "code"]
    assert num_held_out == 1
    requests, num_held_out = plan_requests(tiny_tokenizer, TASKS, RECIPE, None, judged)
    assert (len(requests), num_held_out) == (1 + RECIPE.num_texts, 1)
    assert [request.number for request in requests] == list(range(8))
    assert all(request.prompt is None for request in requests[1:])
