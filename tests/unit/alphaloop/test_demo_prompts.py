"""The demo's prompts: real text of this Python, enough of it, always the same, never both probe and traffic."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from random import Random

import pytest

from alphaloop.cli.demo import FROM_FUNCTIONS, MAX_CHARS, MIN_CHARS, DemoPrompts, harvest, modules
from alphaloop.errors import ConfigError
from alphaloop.settings import load_settings


@pytest.fixture(scope="module")
def prompts() -> DemoPrompts:
    return harvest(7, num_traffic=8, num_probes=4)


def test_enough_tasks_and_prompts_of_the_right_size(prompts: DemoPrompts) -> None:
    assert set(prompts.traffic) == set(prompts.probes) == set(FROM_FUNCTIONS)
    assert prompts.num_traffic == 8 * len(FROM_FUNCTIONS)
    assert {len(found) for found in prompts.probes.values()} == {4}
    assert set(FROM_FUNCTIONS) <= set(load_settings().tasks), "every task is configured"
    for prompt in chain(*prompts.traffic.values(), *prompts.probes.values()):
        assert MIN_CHARS <= len(prompt) <= MAX_CHARS
        prompt.encode("utf-8")


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(prompts: DemoPrompts) -> None:
    assert harvest(7, num_traffic=8, num_probes=4) == prompts
    assert harvest(8, num_traffic=8, num_probes=4).traffic["code"] != prompts.traffic["code"]


def test_no_text_is_used_twice(prompts: DemoPrompts) -> None:
    every = list(chain(*prompts.traffic.values(), *prompts.probes.values()))
    assert len(set(every)) == len(every)
    # A function belongs to one task, so its code is never a probe here and traffic there.
    sources_of = [prompt.split("```python\n")[1] for prompt in every if "```python\ndef " in prompt]
    assert len(set(sources_of)) == len(sources_of)


def test_a_python_without_sources_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alphaloop.cli.demo.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"no \.py file"):
        harvest(7, num_traffic=8, num_probes=4)
    (tmp_path / "lonely.py").write_text('def f(a):\n    """Doc."""\n    return a\n')
    with pytest.raises(ConfigError, match="too few"):
        harvest(7, num_traffic=8, num_probes=4)


def test_sources_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    (tmp_path / "good.py").write_text('"""A module."""\n')
    assert [name for name, _, _ in modules(tmp_path, Random(1))] == ["good"]
