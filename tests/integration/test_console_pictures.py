"""The guide's pictures of the console cannot age: they are taken anew, and the pages name what they named then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser

from benchmarks.console.pictures import LABELS

ROOT: Final = Path(__file__).parents[2]


@pytest.mark.postgres
@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_guides_pictures_show_the_pages_of_today(browser: Browser, tmp_path: Path) -> None:
    taking = [sys.executable, "-m", "benchmarks.console", "--tasks", "6", "--pictures", str(tmp_path)]
    done = subprocess.run(taking, cwd=ROOT, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr
    kept = ROOT / "docs" / "guides" / "console"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in kept.iterdir()}
    today, then = (json.loads((folder / LABELS).read_text(encoding="utf-8")) for folder in (tmp_path, kept))
    assert today == then, "take them anew: make console-pictures"
