"""The report as one self-contained page: no script, nothing fetched, everything from outside escaped."""

from __future__ import annotations

from markupsafe import Markup

from alphaloop.as_decoded import at_load, drafted_by_load, percent, setting
from alphaloop.pages.templates import environment
from alphaloop.switchback.wording import computed, control, figure, load, ratio, why
from alphaloop.wording import counted_apart, words
from scheduler.report.alpha_plot import alpha_plot
from scheduler.report.changes import told_changes
from scheduler.report.data import Report
from scheduler.report.expectation_plot import expectation_plot
from scheduler.report.history_plot import history_plot
from scheduler.report.wording import (
    cost_of_all,
    cost_saved,
    costs,
    freshness,
    gap_lines,
    money,
    probe_spend,
    saved,
)


def render_page(report: Report) -> str:
    """The report as HTML."""
    plots = {
        "alpha": alpha_plot(report.tasks),
        "history": history_plot(report.history),
        "expectations": expectation_plot(report.expectations),
    }
    page = environment("scheduler.report").get_template("page.html.j2")
    return page.render(
        report=report,
        # Safe: this SVG is ours, its texts are paths and its label is escaped.
        plots={name: Markup(svg) if svg else None for name, svg in plots.items()},  # noqa: S704
        at_load=at_load,
        drafted_by_load=drafted_by_load,
        percent=percent,
        setting=setting,
        figure=figure,
        load=load,
        control=control,
        computed=computed,
        counted_apart=counted_apart,
        ratio=ratio,
        why=why,
        words=words,
        costs=costs,
        told_changes=told_changes,
        freshness=freshness,
        saved=saved,
        money=money,
        cost_saved=cost_saved,
        cost_of_all=cost_of_all,
        probe_spend=probe_spend,
        gap_lines=gap_lines,
    )
