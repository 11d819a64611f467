"""Progress without a terminal."""

from __future__ import annotations

from alphaloop.cli.children import EVERY_S, ProgressLines


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
