"""`make first-hour`: the whole walk, with every command, its time, and the time to the first result.

`make installed` walks the README with the wheel instead of a checkout, then each process by itself and the demo.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.first_hour.machine import fresh_checkout, fresh_environment, installed_program
from tests.first_hour.terminal import NothingCame, Terminal
from tests.first_hour.walk import COMMAND_S, PAGES, Promised, Walk

_PROGRAM: Final = ".venv/bin/alphaloop"


def main() -> int:
    """0 if every page kept its promises, 1 at the first that did not."""
    asked = argparse.ArgumentParser(prog="python -m tests.first_hour", description=__doc__)
    asked.add_argument("--install", action="store_true", help="from a clone of the last commit, without its packages")
    asked.add_argument("--wheel", action="store_true", help="the README only, with the wheel instead of a checkout")
    asked.add_argument("--page", action="append", default=[], help="after the README, only this page")
    options = asked.parse_args()
    chosen = options.page or [] if options.wheel else options.page or PAGES
    pages = [page for page in PAGES if page in ("README.md", *chosen)]
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # of root, PostgreSQL runs under another account, which has to reach its programs
        wheel = options.wheel
        place = installed_program(folder) if wheel else fresh_checkout(folder, install=options.install)
        environment = fresh_environment(folder / "home")
        try:
            with Walk(place, environment, tell=print, make=_PROGRAM if wheel else "make") as walk:
                for page in pages:
                    walk.read(page)
                walk.take_down()
                walk.check_first_result()
                if wheel:
                    with Terminal(place, environment) as third:
                        _check_commands(walk, third)
        except (Promised, NothingCame) as broken:
            print(f"FAILED {broken}", file=sys.stderr)
            return 1
    print(*walk.skipped, sep="\n")
    print(f"first result: {walk.first_result}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    return 0


def _check_commands(walk: Walk, third: Terminal) -> None:
    """What the README does not type: each process by itself, and the demo. Raises Promised, NothingCame."""
    walk.stay(f"{_PROGRAM} up --no-worker --no-scheduler", "up; Ctrl-C stops it")
    walk.expect(f"{_PROGRAM} migrate")
    walk.expect(f"{_PROGRAM} scheduler once")
    third.type(f"{_PROGRAM} worker")
    third.until("worker_ready", timeout_s=COMMAND_S)
    third.interrupt()
    third.until("worker_stopped", timeout_s=COMMAND_S)
    walk.take_down()
    walk.expect(f"{_PROGRAM} demo --jobs 2")


if __name__ == "__main__":
    sys.exit(main())
