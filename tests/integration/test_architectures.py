"""A few of the architectures that `python -m benchmarks.architectures` compares with transformers, one of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.architectures import ARCHITECTURES, check

BY_NAME = {one.name: one for one in ARCHITECTURES}
EXACT = (
    "gemma3",  # a config that holds several models, with windows of the text model only
    "phi3",  # one window for all layers, computed by transformers' modules
    "gemma2",  # windows, and scores that torch's attention cannot cap
    "deepseek_v3",  # latent attention: a key and a value of another size
    "falcon, multi_query",
    "gemma4_text",  # heads whose size depends on the layer, and layers that share keys
)


@pytest.mark.parametrize("name", EXACT)
def test_it_writes_what_transformers_writes(name: str, tmp_path: Path) -> None:
    outcome = check(BY_NAME[name], tmp_path)
    assert outcome.verdict == "exact", outcome.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("falcon, alibi", "expected positions as numbers, found ALiBi in falcon"),
        ("mamba", "expected full attention or a sliding window in every layer of mamba, found linear_attention"),
    ],
)
def test_it_is_refused_with_its_reason(name: str, reason: str, tmp_path: Path) -> None:
    outcome = check(BY_NAME[name], tmp_path)
    assert (outcome.verdict, outcome.reason[: len(reason)]) == ("refused", reason)
