"""From observations to the report: figures, verdicts, reasons, and which candidate to ship. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from alphaloop.payoff.bounds import total_bounds
from alphaloop.payoff.figures import VANILLA, Candidate, Exactness
from alphaloop.payoff.report import Footprint, Report, Row, Setup
from alphaloop.payoff.rounds import costs_of
from alphaloop.payoff.verdict import Verdict, judge
from worker.measuring.evidence import Evidence, GreedySample, HeldOut
from worker.measuring.figures import figures_of
from worker.measuring.observations import Measured
from worker.measuring.reasons import hidden, reasons


@dataclass(frozen=True, slots=True)
class Records:
    """What is known of the drafters beside what was measured, by name."""

    findings: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    held_out: Mapping[str, HeldOut] = field(default_factory=dict)


def report_of(
    setup: Setup,
    measured: Measured,
    exactness: Mapping[Candidate, Exactness],
    greedy: Mapping[str, GreedySample],
    records: Records,
    footprint: Footprint,
    notes: Sequence[str],
    num_turns_planned: int,
) -> Report:
    """Judge every candidate. `greedy` holds, by drafter, a greedy sample at its best k.

    There must be a finished turn.
    """
    candidates = [candidate for candidate in measured.candidates if candidate != VANILLA]
    vanilla = figures_of(measured, VANILLA, Exactness(), 1)
    found = [figures_of(measured, c, exactness.get(c, Exactness()), len(candidates)) for c in candidates]
    rows = []
    for own in found:
        judgement = judge(own.ratio, setup.bar, len(candidates), is_exact=own.exactness.is_exact)
        costs = costs_of(vanilla, own)
        name = own.candidate.drafter or ""
        siblings = [other for other in found if other.candidate.drafter == name and other is not own]
        is_best = all(other.ratio.estimate <= own.ratio.estimate for other in siblings)
        evidence = Evidence(
            own,
            vanilla,
            setup.bar,
            costs,
            siblings,
            setup.batch,
            setup.temperature,
            greedy.get(name) if is_best else None,
            records.findings.get(name, ()),
            records.held_out.get(name),
        )
        why = hidden(evidence) if judgement.verdict is Verdict.SHIP else reasons(evidence)
        rows.append(Row(own, judgement, costs, tuple(why)))
    shipped = max(
        (row for row in rows if row.judgement.verdict is Verdict.SHIP),
        key=lambda row: row.figures.ratio.estimate,
        default=None,
    )
    return Report(
        setup,
        len(measured.turns),
        num_turns_planned,
        vanilla,
        tuple(rows),
        footprint,
        tuple(notes),
        shipped,
        _rivals(shipped, rows),
        measured.is_interrupted,
    )


def _rivals(shipped: Row | None, rows: Sequence[Row]) -> tuple[Candidate, ...]:
    """Those whose ratio to the chosen one, of all tokens, has 1 between its bounds."""
    if shipped is None:
        return ()
    others = [row for row in rows if row.judgement.verdict is Verdict.SHIP and row is not shipped]
    found = []
    for row in others:
        bounds = total_bounds(shipped.figures.blocks, row.figures.blocks, len(others))
        if bounds.known is None or bounds.known[0] <= 1 <= bounds.known[1]:
            found.append(row.candidate)
    return tuple(found)
