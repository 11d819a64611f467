"""What was played, kept in a file: a JSON line for every scenario and seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeAlias

from benchmarks.policy.compare import Score

#: Rule → score.
Seed: TypeAlias = dict[str, Score]
Scores: TypeAlias = Sequence[Seed]


def append(path: Path, scenario: str, seed: int, scores: Seed) -> None:
    """One line more."""
    line = {"scenario": scenario, "seed": seed, "scores": {rule: asdict(score) for rule, score in scores.items()}}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_scores(path: Path) -> dict[tuple[str, int], Seed]:
    """All lines; of the same seed and rule the later one counts. A last line that was cut short is left out."""
    found: dict[tuple[str, int], Seed] = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            read = json.loads(line)
            of_seed = found.setdefault((read["scenario"], read["seed"]), {})
            for rule, score in read["scores"].items():
                speedups = tuple(map(tuple, score.get("speedups", ())))
                of_seed[rule] = Score(**{**score, "regret": tuple(score["regret"]), "speedups": speedups})
    return found
