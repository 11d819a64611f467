"""How often the cause is named rightly: `python -m benchmarks.cause`. A confusion table; the last line is JSON.

Right means that the causes found are exactly the true ones. "Too little evidence" is right only where the scenario says
that nobody could know better. Seeds are fixed: the name of the kind and a number.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from typing import Final

from benchmarks.cause.histories import KINDS, Scenario, scenarios
from benchmarks.reporting import console, parser_of, table_of
from scheduler.causes import Cause, explain

_NOTHING: Final = "none"
WITH_CAUSE: Final = [kind for kind, (expected, _) in KINDS.items() if expected]
WITHOUT: Final = [kind for kind, (expected, _) in KINDS.items() if not expected]


def main() -> None:
    """Draw, name, count."""
    options = _options()
    drawn = scenarios(WITH_CAUSE, -(-options.scenarios // len(WITH_CAUSE)), options.first)[: options.scenarios]
    caused = outcomes(drawn)
    quiet = outcomes(scenarios(WITHOUT, options.quiet // len(WITHOUT), options.first))
    show(caused)
    num_right = sum(number for (_, expected, found), number in caused.items() if expected == found)
    num_false = sum(number for (_, expected, found), number in quiet.items() if expected != found)
    for (kind, expected, found), number in sorted((caused + quiet).items()):
        if expected != found:
            console.print(f"{kind}: {expected} called {found} ({number})", highlight=False)
    total = caused.total()
    print(
        json.dumps(
            {
                "first_seed": options.first,
                "num_scenarios": total,
                "num_right": num_right,
                "share_right": round(num_right / total, 4),
                "by_cause": by_cause(caused),
                "num_quiet": quiet.total(),
                "num_false_findings": num_false,
            }
        )
    )


Outcome = tuple[str, str, str]


def outcomes(drawn: Iterable[Scenario]) -> Counter[Outcome]:
    """How many scenarios by (kind, true causes, causes found)."""
    counted: Counter[Outcome] = Counter()
    for scenario in drawn:
        findings = explain(scenario.evidence)
        counted[scenario.kind, label(scenario.expected), label(f.cause for f in findings)] += 1
    return counted


def by_cause(counted: Counter[Outcome]) -> dict[str, dict[str, int]]:
    """How many of each true cause were right."""
    found: dict[str, dict[str, int]] = {}
    for (_, expected, named), number in counted.items():
        row = found.setdefault(expected, {"num": 0, "num_right": 0})
        row["num"] += number
        row["num_right"] += number if named == expected else 0
    return found


def label(causes: Iterable[Cause]) -> str:
    """Causes as one word."""
    return "+".join(sorted(causes)) or _NOTHING


def show(counted: Counter[Outcome]) -> None:
    """The confusion table, on standard error."""
    rows = sorted({expected for _, expected, _ in counted})
    columns = sorted({found for _, _, found in counted} | set(rows))
    headings = (column.replace("_", " ").replace("+", " + ") for column in columns)
    table = table_of("true cause (rows) and cause named (columns)", "", *headings)
    for row in rows:
        cells = (sum(n for (_, e, f), n in counted.items() if (e, f) == (row, column)) for column in columns)
        table.add_row(row.replace("_", " ").replace("+", " + "), *(str(cell or "") for cell in cells))
    console.print(table)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--scenarios", type=int, default=500, help="histories with a cause")
    parser.add_argument("--quiet", type=int, default=100, help="histories in which nothing is wrong")
    parser.add_argument(
        "--first", type=int, default=3000, help="number of the first seed; those below 2017 were looked at"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
