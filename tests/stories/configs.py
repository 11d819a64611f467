"""The settings of a run: the shipped ones, and over them what a laptop and the stories need."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from alphaloop.settings.load import SHIPPED_CONFIGS
from tests.stories.prompts import DROPPED, TASKS, WORN

PROFILE: Final = "stories"

#: What every story has on a laptop.
_LAPTOP: Final = """
[kafka]
num_partitions = 2
replication_factor = 1
session_timeout_ms = 20000

[models.target]
source = "{target}"
num_threads = {num_threads}
"""
_PROFILE: Final = """
[models.drafters.small]
method = "draft_model"
source = "{draft}"
max_draft_tokens = 3

[worker]
http_port = 0
calibration_budget_s = 0.0

[scheduler]
http_port = 0
probe_prompts = {num_probes}
probe_min_device_s = 36000.0  # the history of days is measured in one evening
drift_settle_s = 0.0          # a run begins when every outcome is recorded
drift_false_alarms_per_month = 20.0  # a month of such days has 20,000 jobs: one false alarm in 1,000
"""


def write_configs(
    folder: Path, *, target: str, draft: Path, num_threads: int, num_probes: int, is_watched: bool
) -> Path:
    """A folder of settings whose profile is `PROFILE`. `is_watched`: two tasks are probed in every run."""
    text = _PROFILE.format(draft=draft.absolute(), num_probes=num_probes)
    for task in TASKS:
        # Acceptance is what the stories are about: drafts that do not pay on this machine are kept all the same.
        text += f'\n[tasks.{task}]\ndecoding = "speculative"\n'
        if is_watched and task in (WORN, DROPPED):
            text += "probe_max_age_s = 1.0\n"
    return write_profile(folder, text, target=target, num_threads=num_threads)


def write_profile(folder: Path, text: str, *, target: str, num_threads: int) -> Path:
    """The shipped settings, and over them a laptop's and `text` as `PROFILE`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SHIPPED_CONFIGS, folder)
    laptop = _LAPTOP.format(target=target, num_threads=num_threads)
    (folder / f"{PROFILE}.toml").write_text(f"{laptop}{text}", encoding="utf-8")
    return folder
