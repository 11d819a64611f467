"""Ours, its peers and an oracle on simulated streams whose acceptance is known.

    python -m benchmarks.policy                                      # everything, 200 seeds, plots
    python -m benchmarks.policy --scenario steady_mix --seeds 10 --rule ours --rule vanilla

Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.policy.compare import Score, compare, rule_names
from benchmarks.policy.oracle import Oracle, know
from benchmarks.policy.report import as_json, print_tables
from benchmarks.policy.scenario import FILE, Device, Scenario, read_scenarios

#: A scenario with its oracle; worker processes inherit it.
_KNOWN: dict[str, tuple[Scenario, Device, Oracle]] = {}


def main() -> None:
    """Play, print tables, write plots, print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--scenario", action="append", help="only these")
    parser.add_argument("--rule", action="append", help="only these (ours, vanilla, lookup:4 …)")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    console = Console(stderr=True)
    read = read_scenarios(options.file)
    scenarios = [read.named(name) for name in options.scenario] if options.scenario else list(read.scenarios)
    for scenario in scenarios:
        device = read.devices[scenario.device]
        _KNOWN[scenario.name] = (scenario, device, know(scenario, device))
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    work = [(scenario.name, seed, tuple(options.rule or ())) for scenario in scenarios for seed in seeds]
    scores: dict[str, list[Mapping[str, Score]]] = {scenario.name: [] for scenario in scenarios}
    with Progress(console=console) as progress, get_context("fork").Pool(options.processes) as pool:
        bar = progress.add_task("seeds", total=len(work))
        # In order, so that rules are paired by seed.
        for name, found in pool.imap(_compare, work, chunksize=1):
            scores[name].append(found)
            progress.advance(bar)
    print_tables(console, scenarios, scores)
    print(json.dumps(as_json(scenarios, scores, seeds)))


def _compare(work: tuple[str, int, tuple[str, ...]]) -> tuple[str, Mapping[str, Score]]:
    name, seed, rules = work
    scenario, device, oracle = _KNOWN[name]
    names = [rule for rule in rule_names(scenario) if not rules or rule in rules]
    return name, compare(scenario, device, oracle, seed, names)


if __name__ == "__main__":
    main()
