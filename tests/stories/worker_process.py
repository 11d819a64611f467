"""A worker process of the stories: the shipped `python -m worker`, whose engine is spoilt as STORIES_FAULTS says.

STORIES_FAULTS='{"seed": 7, "worn": {"task": "code", "drafter": "lookup", "sound": 200, "wholly": 200}}'
"""

from __future__ import annotations

import os
import sys

from alphaloop.settings.models import ModelSettings
from engine import own
from engine.own import TransformersEngine
from tests.stories.faults import Faults, inject

FAULTS = "STORIES_FAULTS"


def run() -> int:
    """Run the worker; its exit code."""
    faults, sound_load = Faults.model_validate_json(os.environ[FAULTS]), own.load_engine

    def load_spoilt(models: ModelSettings, *, num_slots: int) -> TransformersEngine:
        spoilt = sound_load(models, num_slots=num_slots)
        inject(spoilt, faults)
        return spoilt

    own.load_engine = load_spoilt
    from worker.__main__ import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
