"""The scores that were played: tables, and the JSON line."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from rich.console import Console
from rich.table import Table

from alphaloop.acceptance import Z95, Interval
from benchmarks.policy.compare import Score
from benchmarks.policy.scenario import Scenario
from benchmarks.reporting import table_of

#: Rule → score.
Seed: TypeAlias = dict[str, Score]
Scores: TypeAlias = Sequence[Seed]
#: The least goodput over the oracle's, less the stated budget, by kind of scenario; and the least of vanilla's.
BARS: Final = {"stationary": 0.98, "changing": 0.95}
BAR_OF_VANILLA: Final = 0.97


class Mean(Interval):
    """A mean over seeds with its 95 % bounds."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Normal bounds; those of one seed are the value itself."""
        mean = statistics.fmean(values)
        margin = Z95 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(mean, mean - margin, mean + margin)

    def __str__(self) -> str:
        return f"{self.mean:.3f}\n±{self.high - self.mean:.3f}"


def over_seeds(scores: Scores, rule: str, of: Callable[[Score], float]) -> Mean:
    """One figure of one rule, over the seeds that it played."""
    return Mean.of([of(seed[rule]) for seed in scores if rule in seed])


def is_static(rule: str) -> bool:
    """Whether a rule is one (drafter, k)."""
    return rule == "vanilla" or ":" in rule


def best_static(scores: Scores) -> str | None:
    """The best single setting of a scenario, with hindsight; None where none played."""
    static = [rule for rule in scores[0] if is_static(rule)]
    return max(static, key=lambda rule: over_seeds(scores, rule, lambda s: s.of_oracle).mean, default=None)


def meets_bars(scenario: Scenario, scores: Scores) -> bool:
    """Whether ours reaches the scenario's bar in the mean over seeds, and that of vanilla in every seed."""
    mean = over_seeds(scores, "ours", lambda s: s.of_oracle_net).mean
    return mean >= BARS[scenario.kind] and _least_of_vanilla(scores) >= BAR_OF_VANILLA


def _least_of_vanilla(scores: Scores) -> float:
    return min(seed["ours"].of_vanilla for seed in scores if "ours" in seed)


def cold_share(scores: Scores, rule: str) -> float | None:
    """Share of new tasks, over seeds, that were decided well in time; None where that is not judged."""
    judged = [cold for seed in scores if rule in seed and (cold := seed[rule].cold) is not None]
    return statistics.fmean(judged) if judged else None


def print_tables(console: Console, scenarios: Sequence[Scenario], scores: Mapping[str, Scores]) -> None:
    """Goodput over the oracle's, a row a scenario; then what ours spent and how steady it was."""
    rules = list(dict.fromkeys(r for of_it in scores.values() for r in of_it[0] if not is_static(r)))
    table = Table(title="Goodput over the clairvoyant oracle's, mean over seeds with 95 % bounds")
    table.add_column("scenario")
    for rule in [*(["ours,_net"] if "ours" in rules else []), *rules, "vanilla", "best static"]:
        table.add_column(rule.replace("_", "\n"), justify="right", no_wrap=True)
    for scenario in scenarios:
        found = scores[scenario.name]
        row = [str(over_seeds(found, "ours", lambda s: s.of_oracle_net))] if "ours" in rules else []
        row += [
            str(over_seeds(found, rule, lambda s: s.of_oracle)) if any(rule in seed for seed in found) else ""
            for rule in rules
        ]
        row.append(str(over_seeds(found, "vanilla", lambda s: s.of_oracle)) if "vanilla" in found[0] else "")
        best = best_static(found)
        row.append(f"{over_seeds(found, best, lambda s: s.of_oracle).mean:.3f}\n{best}" if best else "")
        table.add_row(scenario.name, *row)
    console.print(table)
    if "ours" in rules:
        _print_ours(console, scenarios, scores)
        print_measured(console, [s for s in scenarios if s.slots], scores)


