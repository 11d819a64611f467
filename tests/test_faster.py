"""`faster` is said of what was measured to be faster, on no screen and on no page beside a figure that is slower."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from alphaloop.acceptance import Interval
from alphaloop.as_decoded import NextJob
from alphaloop.cli.status import task_table
from alphaloop.deciding.decision import Decision, Reason
from alphaloop.deciding.goodput import Alternative
from alphaloop.experiment.estimate import Verdict
from alphaloop.experiment.figures import TaskSpeedup
from alphaloop.experiment.wording import figure, judged, own_of, sentence, why
from alphaloop.explaining.explanation import Explanation
from alphaloop.explaining.wording import opening
from alphaloop.messages import Mode
from alphaloop.store.task_figures import TaskFigures
from scheduler.report.data import DriftReport, MeasuredLine, TaskLine
from scheduler.report.pages import render_page, render_text
from tests.fixtures.reports import AT, empty, task_line
from tests.fixtures.runs import TARGET, task_speedup

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: The word where it does not say that something is faster.
_OTHERWISE = re.compile(r"(expected|not|not surely|how (many times|much)|no) faster|faster than", re.IGNORECASE)
_BOUNDS = re.compile(r"\d\.\d\d ?\[(\d\.\d\d) (\d\.\d\d)\]")

#: Around 1, where verdicts change, and wide enough for all of them.
_ratios = st.floats(0.3, 3.0)


@st.composite
def speedups(draw: st.DrawFn) -> TaskSpeedup | None:
    """What was measured of a drafter, if anything, with the verdict that its interval has."""
    if draw(st.booleans()):
        return None
    low, mean, high = sorted(draw(st.tuples(_ratios, _ratios, _ratios)))
    bounds = Interval(mean, low, high) if draw(st.booleans()) else None
    return task_speedup(bounds, AT, drafter=draw(st.sampled_from(("lookup", "small"))))


def says_faster(text: str) -> bool:
    return bool(re.search(r"\bfaster\b", _OTHERWISE.sub("", " ".join(text.split()))))


def rendered(what: Any) -> str:
    screen = Console(file=io.StringIO(), width=200)
    screen.print(what)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def of_report(reason: str, measured: TaskSpeedup | None) -> DriftReport:
    line = task_line("code").model_copy(
        update={
            "reason": reason,
            "explanation": "",
            "alpha_1": None,  # without a plot, which takes a tenth of a second
            "alpha": None,
            "measured": MeasuredLine.model_validate(measured) if measured else None,
        }
    )
    return empty().model_copy(update={"tasks": (line,)})


@settings(max_examples=50)
@given(reason=st.sampled_from(list(Reason)), measured=speedups())
def test_every_table_says_faster_of_what_was_measured_faster(reason: Reason, measured: TaskSpeedup | None) -> None:
    coming = judged(NextJob("speculative", "lookup", 8, reason, "", 4, "greedy"), measured)
    now = TaskFigures("code", next_job=coming, measured=measured)
    report = of_report(coming.reason, measured)
    (cell,) = re.findall(r'<td class="why" data-label="Next job">(.*?)</td>', render_page(report), re.DOTALL)
    said = {
        "status": rendered(task_table([now], None)),
        "report": render_text(report).split("\nNext job,")[1].split("\n\n")[0],
        "report, page": cell,
    }
    is_faster = measured is not None and measured.drafter == "lookup" and measured.verdict is Verdict.FASTER
    for screen, words in said.items():
        assert says_faster(words) is (is_faster and reason is Reason.FASTER), f"{screen}: {words}"
    # What machines read is what every screen says of it.
    assert now.as_json(None)["next_job"]["reason"] == report.tasks[0].reason == coming.reason
    assert all(" ".join(why(coming).split()) in " ".join(its.split()) for its in said.values())


@pytest.mark.parametrize("revisions", [("another-target", "draft-1"), (TARGET, "another-draft")])
def test_what_was_measured_of_another_revision_makes_no_next_job_faster(revisions: tuple[str, str]) -> None:
    measured = task_speedup(Interval(1.6, 1.5, 1.7), AT)
    coming = NextJob("speculative", "lookup", 8, "faster", "", 4, "greedy")
    for own in (coming, replace(coming, revisions=measured.revisions)):
        assert judged(own, measured).reason == "faster"
    other = judged(replace(coming, revisions=revisions), measured)
    assert (other.reason, why(other)) == ("expected_faster", "expected faster")
    seen: dict[str, Any] = {"num_speculative_jobs": 0, "alpha_num_draft_tokens": ()}
    line = TaskLine.of(TaskFigures("code"), other, **seen, next_revisions=revisions, measured=measured)
    assert "expected faster" in render_text(empty().model_copy(update={"tasks": (line,)}))
    assert "expected faster" in rendered(task_table([TaskFigures("code", next_job=other, measured=measured)], None))


@given(measured=speedups())
def test_a_sentence_has_the_verdict_of_its_own_figures(measured: TaskSpeedup | None) -> None:
    told = sentence("lookup", measured) if measured else figure(measured)
    bounds = measured.speedup if measured else None
    assert not says_faster(told) or (bounds is not None and bounds.low > 1)
    assert "slower" not in told or (bounds is not None and bounds.high < 1)


@given(measured=speedups(), low=_ratios)
def test_explain_opens_without_a_gain_that_was_not_measured(measured: TaskSpeedup | None, low: float) -> None:
    way = Alternative("lookup", 8, 2.0, 40.0, 1.2 * low, low, 1.5 * low)
    decision = Decision(Mode.SPECULATIVE, "lookup", "r", 8, Reason.FASTER, "", (way,))
    parts = {
        "decision": decision,
        "request": SimpleNamespace(task="code", is_now=True),
        "recorded": None,
        "own_speedup": own_of(NextJob("speculative", "lookup", 8, "faster", ""), measured),
    }
    _, brought = opening(cast(Explanation, SimpleNamespace(**parts)))
    assert not says_faster(brought)
    is_own = measured is not None and measured.drafter == "lookup" and measured.speedup is not None
    assert ("Measured" in brought) is is_own
    if is_own and measured is not None:
        assert ("no verdict yet" in brought) is (measured.verdict is Verdict.NO_VERDICT_YET)
        assert ("slower" in brought) is (measured.verdict is Verdict.SLOWER)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_a_page_says_faster_beside_bounds_that_are_not_above_one(page: Path) -> None:
    for line in page.read_text(encoding="utf-8").splitlines():
        for low, _ in _BOUNDS.findall(line):
            assert float(low) > 1 or not says_faster(line), line
