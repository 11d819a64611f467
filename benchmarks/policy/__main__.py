"""Ours, its peers and an oracle on simulated streams whose acceptance is known.

    python -m benchmarks.policy --plots docs/concepts                # everything: about two hours on two cores
    python -m benchmarks.policy --scenario steady_mix --seeds 10 --rule ours --rule vanilla

Ctrl-C or SIGTERM ends it early; tables, picture and JSON are then of the seeds that were played. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.policy.compare import compare, rule_names
from benchmarks.policy.compare_slots import compare_on_slots, slot_rule_names
from benchmarks.policy.play import Oracle, know
from benchmarks.policy.plots import write_plot
from benchmarks.policy.report import Seed, as_json, print_tables
from benchmarks.policy.scenario import FILE, Device, Scenario, read_scenarios
from benchmarks.policy.slot_oracle import Known, know_slots
from benchmarks.reporting import parser_of

#: A scenario with its oracle; worker processes inherit it.
_KNOWN: dict[str, tuple[Scenario, Device, Oracle | Known]] = {}
_Work = tuple[str, int, tuple[str, ...]]


def main() -> None:
    """Play, print tables, write plots, print the JSON line."""
    parser = parser_of(__doc__)
    parser.add_argument("--file", type=Path, default=FILE, help="scenarios")
    parser.add_argument("--scenario", action="append", help="only these")
    parser.add_argument("--rule", action="append", help="only these (ours, vanilla, lookup:4 …)")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plots", type=Path, help="folder for the picture")
    options = parser.parse_args()
    console = Console(stderr=True)
    console.width = max(console.width, 118)
    read = read_scenarios(options.file)
    scenarios = [read.named(name) for name in options.scenario] if options.scenario else list(read.scenarios)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    kept: dict[tuple[str, int], Seed] = {}
    work = []
    for scenario in scenarios:
        names = [name for name in names_of(scenario) if not options.rule or name in options.rule]
        for seed in seeds:
            work.append((scenario.name, seed, tuple(names)))
    # Seed by seed, so that what is there after an interruption is of all scenarios.
    work.sort(key=lambda one: one[1])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name, seed, found in _play(
            console, work, {s.name: (s, read.devices[s.device]) for s in scenarios}, options
        ):
            kept[name, seed] = found
    except KeyboardInterrupt:
        console.print("interrupted: what follows is of the seeds that were played")
    scores = played(scenarios, seeds, kept)
    shown = [scenario for scenario in scenarios if scores[scenario.name]]
    print_tables(console, shown, scores)
    if options.plots and shown:
        console.print(f"written: {write_plot(options.plots, shown, scores)}")
    print(json.dumps(as_json(shown, scores, seeds)))


def played(
    scenarios: Sequence[Scenario], seeds: Sequence[int], kept: Mapping[tuple[str, int], Seed]
) -> dict[str, list[Seed]]:
    """By scenario, in the order of the seeds, those that some rule played."""
    return {s.name: [found for seed in seeds if (found := kept.get((s.name, seed)))] for s in scenarios}


def names_of(scenario: Scenario) -> list[str]:
    """Every rule that plays in the scenario."""
    return rule_names(scenario) if scenario.slots is None else slot_rule_names(scenario)


def _play(
    console: Console, work: list[_Work], scenarios: dict[str, tuple[Scenario, Device]], options: argparse.Namespace
) -> Iterator[tuple[str, int, Seed]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("what is best", total=len({name for name, _, _ in work}))
        for name in dict.fromkeys(name for name, _, _ in work):
            scenario, device = scenarios[name]
            known = know(scenario, device) if scenario.slots is None else know_slots(scenario, device)
            _KNOWN[name] = scenario, device, known
            progress.advance(bar)
        bar = progress.add_task("seeds", total=len(work))
        with get_context("fork").Pool(options.processes, _ignore_interrupts) as pool:
            for name, seed, scores in pool.imap_unordered(_compare, work):
                progress.advance(bar)
                yield name, seed, scores


def _ignore_interrupts() -> None:
    """In a process of the pool: the parent ends the pool, so that one message is shown and not one a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _compare(work: _Work) -> tuple[str, int, Seed]:
    name, seed, rules = work
    scenario, device, known = _KNOWN[name]
    if isinstance(known, Known):
        return name, seed, compare_on_slots(scenario, device, known, seed, rules)
    return name, seed, compare(scenario, device, known, seed, rules)


if __name__ == "__main__":
    main()