def _print_ours(console: Console, scenarios: Sequence[Scenario], scores: Mapping[str, Scores]) -> None:
    table = table_of(
        "Ours: what it spent and how steady it was",
        "scenario",
        "seeds",
        "bar",
        "net of oracle",
        "of vanilla",
        "least of vanilla",
        "budget: tokens",
        "loss",
        "cold",
    )
    for scenario in scenarios:
        found = scores[scenario.name]
        cold = cold_share(found, "ours")
        table.add_row(
            scenario.name,
            str(sum("ours" in seed for seed in found)),
            f"{BARS[scenario.kind]:.2f}\n{'met' if meets_bars(scenario, found) else 'missed'}",
            str(over_seeds(found, "ours", lambda s: s.of_oracle_net)),
            str(over_seeds(found, "ours", lambda s: s.of_vanilla)),
            f"{_least_of_vanilla(found):.3f}",
            f"{over_seeds(found, 'ours', lambda s: s.budget_share).mean:.1%}",
            f"{over_seeds(found, 'ours', lambda s: s.budget_loss).mean:.1%}",
            "" if cold is None else f"{cold:.0%}",
        )
    console.print(table)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the switchback experiment of ours found beside the simulated truth, over seeds, tasks and buckets."""

    num_intervals: int
    num_covered: int  #: that hold the true speed-up
    mean_half_width: float | None  #: over the true speed-up
    mean_error: float | None  #: of the estimate, over the true speed-up
    most_jobs_until_back: int | None  #: of all seeds; None: the scenario has no hiccup

    @classmethod
    def of(cls, scores: Scores) -> Measured:
        """Over all seeds that ours played."""
        ours = [seed["ours"] for seed in scores if "ours" in seed]
        found = [one for score in ours for one in score.speedups]
        back = [score.jobs_until_back for score in ours if score.jobs_until_back is not None]
        return cls(
            len(found),
            sum(low <= true <= high for _, low, high, true in found),
            statistics.fmean((high - low) / 2 / true for _, low, high, true in found) if found else None,
            statistics.fmean(mean / true - 1 for mean, _, _, true in found) if found else None,
            max(back, default=None),
        )


def print_measured(console: Console, scenarios: Sequence[Scenario], scores: Mapping[str, Scores]) -> None:
    """The switchback experiment on scenarios with slots, and how long a drafter that was slow once stayed out."""
    if not scenarios:
        return
    table = table_of(
        "Ours on slots: the measured speed-up beside the simulated truth",
        "scenario",
        "intervals",
        "covered",
        "half-width",
        "error",
        "jobs until back (most)",
    )
    for scenario in scenarios:
        its = Measured.of(scores[scenario.name])
        table.add_row(
            scenario.name,
            str(its.num_intervals),
            f"{its.num_covered / its.num_intervals:.0%}" if its.num_intervals else "",
            "" if its.mean_half_width is None else f"{its.mean_half_width:.1%}",
            "" if its.mean_error is None else f"{its.mean_error:+.1%}",
            "" if its.most_jobs_until_back is None else str(its.most_jobs_until_back),
        )
    console.print(table)


def as_json(scenarios: Sequence[Scenario], scores: Mapping[str, Scores], seeds: Sequence[int]) -> dict[str, Any]:
    """Every rule's figures by scenario."""
    found: dict[str, Any] = {"seeds": len(seeds), "first_seed": seeds[0], "scenarios": {}}
    for scenario in scenarios:
        of_it = scores[scenario.name]
        rules = {}
        for rule in of_it[0]:
            ratio, net = (
                over_seeds(of_it, rule, lambda s: s.of_oracle),
                over_seeds(of_it, rule, lambda s: s.of_oracle_net),
            )
            rules[rule] = {
                "of_oracle": [round(x, 4) for x in (ratio.mean, ratio.low, ratio.high)],
                "of_oracle_net": [round(x, 4) for x in (net.mean, net.low, net.high)],
                "of_vanilla": round(over_seeds(of_it, rule, lambda s: s.of_vanilla).mean, 4),
                "budget_share": round(over_seeds(of_it, rule, lambda s: s.budget_share).mean, 4),
                "budget_loss": round(over_seeds(of_it, rule, lambda s: s.budget_loss).mean, 4),
                "cold": cold_share(of_it, rule),
            }
        found["scenarios"][scenario.name] = {"kind": scenario.kind, "seeds": len(of_it), "rules": rules}
        if "ours" in rules:
            found["scenarios"][scenario.name]["meets_bars"] = meets_bars(scenario, of_it)
        if scenario.slots:
            found["scenarios"][scenario.name]["measured"] = asdict(Measured.of(of_it))
    return found
