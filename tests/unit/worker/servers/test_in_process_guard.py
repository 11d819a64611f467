"""The processes of an engine end with the worker, however that ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from worker.servers.in_process.guard import NAME, Guard, marked

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
WORKER = """
import subprocess, sys, time
from worker.servers.in_process.guard import Guard
guard = Guard()
left = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
print(left.pid, flush=True)
time.sleep(600)
"""


def test_what_is_left_ends_when_the_guard_closes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "another")
    with subprocess.Popen(SLEEPS) as other:
        guard = Guard()
        mark = os.environ[NAME]
        assert mark != "another"
        with subprocess.Popen(SLEEPS) as left:
            assert marked(mark) == [left.pid]
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
