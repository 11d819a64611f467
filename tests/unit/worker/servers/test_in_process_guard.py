"""The processes of an engine end with the worker, however that ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.worker import until
from worker.servers.in_process.guard import NAME, Guard, marked

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
WORKER = """
import subprocess, sys, time
from worker.servers.in_process.guard import Guard
guard = Guard()
sleeps = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
left = subprocess.Popen([sys.executable, "-S", "-c", sleeps], start_new_session=True)
time.sleep(600)
"""


def test_what_is_left_ends_when_the_guard_closes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "another")
    with subprocess.Popen(SLEEPS) as other:
        guard = Guard()
        mark = os.environ[NAME]
        assert mark != "another"
        with subprocess.Popen(SLEEPS) as left:
            # A process shows no environment for a moment when it begins its program.
            until(lambda: marked(mark) == [left.pid], "what was started has the mark, and nothing else")
            guard.close()
            assert left.wait(20) == -signal.SIGKILL
        assert other.poll() is None
        assert marked("another") == [other.pid]
        other.kill()


def test_a_killed_worker_leaves_no_process_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        left = os.pidfd_open(int(worker.stdout.readline()))
        worker.kill()
    poll = select.poll()
    poll.register(left)
    assert poll.poll(20_000), "it has ended"
    os.close(left)
