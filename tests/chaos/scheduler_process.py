"""The scheduler of a run: `python -m scheduler run`, which ends when its standard input does."""

from __future__ import annotations

import sys

from scheduler.__main__ import main
from tests.chaos.life_line import end_with_input

if __name__ == "__main__":
    end_with_input()
    sys.exit(main(["run"]))
