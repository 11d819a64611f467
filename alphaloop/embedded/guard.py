"""A process between alphaloop and a server, which stops the server when alphaloop ends, even by kill -9.

Run as a script by `alphaloop.embedded.process`, with the standard library only. Standard input is a pipe from
alphaloop: when it closes, the server gets its stop signal, and after a grace period a kill. The guard writes the
server's process id to standard output; the server's output goes to standard error. What the server has started and
left goes to the guard, which ends it too.

    python -I -S guard.py '{"command": ["…"], "stop_signal": 15, "orphan_signal": 15, "grace_s": 20, "run_as": null,
                             "keep_search": false, "keep_open": []}'

`orphan_signal` is what the server gets where the guard itself is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_CHILD_SUBREAPER, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 1, 8, 36, 47, 2
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_CAPABILITY_VERSION_3 = 0x20080522
_LEFT_S = 3.0  #: for what a server left, from its stop signal to its kill
_POLL_S = 0.02


def main(order: dict[str, Any]) -> int:
    """Run the command until it ends or standard input closes; returns its exit code (128 + signal)."""
    awake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":
        # A server that is killed leaves its own children to this process, and not to the machine's first one.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Code between fork and exec is safe here, because this process has one thread.
    child = subprocess.Popen(
        order["command"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        pass_fds=order["keep_open"],
        preexec_fn=lambda: _prepare(order),
    )
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    while child.poll() is None:
        ready, _, _ = select.select([sys.stdin, awake], [], [])
        woken = os.read(awake, 64) if awake in ready else b""
        if sys.stdin in ready or set(woken) - {signal.SIGCHLD}:
            _stop(child, order["stop_signal"], order["grace_s"])
    _end_left(order["stop_signal"])
    code = child.returncode
    return code if code >= 0 else 128 - code


def _end_left(stop_signal: int) -> None:
    """End what the server left: guards among it end what they guard, given the stop signal and a moment."""
    kill_at, signalled = time.monotonic() + _LEFT_S, set[int]()
    while left := _children():
        number = signal.SIGKILL if time.monotonic() >= kill_at else stop_signal
        for pid in left:
            if number == signal.SIGKILL or pid not in signalled:
                signalled.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_POLL_S)


def _children() -> list[int]:
    """The process ids of this process's children, by Linux's /proc; elsewhere none is left to it."""
    children: list[int] = []
    if sys.platform == "linux":
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name of a program, in brackets, may hold anything.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if int(parent) == os.getpid() and state != b"X":
                    children.append(int(name))
    return children


def _stop(child: subprocess.Popen[bytes], stop_signal: int, grace_s: float) -> None:
    child.send_signal(stop_signal)
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _prepare(order: dict[str, Any]) -> None:
    if order["run_as"] is not None:
        _become(*order["run_as"], keep_search=order["keep_search"])
    if sys.platform == "linux":
        # After the change of user, which clears it. It covers a kill -9 of this guard.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, order["orphan_signal"], 0, 0, 0)


def _become(user: int, group: int, *, keep_search: bool) -> None:
    """Give up root; with `keep_search`, keep the right to pass through folders that are closed to the new user."""
    libc = ctypes.CDLL(None, use_errno=True)
    if keep_search:
        libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    if keep_search and not any(_keep(libc, cap) for cap in (_CAP_DAC_READ_SEARCH, _CAP_DAC_OVERRIDE)):
        os.write(2, b"guard: cannot keep the right to search closed folders\n")


def _keep(libc: ctypes.CDLL, capability: int) -> bool:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    bit = 1 << capability
    sets = (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)  # effective, permitted, inheritable; then the upper 32
    if libc.capset(header, sets) != 0:
        return False
    return bool(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0) == 0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(json.loads(sys.argv[1])))
