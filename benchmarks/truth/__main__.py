"""How often shown intervals hold the truth: `python -m benchmarks.truth`, or `make bench-truth`.

α as status and the report show it, the bounds of `alphaloop measure`, and the measured speed-up, for histories of 4 to
1,000 jobs, on hosts with slow minutes and with producers whose prompts are alike. Where the evidence is too thin,
nothing is shown: such runs are counted apart. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from multiprocessing import Pool
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.truth import acceptance, measure, speedup
from benchmarks.truth.coverage import Coverage

NUM_JOBS: Final = (4, 8, 20, 100)
#: The speed-up needs more jobs: a block takes some 50 rounds, and control a small share of them.
NUM_JOBS_OF_SPEEDUP: Final = (*NUM_JOBS, 1000)


def main() -> None:
    """Run every case, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--most-jobs", type=int, default=max(NUM_JOBS_OF_SPEEDUP))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    console = Console(stderr=True, width=130)
    found: list[Coverage] = []
    num_shipped = 0
    for num_jobs in NUM_JOBS:
        found += acceptance.rows(num_jobs, options.runs, options.seed)
        for one, shipped in measure.rows(num_jobs, options.runs, options.seed):
            found.append(one)
            num_shipped += shipped
    seeds = range(options.seed, options.seed + options.runs)
    with Pool(options.processes) as pool:
        for num_jobs in (num for num in NUM_JOBS_OF_SPEEDUP if num <= options.most_jobs):
            for scenario in speedup.scenarios():
                for share in speedup.SHARES:
                    play = partial(speedup.play, scenario, num_jobs, share)
                    found.append(speedup.row(scenario, num_jobs, share, pool.map(play, seeds, chunksize=5)))
    console.print(_table(found))
    console.print(f"`measure` at a bar of 1 shipped what is no faster: {num_shipped} runs")
    print(json.dumps({"rows": [asdict(one) for one in found], "shipped_no_faster": num_shipped, "runs": options.runs}))


def _table(found: list[Coverage]) -> Table:
    table = Table(title="95 % intervals that hold the truth")
    for column in ("interval", "case", "jobs", "shown", "covered", "above the truth", "width"):
        table.add_column(column, justify="left" if column in ("interval", "case") else "right")
    for one in sorted(found, key=lambda its: (its.what, its.case, its.num_jobs)):
        table.add_row(
            one.what,
            one.case,
            str(one.num_jobs),
            f"{one.num_shown / one.num_runs:.0%}",
            "" if one.share is None else f"{one.share:.1%}",
            "" if one.share is None else f"{one.num_above / one.num_shown:.1%}",
            "" if one.median_width is None else f"{one.median_width:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
