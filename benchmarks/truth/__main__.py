"""How often shown intervals hold the truth: `python -m benchmarks.truth`, or `make bench-truth`.

α as status and the report show it, the bounds of `alphaloop measure`, and the measured speed-up, for histories of 4 to
1,000 jobs, on hosts with slow minutes and with producers whose prompts are alike. Where the evidence is too thin,
nothing is shown: such runs are counted apart. Last line: JSON.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from multiprocessing import Pool
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from alphaloop.acceptance import Counts, Interval, consecutive_runs, share_interval
from alphaloop.experiment.assign import RoundDesign, RoundSchedule
from alphaloop.experiment.figures import SpeedupSubject, task_speedup
from alphaloop.experiment.observe import Phase, Slice
from alphaloop.payoff.figures import PromptBlock, RatioBounds, ShipVerdict, judge, total_bounds
from benchmarks.reporting import parser_of, table_of
from benchmarks.switchback.world import NOTHING, TASK, Drafting, Host, Scenario, Truth, World, with_speedup


@dataclass(frozen=True, slots=True)
class Shown:
    """What one run showed; without bounds it showed no verdict yet."""

    low: float | None
    high: float | None
    truth: float


@dataclass(frozen=True, slots=True)
class Coverage:
    """Many runs of one case."""

    what: str  #: the interval
    case: str
    num_jobs: int
    num_runs: int
    num_shown: int  #: of the runs, those with bounds
    num_covered: int  #: of these, those that hold the truth
    num_above: int  #: of these, those that lie above the truth: what is called faster than it is
    median_width: float | None

    @property
    def share(self) -> float | None:
        """Covered, of those shown."""
        return self.num_covered / self.num_shown if self.num_shown else None


def coverage(what: str, case: str, num_jobs: int, runs: Iterable[Shown]) -> Coverage:
    """Add up the runs of a case."""
    found = list(runs)
    bounds = [(one.low, one.high, one.truth) for one in found if one.low is not None and one.high is not None]
    widths = [high - low for low, high, _ in bounds if math.isfinite(high - low)]
    return Coverage(
        what,
        case,
        num_jobs,
        len(found),
        len(bounds),
        sum(low <= truth <= high for low, high, truth in bounds),
        sum(low > truth for low, _, truth in bounds),
        statistics.median(widths) if widths else None,
    )


_ALPHA: Final = 0.7
_NUM_PRODUCERS: Final = 6
#: Jobs that a producer sends in a row.
_IN_A_ROW: Final = 4


def acceptance_rows(num_jobs: int, num_runs: int, seed: int) -> Iterator[Coverage]:
    """The interval of α that status and the report show, by the correlation of a job's trials."""
    for correlation in (0.1, 0.3):
        for has_producers in (False, True):
            draws = np.random.default_rng([seed, num_jobs, round(100 * correlation), has_producers])
            drawn = [_jobs(draws, num_jobs, correlation, has_producers=has_producers) for _ in range(num_runs)]
            case = f"α .7, correlation {correlation:g}" + (", producers" if has_producers else "")
            shown = [(share_interval(consecutive_runs(jobs)), truth) for jobs, truth in drawn]
            yield coverage("α", case, num_jobs, (_shown(interval, truth) for interval, truth in shown))


def _jobs(
    draws: np.random.Generator, num_jobs: int, correlation: float, *, has_producers: bool
) -> tuple[list[Counts], float]:
    """Jobs in order, and the α that they are drawn around: that of all producers of the run, by their jobs."""
    mean = np.full(num_jobs, _ALPHA)
    if has_producers:
        of_producer = np.clip(draws.normal(_ALPHA, 0.1, _NUM_PRODUCERS), 0.3, 0.95)
        turns = draws.integers(_NUM_PRODUCERS, size=math.ceil(num_jobs / _IN_A_ROW))
        mean = of_producer[np.repeat(turns, _IN_A_ROW)[:num_jobs]]
    spread = 1 / correlation - 1
    alpha = draws.beta(mean * spread, (1 - mean) * spread)
    trials = np.clip(np.rint(draws.lognormal(math.log(60), 0.8, num_jobs)), 4, 600).astype(int)
    accepts = draws.binomial(trials, alpha)
    truth = float(of_producer.mean()) if has_producers else _ALPHA
    return list(zip(accepts.tolist(), trials.tolist(), strict=True)), truth


