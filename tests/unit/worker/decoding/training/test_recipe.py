"""The dials of a training: which layers, and what a wrong file is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaloop.errors import ConfigError
from worker.decoding.training.recipe import Recipe, read_recipe


def test_layers_that_the_target_lacks_are_refused() -> None:
    assert Recipe(layers=(1, 3)).chosen_layers(4) == (1, 3)
    for layers in ((1, 4), (3, 1), (1, 1), (-1, 2)):
        with pytest.raises(ConfigError, match="from 0 to 3"):
            Recipe(layers=layers).chosen_layers(4)
    with pytest.raises(ConfigError, match="the target has 4, found 5"):
        Recipe(num_layers=5).chosen_layers(4)


def test_a_file_is_read_and_the_seed_of_the_command_wins(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text("num_layers = 3\nseed = 1\n", encoding="utf-8")
    assert read_recipe(file) == Recipe(num_layers=3, seed=1)
    assert read_recipe(file, seed=7) == Recipe(num_layers=3, seed=7)
    assert read_recipe(None) == Recipe()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("num_layer = 3", "num_layer: "),
        ("num_layers = 0", "num_layers: "),
        ("layers = []", "layers: "),
        ("num_layers = ", "Invalid value"),
    ],
)
def test_a_wrong_file_names_what_is_wrong(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        read_recipe(file)
