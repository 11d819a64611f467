"""Chaos: jobs through real workers, while workers, brokers, database, network and clocks fail.

python -m tests.chaos                    the long run, with a seed of its own
python -m tests.chaos --seed 7 --short   the short run with the plan of seed 7
python -m tests.chaos --part outages     servers away, a full disk, a topic gone, one after the other
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from alphaloop.embedded.install import find_kafka_home
from alphaloop.settings import Settings
from alphaloop.settings.load import ENV_PREFIX, PLAIN_ENV
from tests.chaos import size
from tests.chaos.faults import FAULTS
from tests.chaos.plan import draw_plan
from tests.chaos.report import OUTAGES, PHASES, show, write
from tests.chaos.run import run
from tests.chaos.size import Size

_PARTS: Final = {"all": size.LONG, "outages": size.OUTAGES}
#: Options that change the size: what they change, and what they are.
_SIZES: Final = {
    "--jobs": ("num_null_jobs", "for the null engine"),
    "--real-jobs": ("num_real_jobs", "for the real engine; 0 leaves that part out"),
    "--workers": ("num_workers", "with the null engine"),
    "--brokers": ("num_brokers", "nodes of the Kafka cluster"),
    "--fault-s": ("fault_s", "how long a fault lasts"),
    "--restarts": ("num_storm_restarts", "of each worker in a rebalance storm"),
    "--pairs": ("num_pairs", "phases with two faults at once"),
}


def main() -> int:
    """Run; 0 if every promise was kept."""
    options = _options()
    home = find_kafka_home(Settings(embedded={"kafka_home": os.environ.get("KAFKA_HOME")}))
    for name in list(os.environ):  # the settings of whoever runs this are not what is tested
        if name.startswith(ENV_PREFIX) or name in PLAIN_ENV:
            del os.environ[name]
    if home is None:
        print("Apache Kafka is missing: set KAFKA_HOME, or run `alphaloop kafka install`", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    began = time.monotonic()
    plan = draw_plan(options.seed, _size(options))
    console.print(f"seed {plan.seed}; logs in {folder / 'logs'}; plan: {', '.join(one.name for one in plan.null)}")
    report = run(plan, home, folder, lambda line: console.print(f"{time.monotonic() - began:6.0f} s  {line}"))
    show(report, console)
    if options.page is not None:
        write(options.page, report, OUTAGES if options.part == "outages" else PHASES)
    if report.is_sound and options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if report.is_sound else 1


def _size(options: argparse.Namespace) -> Size:
    asked = {name: found for name, _ in _SIZES.values() if (found := getattr(options, name)) is not None}
    if options.fault:
        asked["phases"] = tuple((name,) for name in options.fault)
    return replace(size.SHORT if options.short else _PARTS[options.part], **asked)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of the plan")
    parser.add_argument("--part", choices=sorted(_PARTS), default="all", help="what is played")
    parser.add_argument("--short", action="store_true", help="the size of the run in `make test`")
    for option, (name, what) in _SIZES.items():
        parser.add_argument(option, dest=name, type=float if option == "--fault-s" else int, help=what)
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="only this one; may be repeated")
    parser.add_argument("--folder", type=Path, help="for logs and data; kept. Without it: kept if a promise was broken")
    parser.add_argument("--page", type=Path, help="a page of the documentation that gets the figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