def _shown(interval: Interval | None, truth: float) -> Shown:
    """An interval over the whole range says nothing."""
    if interval is None or (interval.low, interval.high) == (0.0, 1.0):
        return Shown(None, None, truth)
    return Shown(interval.low, interval.high, truth)


Floats: TypeAlias = NDArray[np.float64]

_NUM_PROMPT_PRODUCERS: Final = 6
_MANY: Final = 400_000


def measure_rows(num_jobs: int, num_runs: int, seed: int) -> Iterator[tuple[Coverage, int]]:
    """Coverage of vanilla against vanilla and of 1.2x, and how often a bar of 1 shipped what is no faster."""
    for speedup in (1.0, 1.2):
        truth = _true_ratio(speedup)
        draws = np.random.default_rng([seed, num_jobs, round(10 * speedup)])
        found = [_bounds(draws, num_jobs, speedup) for _ in range(num_runs)]
        shipped = sum(judge(bounds, 1.0, 1).verdict is ShipVerdict.SHIP for bounds in found)
        case = f"{speedup:.1f}x, slow minutes, producers"
        yield (
            coverage("measure", case, num_jobs, (Shown(bounds.low, bounds.high, truth) for bounds in found)),
            shipped if truth <= 1 else 0,
        )


def _bounds(draws: np.random.Generator, num_jobs: int, speedup: float) -> RatioBounds:
    """A prompt a block. The host is slow for some prompts, in both arms alike but for the moment it changes."""
    tokens, ratios = _texts(draws, num_jobs, speedup)
    slow = np.where(draws.random(num_jobs) < 0.25, draws.uniform(1.5, 4.0, num_jobs), 1.0)
    noise = 0.04 * draws.standard_normal((2, num_jobs))
    changes = np.where(draws.random(num_jobs) < 0.03, draws.uniform(1.5, 3.0, num_jobs), 1.0)
    vanilla_s = 0.01 * tokens * slow * np.exp(noise[0])
    ours_s = 0.01 * tokens / ratios * slow * np.exp(noise[1])
    is_first = draws.random(num_jobs) < 0.5  # which arm ran first is drawn, as `measure` draws it
    vanilla_s, ours_s = vanilla_s * np.where(is_first, changes, 1.0), ours_s * np.where(is_first, 1.0, changes)
    return total_bounds(_blocks(tokens, ours_s), _blocks(tokens, vanilla_s))


def _blocks(tokens: Floats, wall_s: Floats) -> list[PromptBlock]:
    return [PromptBlock(int(num), float(one)) for num, one in zip(tokens, wall_s, strict=True)]


def _texts(draws: np.random.Generator, num: int, speedup: float) -> tuple[Floats, Floats]:
    """Tokens of each answer, and how many times faster it comes; prompts of a producer gain alike."""
    tokens = np.clip(np.rint(draws.lognormal(math.log(60), 0.6, num)), 8, 256)
    if speedup == 1.0:
        return tokens, np.ones(num)
    gain = np.linspace(-0.15, 0.15, _NUM_PROMPT_PRODUCERS)[draws.integers(_NUM_PROMPT_PRODUCERS, size=num)]
    return tokens, speedup * np.exp(gain + 0.15 * draws.standard_normal(num))


def _true_ratio(speedup: float) -> float:
    tokens, ratios = _texts(np.random.default_rng(0), _MANY, speedup)
    return float(tokens.sum() / (tokens / ratios).sum())


