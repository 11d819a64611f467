"""The evidence of an explanation on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from alphaloop.cli.screen import out, paragraph, table
from alphaloop.deciding.goodput import DrafterState
from alphaloop.explaining.explanation import Evidence, Explanation
from alphaloop.wording import share, share_with_interval

#: Past this many drafters, columns of α would not fit.
_DRAFTERS_ABREAST: Final = 2


def show_evidence(found: Explanation) -> None:
    """What was counted of each drafter, in sentences, then acceptance by position, side by side."""
    if not found.drafters:
        paragraph("No drafter has been registered for this target.")
        return
    for drafter in found.drafters:
        paragraph(_seen(drafter, found.evidence[drafter.name]) + _counted_beside(drafter, found.drafters))
    if found.request.segment and found.request.segment not in found.segments:
        known = ", ".join(sorted(name for name in found.segments if name)) or "none"
        paragraph(f"No job of segment {found.request.segment} was seen; known: {known}.")
    for begin in range(0, len(found.drafters), _DRAFTERS_ABREAST):
        _show_positions([(d.name, found.evidence[d.name]) for d in found.drafters[begin : begin + _DRAFTERS_ABREAST]])


def _seen(drafter: DrafterState, its: Evidence) -> str:
    posterior = its.posterior
    stale = " Flagged stale." if drafter.is_stale else ""
    if its.seen.jobs <= 0:
        return f"{drafter.name}: no job of this task yet.{_sources(its)}{stale}"
    sentences = (
        f"{drafter.name}: {its.seen.jobs:.0f} jobs and probes, weighted by age, that it decoded or was scored on, "
        f"{its.jobs_alike:.0f} of them like these, "
        f"{its.seen.rounds:.0f} rounds, {its.seen.offered / max(its.seen.rounds, 1e-9):.0%} with a proposal."
        f"{_sources(its)}"
    )
    if posterior.design_effect > 1.05:
        sentences += (
            f" Design effect {posterior.design_effect:.1f}: jobs differ, so the variance is larger by this factor."
        )
    if posterior.kept < 0.99:
        sentences += f" Recent jobs contradict older ones, whose weight is reduced to {posterior.kept:.0%}."
    if its.is_split:
        sentences += " Segments differ beyond chance and are decided separately."
    return sentences + stale


def _sources(its: Evidence) -> str:
    borrowed = its.borrowed
    if borrowed is None:
        return ""
    of_task = (
        f"{borrowed.same_jobs:.0%} jobs like these, {borrowed.same_task:.0%} other jobs of the task, "
        if its.seen.jobs > 0
        else ""
    )
    return f" Sources of α₁: {of_task}{borrowed.other_tasks:.0%} other tasks, {borrowed.assumed:.0%} prior."


def _counted_beside(drafter: DrafterState, drafters: Sequence[DrafterState]) -> str:
    shared_weights = [other.name for other in drafters if other.shares_weights_with(drafter)]
    return (
        f" Rounds of {' and '.join(shared_weights)} count for {drafter.name} too, because the weights are the same."
        if shared_weights
        else ""
    )


def _show_positions(abreast: Sequence[tuple[str, Evidence]]) -> None:
    names = [column for name, _ in abreast for column in (f"{name} expected α", "tested", "reach")]
    shown_table = table("position", *names, right=["position", "tested", "reach"])
    rows: list[tuple[int, list[str]]] = []
    for i in range(max(len(its.acceptance) for _, its in abreast)):
        cells = [cell for _, its in abreast for cell in _position(its, i)]
        if not rows or rows[-1][1] != cells:
            rows.append((i, cells))
    ends = [first for first, _ in rows[1:]] + [max(len(its.acceptance) for _, its in abreast)]
    for (first, cells), end in zip(rows, ends, strict=True):
        shown_table.add_row(str(end) if end == first + 1 else f"{first + 1}–{end}", *cells)
    out().print(shown_table)


def _position(its: Evidence, i: int) -> tuple[str, str, str]:
    if i >= len(its.acceptance):
        return "", "", ""
    tested = its.seen.trials[i] if i < len(its.seen.trials) else 0.0
    return share_with_interval(its.acceptance[i]), f"{tested:.0f}", share(its.posterior.reach[i])
