"""Silence of threads, and the watchdog that ends a process over it. The clock is the test's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from alphaloop.liveness import GRACE_S, ExitCode, Liveness, Pulse, Watchdog, beat
from tests.fixtures.simulated import Clock

WAIT_S = 10.0
ROOT = Path(__file__).resolve().parents[3]


class Watched:
    """One pulse, and a watchdog whose end is counted."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.liveness = Liveness()
        self.pulse = self.liveness.watch(Pulse("the step", self.clock), 30.0)
        self.events: list[str] = []
        self.watchdog = Watchdog(
            self.liveness,
            last_orders=lambda: self.events.append("orders"),
            end=lambda: self.events.append("end"),
            clock=self.clock,
        )

    def pass_by(self, seconds: float) -> None:
        """Time in which the watchdog looks each second."""
        for _ in range(int(seconds)):
            self.clock.pass_s(1.0)
            self.watchdog.look()


def test_silence_counts_only_while_beats_are_expected() -> None:
    watched = Watched()
    watched.pass_by(100)
    assert watched.liveness.hung() is None
    with watched.pulse.expected():
        watched.pass_by(30)
        assert watched.liveness.hung() is None
        watched.pass_by(1)
        assert watched.liveness.hung() == "the step has not moved for 31 s, expected at most 30 s"
    assert watched.liveness.hung() is None
    assert watched.events == []


def test_a_hang_ends_the_process_after_the_grace_and_what_was_only_slow_goes_on() -> None:
    watched = Watched()
    with watched.pulse.expected():
        watched.pass_by(30 + GRACE_S - 1)
        watched.pulse.beat()
        watched.pass_by(30 + GRACE_S)
        assert watched.events == []
        watched.pass_by(1)
    assert watched.events == ["orders", "end"]


def test_a_suspended_process_was_not_hung() -> None:
    watched = Watched()
    with watched.pulse.expected():
        watched.pass_by(5)
        watched.clock.pass_s(3600.0)
        watched.watchdog.look()
        assert watched.liveness.hung() is None
        watched.pass_by(30 + GRACE_S + 1)
    assert watched.events == ["orders", "end"]


def test_a_beat_means_the_pulse_of_the_thread_that_calls() -> None:
    clock = Clock()
    mine, others = Pulse("mine", clock), Pulse("others", clock)
    went, may_end = threading.Event(), threading.Event()

    def run() -> None:
        beat()
        went.set()
        assert may_end.wait(WAIT_S)

    thread = threading.Thread(target=others.around(run))
    with mine.expected():
        clock.pass_s(5.0)
        thread.start()
        assert went.wait(WAIT_S)
        assert (mine.silence_s, others.silence_s) == (5.0, 0.0)
        beat()
        clock.pass_s(1.0)
        assert (mine.silence_s, others.silence_s) == (1.0, 1.0)
        may_end.set()
        thread.join(WAIT_S)
        assert (mine.silence_s, others.silence_s) == (1.0, 0.0)
    beat()
    assert mine.silence_s == 0.0, "a thread that is not watched beats for nobody"


def run(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


PROGRAM = """
import threading, sys
import alphaloop.liveness as watchdog
from alphaloop.liveness import Liveness, Pulse

watchdog.GRACE_S = watchdog.TICK_S = 0.05
liveness = Liveness()
pulse = liveness.watch(Pulse("the step"), 0.05)
dog = watchdog.Watchdog(liveness, last_orders=threading.Event().wait if "{orders}" == "hang" else lambda: None)
watchdog._LAST_ORDERS_S = 0.05
dog.start()

def a_call_that_never_returns():
    with pulse.expected():
        threading.Event().wait()

a_call_that_never_returns()
"""


@pytest.mark.parametrize("orders", ["work", "hang"])
def test_a_process_that_hangs_ends_with_its_own_exit_code_and_shows_where(orders: str) -> None:
    done = run(PROGRAM.replace("{orders}", orders))
    assert done.returncode == ExitCode.HUNG == 4
    assert "a_call_that_never_returns" in done.stderr


HOLDING = """
import ctypes
from alphaloop.liveness import Liveness, Watchdog

Watchdog(Liveness(), backstop_s=1.5).start()
ctypes.PyDLL(None).pause()  # a call into C that keeps the interpreter's lock
"""


def test_a_call_that_holds_the_interpreter_is_ended_too() -> None:
    done = run(HOLDING)
    assert done.returncode == ExitCode.FAILED
    assert "Timeout" in done.stderr