_SUBJECT: Final = SpeedupSubject(TASK, "greedy", "target", "engine", "host", "device", "draft", "r1")
_NOW: Final = datetime(2026, 1, 2, tzinfo=UTC)
_SLOW_MINUTES: Final = Host(slow_every_s=60)
#: A draft that is accepted more by some producers' texts than by others'.
_DRAFT: Final = Drafting(3, 0.7, 0.15, catch_up=(0.3, 0.05), producers=(0.55, 0.65, 0.7, 0.75, 0.85))
#: Control shares: the default, and one that shows a figure sooner.
SHARES: Final = (0.02, 0.2)


def speedup_scenarios() -> list[Scenario]:
    """Vanilla against vanilla, and a known 1.2x, on a host with slow minutes."""
    return [
        Scenario("1.0x, slow minutes", NOTHING, _SLOW_MINUTES),
        Scenario("1.2x, slow minutes, producers", with_speedup(_DRAFT, 1.2), _SLOW_MINUTES),
    ]


def play_speedup(scenario: Scenario, num_jobs: int, control_share: float, seed: int) -> tuple[Interval | None, Truth]:
    """Decode so many jobs; the last ones leave slots empty."""
    world = World(scenario, seed)
    schedule = RoundSchedule(RoundDesign(control_share), random.Random(seed))
    slices: list[Slice] = []
    num_begun = 0
    while num_begun < num_jobs or world.running:
        room = min(scenario.num_slots, len(world.running) + num_jobs - num_begun)
        num_prompts = world.admit(room) if num_begun < num_jobs else 0
        num_begun += num_prompts
        arm = schedule.next_round({TASK: world.treatment})[TASK]
        slices += schedule.observe(world.round(speculates=arm is not None, num_prompts=num_prompts))
    slices += schedule.close()
    if not any(one.phase is not Phase.CONTROL for one in slices):
        return None, world.truth
    return task_speedup(_SUBJECT, slices, _NOW).speedup, world.truth


def speedup_row(
    scenario: Scenario, num_jobs: int, control_share: float, runs: list[tuple[Interval | None, Truth]]
) -> Coverage:
    """The truth is that of all runs together, because a single run has texts of its own."""
    truth = Truth()
    for _, its in runs:
        truth.add(its)
    case = f"{scenario.name}, control {control_share:.0%}"
    return coverage("speed-up", case, num_jobs, (_shown(speedup, truth.speedup) for speedup, _ in runs))


NUM_JOBS: Final = (4, 8, 20, 100)
#: The speed-up needs more jobs: a block takes some 50 rounds, and control a small share of them.
NUM_JOBS_OF_SPEEDUP: Final = (*NUM_JOBS, 1000)


def main() -> None:
    """Run every case, print the table and the JSON line."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--most-jobs", type=int, default=max(NUM_JOBS_OF_SPEEDUP))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    console = Console(stderr=True, width=130)
    found: list[Coverage] = []
    num_shipped = 0
    for num_jobs in NUM_JOBS:
        found += acceptance_rows(num_jobs, options.runs, options.seed)
        for one, shipped in measure_rows(num_jobs, options.runs, options.seed):
            found.append(one)
            num_shipped += shipped
    seeds = range(options.seed, options.seed + options.runs)
    with Pool(options.processes) as pool:
        for num_jobs in (num for num in NUM_JOBS_OF_SPEEDUP if num <= options.most_jobs):
            for scenario in speedup_scenarios():
                for share in SHARES:
                    play = partial(play_speedup, scenario, num_jobs, share)
                    found.append(speedup_row(scenario, num_jobs, share, pool.map(play, seeds, chunksize=5)))
    console.print(_table(found))
    console.print(f"`measure` at a bar of 1 shipped what is no faster: {num_shipped} runs")
    print(json.dumps({"rows": [asdict(one) for one in found], "shipped_no_faster": num_shipped, "runs": options.runs}))


def _table(found: list[Coverage]) -> Table:
    table = table_of(
        "95 % intervals that hold the truth", "interval", "case", "jobs", "shown", "covered", "above the truth", "width"
    )
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
