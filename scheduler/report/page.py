"""The report as one self-contained page: no script, nothing fetched, everything from outside escaped."""

from __future__ import annotations

from markupsafe import Markup

from alphaloop.switchback.wording import control, figure, load, reason_word
from scheduler.report.alpha_plot import alpha_plot
from scheduler.report.changes import told_changes
from scheduler.report.data import Report
from scheduler.report.history_plot import history_plot
from scheduler.report.templates import template
from scheduler.report.wording import costs, freshness, how, words


def render_page(report: Report) -> str:
    """The report as HTML."""
    plots = {"alpha": alpha_plot(report.tasks), "history": history_plot(report.history)}
    return template("page.html.j2").render(
        report=report,
        # Safe: this SVG is ours, its texts are paths and its label is escaped.
        plots={name: Markup(svg) if svg else None for name, svg in plots.items()},  # noqa: S704
        how=how,
        figure=figure,
        load=load,
        control=control,
        reason_word=reason_word,
        words=words,
        costs=costs,
        told_changes=told_changes,
        freshness=freshness,
    )
