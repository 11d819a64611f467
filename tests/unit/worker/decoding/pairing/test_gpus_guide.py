"""The settings that docs/guides/gpus.md shows are settings."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

from alphaloop.settings.models import DraftModelDrafterSettings, ModelSettings

GUIDE: Final = (Path(__file__).parents[5] / "docs/guides/gpus.md").read_text(encoding="utf-8")


def test_its_settings_are_settings() -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    read = ModelSettings.model_validate(tomllib.loads(block)["models"])
    small = read.drafters["small"]
    assert isinstance(small, DraftModelDrafterSettings)
    assert (read.target.device, small.device) == ("cuda:0", "cuda:1")
