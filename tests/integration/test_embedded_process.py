"""Child processes: their output is kept, their end is tied to ours, their failures say why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from alphaloop.embedded.process import ChildProcess, free_ports, is_free, is_listening
from alphaloop.errors import StartFailed
from alphaloop.files import FolderLock, is_locked
from tests.fixtures.worker import until

#: A server that says when it is up, and says goodbye when it is asked to stop.
POLITE = """
import signal, sys, time
def leave(number, frame):
    print("goodbye", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
print("up", flush=True)
while True:
    signal.pause()
"""
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "server.log"


@pytest.fixture
def polite(log: Path) -> Iterator[ChildProcess]:
    child = ChildProcess("the server", [sys.executable, "-c", POLITE], log=log, grace_s=10)
    child.start()
    child.wait_until(lambda: "up" in log.read_text(), 20)
    yield child
    child.stop()


def test_it_stops_when_asked_and_its_words_are_kept(polite: ChildProcess, log: Path) -> None:
    assert polite.is_running
    polite.stop()
    assert not polite.is_running
    assert log.read_text() == f"up\ngoodbye {int(signal.SIGTERM)}\n"
    polite.stop()


def test_ctrl_c_in_the_terminal_does_not_reach_it(polite: ChildProcess) -> None:
    assert polite.pid is not None
    assert os.getpgid(polite.pid) != os.getpgid(0)
    assert os.getsid(polite.pid) != os.getsid(0)


def test_one_that_does_not_listen_is_killed_after_the_grace_period(log: Path) -> None:
    child = ChildProcess("the server", [sys.executable, "-c", STUBBORN], log=log, grace_s=0.3)
    child.start()
    child.wait_until(lambda: "up" in log.read_text(), 20)
    begun = time.monotonic()
    child.stop()
    assert not child.is_running
    assert 0.3 <= time.monotonic() - begun < 10


def test_kill_is_not_polite(polite: ChildProcess, log: Path) -> None:
    polite.kill()
    assert not polite.is_running
    assert "goodbye" not in log.read_text()


def test_an_end_while_starting_is_told_with_the_last_lines(log: Path) -> None:
    script = "import sys\nfor i in range(50): print('line', i)\nsys.exit('no port left')"
    # Unbuffered: what a program says last is otherwise written first, as its errors are not held back.
    child = ChildProcess("the server", [sys.executable, "-u", "-c", script], log=log)
    child.start()
    with pytest.raises(StartFailed) as caught:
        child.wait_until(lambda: False, 20, hint="free a port")
    assert caught.value.message.startswith("the server ended with code 1 while starting")
    assert "line 49" in caught.value.message
    assert "no port left" in caught.value.message
    assert "line 30\n" not in caught.value.message
    assert caught.value.hint == "free a port"


def test_a_start_that_takes_too_long_is_ended(log: Path) -> None:
    child = ChildProcess("the server", [sys.executable, "-c", POLITE], log=log)
    child.start()
    with pytest.raises(StartFailed, match=r"the server did not answer within 0\.2 s"):
        child.wait_until(lambda: False, 0.2)
    assert not child.is_running


def test_a_program_that_is_not_there_is_told(log: Path, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="the server could not be run"):
        ChildProcess("the server", [tmp_path / "nothing"], log=log).start()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent death signal is Linux's")
def test_it_does_not_outlive_a_killed_guard(polite: ChildProcess, log: Path) -> None:
    assert polite.pid is not None
    guard = os.getpgid(polite.pid)  # the guard leads the session
    os.kill(guard, signal.SIGKILL)
    until(lambda: "goodbye" in log.read_text(), "it says goodbye")


def test_it_does_not_outlive_a_killed_alphaloop(log: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from alphaloop.files import FolderLock
        from alphaloop.embedded.process import ChildProcess
        log = Path({str(log)!r})
        lock = FolderLock(Path({str(tmp_path / "lock")!r}), what="a server", wait_s=0)
        child = ChildProcess("the server", [sys.executable, "-c", {POLITE!r}], log=log, lock=lock)
        child.start()
        child.wait_until(lambda: "up" in log.read_text(), 20)
        lock.close()
        print("ready", flush=True)
        sys.stdin.read()
        """)
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as parent:
        assert parent.stdout.readline() == b"ready\n"
        assert is_locked(tmp_path / "lock"), "the server holds what it inherited"
        parent.kill()
    # The next owner of the folder waits until the server is gone.
    with FolderLock(tmp_path / "lock", what="a server", wait_s=20):
        assert f"goodbye {int(signal.SIGTERM)}" in log.read_text()


def test_a_folder_has_one_owner_who_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with FolderLock(path, what="an embedded stack", wait_s=0):
        assert is_locked(path)
        with pytest.raises(StartFailed, match=rf"an embedded stack runs there, started by process {os.getpid()}"):
            FolderLock(path, what="an embedded stack", wait_s=0.1)
    assert not is_locked(path)
    FolderLock(path, what="an embedded stack", wait_s=0).close()


def test_ports_are_free_and_different() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(is_free(port) and not is_listening(port) for port in ports)


#: A server with a child in its group, which a killed server leaves.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print('deep', flush=True); time.sleep(600)"])
print("child", child.pid, flush=True)
child.wait()
"""


def test_what_a_killed_server_leaves_ends_too(log: Path) -> None:
    child = ChildProcess("the server", [sys.executable, "-c", PARENT], log=log, grace_s=10)
    child.start()
    child.wait_until(lambda: "child" in log.read_text() and "deep" in log.read_text(), 20)
    left = next(int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("child"))
    child.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)
