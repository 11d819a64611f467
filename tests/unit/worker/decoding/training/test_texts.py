"""Texts on disk: what was written comes back, and a damaged shard is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alphaloop.errors import ConfigError
from worker.decoding.training.data import TextStore, WrittenText

TOKENS = st.lists(st.integers(0, 200_000), min_size=1, max_size=9).map(tuple)
TEXTS = st.lists(
    st.builds(WrittenText, st.integers(0, 500), st.sampled_from(["any", "code", "à-la"]), TOKENS, TOKENS),
    min_size=1,
    max_size=12,
    unique_by=lambda text: text.number,
)


@settings(max_examples=15)
@given(TEXTS, st.integers(1, 5))
def test_every_text_comes_back_in_order(
    tmp_path_factory: pytest.TempPathFactory, texts: list[WrittenText], size: int
) -> None:
    store = TextStore(tmp_path_factory.mktemp("texts"))
    for begin in range(0, len(texts), size):
        store.add(texts[begin : begin + size])
    assert store.all() == sorted(texts, key=lambda text: text.number)
    assert TextStore(store.folder).all() == store.all()


def test_no_text_makes_no_file(tmp_path: Path) -> None:
    TextStore(tmp_path / "texts").add([])
    assert list((tmp_path / "texts").iterdir()) == []


def test_a_text_behind_a_prompt_knows_both() -> None:
    assert WrittenText(0, "any", (1, 2), (3,)).token_ids == (1, 2, 3)


def test_a_damaged_shard_is_named_and_half_a_one_is_not_seen(tmp_path: Path) -> None:
    store = TextStore(tmp_path)
    store.add([WrittenText(0, "any", (1,), (2,))])
    (file,) = tmp_path.iterdir()
    (tmp_path / "texts-000001-1.partial").write_bytes(file.read_bytes()[:10])
    assert len(store.all()) == 1
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=file.name) as raised:
        store.all()
    assert raised.value.hint == "delete it: the run makes it again"
