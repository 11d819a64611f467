"""The switchback experiment beside control batches, simulated: `python -m benchmarks.switchback`.

For every scenario: how often the 95 % interval holds the true speed-up, how wide it is, and how often the verdict is
wrong. Both methods have the same device, the same number of rounds and the same share of the device's time for control.
The truth is known: the world notes what each treatment round would have taken vanilla. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import Pool
from typing import Final

from rich.console import Console
from rich.table import Table

from alphaloop.experiment.assign import RoundDesign
from alphaloop.experiment.estimate import Verdict
from benchmarks.switchback.methods import Found, by_batches, by_slices
from benchmarks.switchback.world import Drafting, Host, Scenario, Truth, with_speedup

console = Console(stderr=True, width=140)
_METHODS: Final = {"switchback": by_slices, "batches": by_batches}
#: A draft model, accepted more in some texts than in others, that reads what it missed after a pause.
_DRAFT: Final = Drafting(3, 0.7, 0.15, catch_up=(0.3, 0.05))
#: Look-up: a quarter of the rounds have a proposal, in runs of a dozen.
_LOOKUP: Final = Drafting(6, 0.75, 0.3, copying_share=0.25, copying_rounds=12)
_SLOW_MINUTES: Final = Host(slow_every_s=60)


@dataclass(frozen=True, slots=True)
class Summary:
    """Runs of one scenario by one method."""

    scenario: str
    method: str
    true_speedup: float
    num_runs: int
    num_covered: int  #: intervals that hold the true speed-up
    num_without: int  #: runs without an interval
    num_wrong: int  #: verdicts that contradict the truth
    median_width: float | None  #: of the interval, from bound to estimate, as a share of it
    mean_error: float | None  #: mean log of estimate over truth
    control_share: float


def main() -> None:
    """Run every scenario, print the table and the JSON line."""
    options = _options()
    design = RoundDesign(options.share, options.control_rounds, options.washout_rounds, options.window_rounds)
    wanted = [scenario for scenario in scenarios() if options.only in scenario.name]
    summaries: list[Summary] = []
    with Pool(options.processes) as pool:
        for scenario in wanted:
            for name, method in _METHODS.items():
                run = partial(method, scenario, design=design, num_rounds=options.rounds)
                summaries.append(summarise(scenario, name, pool.map(run, range(options.runs), chunksize=5)))
                console.print(summaries[-1])
    show(summaries)
    print(json.dumps({"design": asdict(design), "num_rounds": options.rounds, "runs": [asdict(s) for s in summaries]}))


def scenarios() -> list[Scenario]:
    """Vanilla against vanilla on four kinds of host and load, then known speed-ups."""
    found = [
        Scenario("null, quiet host"),
        Scenario("null, slow minutes", host=_SLOW_MINUTES),
        Scenario("null, drift", host=Host(drift=0.4)),
        Scenario("null, bursts", num_slots=8, jobs_per_s=2.5),
    ]
    for speedup in (0.8, 1.2, 1.6):
        draft, lookup = with_speedup(_DRAFT, speedup), with_speedup(_LOOKUP, speedup)
        found += [
            Scenario(f"draft {speedup}, quiet host", draft),
            Scenario(f"look-up {speedup}, slow minutes", lookup, _SLOW_MINUTES),
        ]
    return [
        *found,
        Scenario("draft 1.2, slow minutes", with_speedup(_DRAFT, 1.2), _SLOW_MINUTES),
        Scenario("draft 1.2, bursts", with_speedup(_DRAFT, 1.2), num_slots=8, jobs_per_s=4),
        Scenario("look-up 1.2, one slot", with_speedup(_LOOKUP, 1.2), _SLOW_MINUTES, num_slots=1),
    ]


def summarise(scenario: Scenario, method: str, runs: Sequence[Found]) -> Summary:
    """The truth is that of all runs together, since a single run has texts of its own."""
    truth = Truth()
    for run in runs:
        truth.add(run.truth)
    true = truth.speedup
    concluded = [run for run in runs if not math.isnan(run.ratio)]
    wrong = {Verdict.FASTER: true <= 1, Verdict.SLOWER: true >= 1, Verdict.NO_DIFFERENCE: abs(true - 1) > 0.02}
    return Summary(
        scenario=scenario.name,
        method=method,
        true_speedup=true,
        num_runs=len(runs),
        num_covered=sum(run.low <= true <= run.high for run in concluded),
        num_without=len(runs) - len(concluded),
        num_wrong=sum(wrong.get(Verdict(run.verdict), False) for run in runs),
        median_width=statistics.median(math.log(run.high / run.low) / 2 for run in concluded) if concluded else None,
        mean_error=statistics.fmean(math.log(run.ratio / true) for run in concluded) if concluded else None,
        control_share=statistics.fmean(run.control_share for run in runs),
    )


def show(summaries: Sequence[Summary]) -> None:
    """For people, on standard error."""
    table = Table(title="95 % intervals of the speed-up: switchback and control batches")
    for column in (
        "scenario",
        "method",
        "true",
        "covered",
        "none",
        "interval ±",
        "mean error",
        "wrong verdicts",
        "share",
    ):
        table.add_column(column, justify="left" if column in ("scenario", "method") else "right")
    for one in summaries:
        table.add_row(
            one.scenario,
            one.method,
            f"{one.true_speedup:.3f}",
            _percent(one.num_covered, one.num_runs - one.num_without),
            str(one.num_without),
            "" if one.median_width is None else f"{one.median_width:.2%}",
            "" if one.mean_error is None else f"{one.mean_error:+.2%}",
            str(one.num_wrong),
            f"{one.control_share:.2%}",
        )
    console.print(table)


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _options() -> argparse.Namespace:
    design = RoundDesign()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30_000, help="of one run: five to ten minutes of a device")
    parser.add_argument("--share", type=float, default=design.control_share)
    parser.add_argument("--control-rounds", type=int, default=design.num_control_rounds)
    parser.add_argument("--washout-rounds", type=int, default=design.num_washout_rounds)
    parser.add_argument("--window-rounds", type=int, default=design.num_window_rounds)
    parser.add_argument("--only", default="", help="scenarios with this in their name")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
