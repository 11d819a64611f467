"""The report for machines: figures, and every paired ratio behind them. No prompts and no texts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from alphaloop.acceptance import Interval
from alphaloop.payoff.figures import Figures
from alphaloop.payoff.report import Report, Row


def as_json(report: Report) -> dict[str, Any]:
    """Times in seconds, sizes in bytes, counts as they were counted."""
    return {
        "setup": asdict(report.setup),
        "num_batches": report.num_turns,
        "num_batches_planned": report.num_turns_planned,
        "is_interrupted": report.is_interrupted,
        "vanilla": _figures(report.vanilla),
        "candidates": [_row(row) for row in report.rows],
        "ship": None if report.shipped is None else report.shipped.candidate.name,
        "not_told_apart": [candidate.name for candidate in report.rivals],
        "memory": asdict(report.footprint),
        "notes": list(report.notes),
    }


def _row(row: Row) -> dict[str, Any]:
    judgement = row.judgement
    return {
        **_figures(row.figures),
        "drafter": row.candidate.drafter,
        "draft_revision": row.candidate.draft_revision,
        "num_draft_tokens": row.candidate.num_draft_tokens,
        "verdict": judgement.verdict.value,
        "num_more_batches": judgement.num_more,
        "ratio": asdict(row.figures.ratio),
        "median_ratio": asdict(row.figures.median),
        "ratios": list(row.figures.ratios),
        "exactness": asdict(row.figures.exactness),
        "costs_in_vanilla_rounds": None if row.costs is None else asdict(row.costs),
        "reasons": [{"name": name, "sentence": sentence} for name, sentence in row.reasons],
    }


def _figures(figures: Figures) -> dict[str, Any]:
    seen = figures.acceptance
    counts = seen.counts
    return {
        "name": figures.candidate.name,
        "tokens_per_s": figures.tokens_per_s,
        "time_to_first_token_s": asdict(figures.first_token_s),
        "time_per_token_s": None if figures.token_s is None else asdict(figures.token_s),
        "response_s": asdict(figures.response_s),
        "output_tokens_median": figures.output_tokens,
        "num_texts": seen.num_texts,
        "counts": asdict(counts),
        "tokens_per_round": seen.tokens_per_round,
        "proposed_per_round": seen.proposed_per_round,
        "alpha": _interval(seen.alpha),
        "alpha_by_position": [_interval(seen.alpha_at(i)) for i in range(1, len(counts.trials) + 1)],
        "times": asdict(figures.times),
    }


def _interval(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else asdict(interval)
