"""Tables and progress fit a terminal, and no foreign text acts on it."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text
from typer.testing import CliRunner

from alphaloop.acceptance import Interval
from alphaloop.as_decoded import AtLoad, Decoded, NextJob
from alphaloop.cli.app import app, commands
from alphaloop.cli.children import EVERY_S, ProgressLines
from alphaloop.cli.screen import _console, progress, table
from alphaloop.cli.status import task_table
from alphaloop.store.task_figures import TaskFigures
from alphaloop.wording import harmless, json_text, one_line
from scheduler.report.pages import render_text
from tests.fixtures.reports import AT, empty, full
from tests.fixtures.runs import task_speedup

WIDTH = 80
LONG = "summarization_of_very_long_documents_in_the_legal_department.v2"


def rendered(what: Any) -> list[str]:
    screen = _console(file := io.StringIO())
    screen.width = WIDTH
    screen.print(what)
    return file.getvalue().splitlines()


def assert_fits(lines: list[str], *whole: str) -> None:
    """No line is too long, and these words stand on one line each."""
    assert max(map(cell_len, lines)) <= WIDTH, max(lines, key=cell_len)
    for text in whole:
        for word in text.split():
            assert any(re.search(rf"(^|\s){re.escape(word)}(\s|$)", one) for one in lines), (word, lines)


@pytest.mark.parametrize("task", ["code", LONG])
def test_the_status_table_fits_in_few_lines(task: str) -> None:
    loads = (AtLoad(1, 2, 9000, 8600), AtLoad(5, 8, 12_000, 3))
    now = TaskFigures(
        task,
        jobs={"succeeded": 123_456, "failed": 12, "running": 240},
        probes={"succeeded": 64},
        controls={"succeeded": 64},
        alpha_1=Interval(0.73, 0.71, 0.75),
        alpha_drafter="small-draft-of-2026-11",
        decoded=Decoded(123_456, loads, ("lookup",), (3, 12), 8, "greedy"),
        next_job=NextJob("speculative", "lookup", 12, "expected_faster", "", 8, "greedy"),
        measured=task_speedup(Interval(1.62, 1.55, 1.70), AT, task=task, drafter="small-draft-of-2026-11"),
    )
    lines = rendered(task_table([now], {task: 292}, {task: 240.0}))
    assert_fits(lines, "123,456 succeeded waiting lookup drafted [0.71 0.75]")
    assert len(lines) <= 12


@pytest.mark.parametrize("drafter", ["small", LONG])
@pytest.mark.parametrize("task", ["code", LONG])
def test_the_report_fits(task: str, drafter: str) -> None:
    report = full((task,))
    its, names = {"acceptance_drafter": drafter, "form_bucket": "json,tools"}, {"task": task, "drafter": drafter}
    tasks, probes = (report.tasks[0].model_copy(update=its),), (report.probes[0].model_copy(update=names),)
    for sent, waiting, num_probe_sets in ((probes, (), 1), ((), probes, 1), ((), (), 0)):
        update = {"tasks": tasks, "probes": sent, "probes_waiting": waiting, "num_probe_sets": num_probe_sets}
        assert_fits(render_text(report.model_copy(update=update)).splitlines(), "json,tools)")


def test_a_report_of_nothing_fits() -> None:
    for report in (empty(), full().model_copy(update={"tasks": (), "drift": (), "incidents": ()})):
        assert_fits(render_text(report).splitlines())


_cells = st.text(st.sampled_from("ab_-. 0[]αß日"), max_size=40)


@settings(max_examples=200)
@given(rows=st.lists(st.tuples(_cells, _cells, _cells, _cells), max_size=5))
@example(rows=[("a" * 300, "", "", "")])
@example(rows=[("", "[0.71 0.75]" * 20, "日" * 90, "")])
def test_no_line_is_ever_too_long_and_nothing_is_lost(rows: list[tuple[str, ...]]) -> None:
    made = table("task", "speed-up [95 %]", "next job", "k", right=["k"])
    for cells in rows:
        made.add_row(*cells[:3], Text(cells[3]))
    lines = rendered(made)
    assert max(map(cell_len, lines)) <= WIDTH
    expected = "".join(["task speed-up [95 %] next job k", *map("".join, rows)])
    assert sorted("".join("".join(lines).split())) == sorted("".join(expected.split()))


def test_a_progress_bar_fits() -> None:
    bar = progress()
    bar.add_task("probes and controls", total=9999, completed=9999, note="9,987 succeeded, 12 failed")
    assert max(map(cell_len, rendered(bar.get_renderable()))) <= WIDTH


def test_help_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    for command, _ in commands():
        shown = CliRunner().invoke(app, [*command.split()[1:], "--help"], terminal_width=WIDTH)
        assert shown.exit_code == 0, command
        assert max(map(cell_len, shown.output.splitlines())) <= WIDTH, command


class Told:
    """What is written at a time that the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.written: list[str] = []
        self.lines = ProgressLines(self.written.append, clock=lambda: self.now)


