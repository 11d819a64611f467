"""python -m tests.fuzz --records 200000: does a consumer of `results` alone hear of every record?

Ends with 0 if every record is answered, once and with the same bytes, and with 1 if not.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from alphaloop.embedded.install import find_kafka_home
from alphaloop.settings import Settings
from alphaloop.settings.load import ENV_PREFIX, PLAIN_ENV
from tests.fuzz.accounting import account, shown


def main() -> int:
    """Play, account, and say so."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--records", type=int, default=200_000, help="how many are sent")
    parser.add_argument("--kills", type=int, default=16, help="workers that are killed meanwhile")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    options = parser.parse_args()
    home = find_kafka_home(Settings(embedded={"kafka_home": os.environ.get("KAFKA_HOME")}))
    for name in list(os.environ):  # the settings of whoever runs this are not what is tested
        if name.startswith(ENV_PREFIX) or name in PLAIN_ENV:
            del os.environ[name]
    if home is None:
        print("Apache Kafka is missing: set KAFKA_HOME, or run `alphaloop kafka install`", file=sys.stderr)
        return 2
    folder, began = Path(tempfile.mkdtemp(prefix="accounting-")), time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", file=sys.stderr)

    found = account(options.records, options.kills, options.seed, home, folder, say)
    print(f"seed {options.seed}, {time.monotonic() - began:.0f} s: {found.told()}")
    if found.wrong:
        print(f"{shown(found.wrong)}\nlogs: {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
