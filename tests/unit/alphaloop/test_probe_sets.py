"""What makes a version of a probe set, and which prompts two versions share."""

from __future__ import annotations

import pytest

from alphaloop.probe_sets import new_probe_set
from tests.fixtures.probes import probe_set

BODIES = [{"prompt": "one", "temperature": 0.7}, {"prompt": "two", "stream": True, "seed": 4}]


def test_prompts_are_asked_greedily_and_whole() -> None:
    found = probe_set("code", BODIES)
    assert [dict(prompt.body) for prompt in found.prompts.values()] == [
        {"prompt": "one", "temperature": 0.0, "max_tokens": 48},
        {"prompt": "two", "temperature": 0.0, "max_tokens": 48},
    ]


def test_versions_share_the_prompts_that_both_have() -> None:
    first, second = probe_set("code", BODIES), probe_set("code", [{"prompt": "two"}, {"prompt": "three"}])
    assert first.version != second.version
    assert first.prompts[1].prompt_id == second.prompts[0].prompt_id
    assert first.prompts[0].prompt_id != second.prompts[1].prompt_id


def test_another_k_is_another_version_of_the_same_prompts() -> None:
    first, second = probe_set("code", BODIES, 3), probe_set("code", BODIES, 5)
    assert first.version != second.version
    assert first.prompts == second.prompts


def test_another_output_limit_makes_other_prompts() -> None:
    longer = new_probe_set("code", BODIES, num_draft_tokens=3, max_tokens=64)
    ids = {prompt.prompt_id for prompt in longer.prompts.values()}
    assert ids.isdisjoint(prompt.prompt_id for prompt in probe_set("code", BODIES).prompts.values())


def test_a_prompt_that_occurs_twice_is_measured_once() -> None:
    assert probe_set("code", [*BODIES, BODIES[0]]) == probe_set("code", BODIES)


def test_a_set_has_a_prompt() -> None:
    with pytest.raises(ValueError, match="without a prompt"):
        probe_set("code", [])