def test_a_line_is_written_now_and_then_and_says_how_far_it_is() -> None:
    told = Told()
    told.lines.stage("loading the models", 0, None)
    assert told.written.pop() == "loading the models …"
    told.now += EVERY_S
    told.lines.stage("measuring", 0, 84)
    for _ in range(60):
        told.now += EVERY_S / 20
        told.lines.advance(1, None)
    steps = ((0, 5), (20, 10), (40, 15), (60, 20))
    assert told.written == [f"measuring: {num} of 84, after {seconds} s" for num, seconds in steps]
    told.now += 7.0
    told.lines.stage("comparing texts", 0, None)
    assert told.written[-1] == "comparing texts, after 27 s", "a stage of unknown length is named alone"


def test_a_short_command_writes_nothing() -> None:
    told = Told()
    told.lines.stage("measuring", 3, 84)
    told.lines.advance(81, None)
    assert told.written == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("\x1b]0;X\x07", "\\x1b]0;X\\x07"),
        ("a\x9bb\x7f", "a\\x9bb\\x7f"),
        ("a\u202eb\u2066\u200f", "a\\u202eb\\u2066\\u200f"),
        ("one\ttwo\nthree\r\nfour\rfive", "one\ttwo\nthree\nfour\\x0dfive"),
        ("日本語 é 👩‍👩‍👧 שלום", "日本語 é 👩‍👩‍👧 שלום"),
        ("half \ud83d", "half \\ud83d"),
    ],
)
def test_what_acts_is_written_out(given: str, shown: str) -> None:
    assert harmless(given) == shown
    assert one_line(given) == shown.replace("\n", "\\n").replace("\t", "\\t")


def test_json_stays_the_same_value() -> None:
    value = {"a\u202e": ["\x7f\x9b\x1b\n\t", "é 語", "\ud83d"]}
    encoded = json_text(value, indent=2)
    assert json.loads(encoded) == value
    assert "é 語" in encoded
    assert not set("\u202e\x7f\x9b\x1b\t\ud83d") & set(encoded)


def test_a_console_shows_texts_and_tables_without_their_acts_and_markup() -> None:
    screen = _console(io.StringIO())
    shown = table("[red]name", "text", title="\x1b[2J")
    shown.add_row("[bold]x[/bold]", Text("\x1b]0;X\x07", style="red"))
    for one in (shown, "[red]\u202e :smile:", Text("\x9b31m")):
        screen.print(one)
    found = screen.file.getvalue()  # type: ignore[attr-defined]
    assert not set("\x1b\x07\u202e\x9b") & set(found)
    for told in ("[red]name", "[bold]x[/bold]", "\\x1b", "]0;X", "[red]\\u202e :smile:", "\\x9b31m", "\\x1b[2J"):
        assert told in found
