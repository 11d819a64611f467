"""How often expected intervals hold the speed-up that comes: `python -m benchmarks.truth.expectations`.

The simulated policy on slots (benchmarks/policy) decides with its own evidence and costs, measures the speed-up by
switchback slices, and compares. Each seed is played twice: without feedback, and with expectations corrected by earlier
pairs. Last line: JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Final

from rich.console import Console
from rich.table import Table

from alphaloop.experiment.assign import RoundDesign
from alphaloop.experiment.figures import ExpectationPair
from benchmarks.policy.ours_on_slots import OursOnSlots
from benchmarks.policy.scenario import read_scenarios
from benchmarks.policy.slots import SlotTable, draw_slot_stream, play_slots
from benchmarks.reporting import parser_of, table_of

#: More than a worker's default, so that a short stream has enough blocks.
CONTROL_SHARE: Final = 0.15


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario, with or without feedback, over all seeds."""

    scenario: str
    learns: bool
    num_pairs: int
    held_measured: float | None  #: share of the pairs whose interval holds the measured speed-up
    held_truth: float | None  #: the same of the true speed-up of these rounds
    ratio: float | None  #: true over expected, geometric mean
    half_width: float | None  #: median of ln(high / low) / 2
    tokens_per_s: float  #: goodput of the whole stream


def main() -> None:
    """Play, print the table and the JSON line."""
    parser = parser_of(__doc__)
    parser.add_argument("--scenarios", nargs="+", default=["slow_host", "slow_draft", "bursts", "jobs_alike_inside"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1200)
    options = parser.parse_args()
    console, rows = Console(stderr=True, width=130), []
    for name in options.scenarios:
        for learns in (False, True):
            seeds = range(options.first_seed, options.first_seed + options.seeds)
            rows.append(_row(name, [_play(name, seed, options.jobs, learns=learns) for seed in seeds], learns=learns))
            console.print(rows[-1])
    console.print(_table(rows))
    print(json.dumps({"rows": [asdict(row) for row in rows], "seeds": options.seeds, "jobs": options.jobs}))


def _play(name: str, seed: int, num_jobs: int, *, learns: bool) -> tuple[list[tuple[ExpectationPair, float]], float]:
    """The pairs with the true speed-ups of their rounds, and tokens a second of the stream."""
    read = read_scenarios()
    found = read.named(name)
    scenario = found.model_copy(update={"phases": (found.phases[0].model_copy(update={"jobs": num_jobs}),)})
    if scenario.slots is None:
        raise SystemExit(f"{name} has no slots")
    device = read.devices[scenario.device]
    stream = draw_slot_stream(scenario, device, seed)
    rule = OursOnSlots(
        scenario,
        device.points(scenario.inferred),
        seed,
        design=RoundDesign(CONTROL_SHARE),
        learns=learns,
    )
    trace = play_slots(
        stream, SlotTable(device, scenario.slots.num_slots, scenario.draft_tokens), rule, is_control=rule.is_control
    )
    return rule.measured.pairs, 1000 * sum(job.needed for job in stream.jobs) / trace.ms


def _row(name: str, played: Sequence[tuple[list[tuple[ExpectationPair, float]], float]], *, learns: bool) -> Row:
    pairs = [one for found, _ in played for one in found]
    held = [pair.expected.low <= truth <= pair.expected.high for pair, truth in pairs]
    return Row(
        name,
        learns,
        len(pairs),
        _mean(float(pair.is_held) for pair, _ in pairs),
        _mean(map(float, held)),
        math.exp(fmean(math.log(truth / pair.expected.mean) for pair, truth in pairs)) if pairs else None,
        median(math.log(pair.expected.high / pair.expected.low) / 2 for pair, _ in pairs) if pairs else None,
        fmean(speed for _, speed in played),
    )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def _table(rows: Sequence[Row]) -> Table:
    table = table_of(
        "expected 95 % intervals",
        "scenario",
        "feedback",
        "pairs",
        "hold measured",
        "hold truth",
        "true/expected",
        "± ln",
        "tokens/s",
    )
    for row in rows:
        figures = (_percent(row.held_measured), _percent(row.held_truth), _shown(row.ratio), _shown(row.half_width))
        table.add_row(
            row.scenario, "yes" if row.learns else "no", str(row.num_pairs), *figures, f"{row.tokens_per_s:.1f}"
        )
    return table


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
