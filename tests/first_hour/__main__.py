"""`make first-hour`: the whole walk, with every command, its time, and the time to the first result."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.first_hour.machine import fresh_checkout, fresh_environment
from tests.first_hour.readme import check_first_result
from tests.first_hour.walk import PAGES, Promised, Walk


def main() -> int:
    """0 if every page kept its promises, 1 at the first that did not."""
    asked = argparse.ArgumentParser(prog="python -m tests.first_hour", description=__doc__)
    asked.add_argument("--install", action="store_true", help="from a clone of the last commit, without its packages")
    asked.add_argument("--page", action="append", default=[], help="after the README, only this page")
    options = asked.parse_args()
    pages = [page for page in PAGES if not options.page or page in ("README.md", *options.page)]
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        folder = Path(name)
        checkout = fresh_checkout(folder, install=options.install)
        try:
            with Walk(checkout, fresh_environment(folder / "home"), tell=print) as walk:
                for page in pages:
                    walk.read(page)
                walk.take_down()
                check_first_result(walk)
        except Promised as broken:
            print(f"FAILED {broken}", file=sys.stderr)
            return 1
    print(*walk.skipped, sep="\n")
    print(f"first result: {walk.first_result}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
