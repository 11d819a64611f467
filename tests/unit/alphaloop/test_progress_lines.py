"""Progress without a terminal."""

from __future__ import annotations

from alphaloop.cli.children import EVERY_S, ProgressLines


def test_a_line_is_written_now_and_then_and_says_how_far_it_is() -> None:
    written: list[str] = []
    now = [100.0]
    lines = ProgressLines(written.append, clock=lambda: now[0])
    lines.stage("loading the models", 0, None)
    assert written.pop() == "loading the models …"
    now[0] += EVERY_S
    lines.stage("measuring", 0, 84)
    for _ in range(60):
        now[0] += EVERY_S / 20
        lines.advance(1, None)
    assert written == [
        "measuring: 0 of 84, after 5 s",
        "measuring: 20 of 84, after 10 s",
        "measuring: 40 of 84, after 15 s",
        "measuring: 60 of 84, after 20 s",
    ]


def test_a_short_command_writes_nothing() -> None:
    written: list[str] = []
    lines = ProgressLines(written.append, clock=lambda: 0.0)
    lines.stage("measuring", 3, 84)
    lines.advance(81, None)
    assert written == []


def test_a_stage_of_unknown_length_is_named_alone() -> None:
    written: list[str] = []
    now = [0.0]
    lines = ProgressLines(written.append, clock=lambda: now[0])
    now[0] = 7.0
    lines.stage("comparing texts", 0, None)
    assert written == ["comparing texts, after 7 s"]
