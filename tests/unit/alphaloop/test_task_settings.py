"""What a task's settings refuse, and how they say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaloop.errors import ConfigError
from alphaloop.settings import read_tasks


def read(folder: Path, settings: str) -> object:
    (folder / "tasks.toml").write_text(f"[tasks.code]\n{settings}\n", encoding="utf-8")
    return read_tasks(folder)["code"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ('vanilla_patterns = ["a*", ""]', r"tasks\.code\.vanilla_patterns\.1: .*at least 1 character"),
        (f'vanilla_patterns = ["{"a" * 501}"]', r"tasks\.code\.vanilla_patterns\.0: .*at most 500 characters"),
        (f"vanilla_patterns = {['a'] * 101}", r"tasks\.code\.vanilla_patterns: .*at most 100 items"),
        ('vanilla_patterns = "a*"', r"tasks\.code\.vanilla_patterns: .*tuple"),
        ("weight = 0.0", r"tasks\.code\.weight: .*greater than or equal to 0\.01; found 0\.0"),
        ("weight = -1", r"tasks\.code\.weight: .*greater than or equal to 0\.01; found -1"),
        ("weight = 1e3", r"tasks\.code\.weight: .*less than or equal to 100; found 1000"),
        ("weight = nan", r"tasks\.code\.weight: .*found nan"),
        ('weight = "heavy"', r"tasks\.code\.weight: .*valid number.*; found 'heavy'"),
        ("target_time_per_token_ms = 0", r"tasks\.code\.target_time_per_token_ms: .*greater than 0"),
        ("target_time_to_first_token_ms = -1.0", r"tasks\.code\.target_time_to_first_token_ms: .*greater than 0"),
        (
            "target_time_per_token_ms = 50\ntarget_time_to_first_token_ms = 900",
            r"tasks\.code: Expected one target, target_time_per_token_ms or target_time_to_first_token_ms",
        ),
    ],
)
def test_a_wrong_setting_of_a_task_is_named_with_what_is_wrong(tmp_path: Path, settings: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        read(tmp_path, settings)
    assert raised.value.hint
    assert len(raised.value.message) < 400


def test_a_target_may_stand_alone(tmp_path: Path) -> None:
    assert read(tmp_path, "target_time_per_token_ms = 50") != read(tmp_path, "target_time_to_first_token_ms = 900")
