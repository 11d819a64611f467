"""A command that starts `python -m worker.commands`: its events on the screen, its exit code, its signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alphaloop.cli import children
from alphaloop.commands import EVENT, ORDER, CheckPairOrder, FailedEvent, line_of
from tests.fixtures.cli import Cli

ROOT = Path(__file__).resolve().parents[3]
#: A child's words: `tell` writes an event, `order` is what it was asked.
_PRELUDE = """
import json, os, signal, sys
def tell(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)
order = json.loads(sys.stdin.readline())
"""
FINDINGS = [{"check": "size", "verdict": "refused", "sentence": "too [large]"}]
REPORT = {"target": "t", "draft": "d", "findings": FINDINGS}


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Replaces the worker's process by a script."""
    monkeypatch.setenv("ALPHALOOP_DATA_DIR", str(tmp_path))

    def becomes(script: str) -> None:
        command = [sys.executable, "-c", _PRELUDE + script]
        monkeypatch.setattr(children, "child_command", lambda module, arguments: command)

    return becomes


def test_options_become_an_order_and_a_report_a_table(cli: Cli, child: Callable[[str], None], tmp_path: Path) -> None:
    file = tmp_path / "order.json"
    child(f"open({str(file)!r}, 'w').write(json.dumps(order))\ntell('report', data={REPORT!r})\nsys.exit(1)")
    ran = cli("check-pair", "big", "./small", "--draft-dtype", "float16", "--batch-size", "7")
    assert ran.code == 1
    assert ["size", "refused", "too", "[large]"] in [line.split() for line in ran.out.splitlines()]
    assert ran.err == "the draft is refused\n"
    order = ORDER.validate_json(file.read_bytes())
    assert isinstance(order, CheckPairOrder)
    assert (order.target, order.draft, order.dtype, order.draft_dtype) == ("big", "./small", None, "float16")
    assert (order.batch_size, order.context_length, order.max_draft_tokens) == (7, None, 5)


def test_a_report_as_json_is_all_of_standard_output(cli: Cli, child: Callable[[str], None]) -> None:
    child(f"tell('stage', name='reading')\ntell('advance', total=3)\ntell('report', data={REPORT!r})")
    ran = cli("check-pair", "big", "small", "--json")
    assert ran.code == 0
    assert ran.json == {**REPORT, "fits": False}
    assert ran.err == ""


@pytest.mark.parametrize(
    "command", [("measure", "--prompts"), ("draft", "train", "f", "--prompts"), ("draft", "train", "f", "--held-out")]
)
def test_prompts_on_standard_input_follow_the_order(
    cli: Cli, child: Callable[[str], None], command: tuple[str, ...]
) -> None:
    child("assert '-' in order.values()\ntell('note', text=str(len(sys.stdin.read())))")
    content = b"x" * 300_000
    assert cli(*command, "-", stdin=content).err == "300000\n"


@pytest.mark.parametrize(
    "command", [("measure", "--prompts"), ("check-server",), ("draft", "train"), ("check-pair", "x")]
)
def test_a_name_that_is_not_utf_8_is_taken_and_told(
    cli: Cli, child: Callable[[str], None], command: tuple[str, ...]
) -> None:
    child("name = os.fsdecode(b'd\\xe4t')\nassert name in order.values()\ntell('failed', message=name)\nsys.exit(1)")
    assert cli(*command, os.fsdecode(b"d\xe4t")).err == "error: d\\udce4t\n"
    failed = FailedEvent(message=os.fsdecode(b"d\xe4t"))
    assert EVENT.validate_python(json.loads(line_of(failed))) == failed


def test_a_process_that_reads_no_prompts_is_still_heard(cli: Cli, child: Callable[[str], None]) -> None:
    child("os.close(0)\ntell('failed', message='too long', hint='take a sample')\nsys.exit(1)")
    ran = cli("measure", "--prompts", "-", stdin=b"x" * 300_000)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "error: too long\nhint: take a sample\n"


def test_nothing_that_the_process_tells_acts_on_the_screen(cli: Cli, child: Callable[[str], None]) -> None:
    """A server's answer in `check-server`, the name of a folder, the error of a library."""
    hostile = "\x1b[2J\x9b31m\u202e[red]"
    row = {"check": hostile, "verdict": "ok", "sentence": hostile}
    found = {"url": hostile, "kind": "vllm", "model": hostile, "granularity": "sums", "findings": [row]}
    told = [f"'stage', name={hostile!r}", f"'note', text={hostile!r}", f"'report', data={found!r}"]
    told.append(f"'failed', message={hostile!r}, hint={hostile!r}")
    child("".join(f"tell({one})\n" for one in told) + "sys.exit(1)")
    for more in ((), ("--json",)):
        ran = cli("check-server", "plain", *more)
        assert not set("\x1b\x9b\u202e") & set(ran.out + ran.err)
        assert "\\x1b[2J" in ran.err
        assert "[red]" in ran.out


def test_what_was_told_before_an_error_is_shown(cli: Cli, child: Callable[[str], None]) -> None:
    child(f"tell('report', data={REPORT!r})\ntell('failed', message='then it broke')\nsys.exit(1)")
    ran = cli("check-pair", "big", "small", "--json")
    assert ran.code == 1
    assert ran.json["target"] == "t"
    assert ran.err == "error: then it broke\n"


@pytest.mark.parametrize(
    ("script", "code"),
    [("sys.exit(130)", 130), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("raise SystemExit(1)", 1)],
)
def test_the_exit_code_is_the_process_s(cli: Cli, child: Callable[[str], None], script: str, code: int) -> None:
    child(script)
    assert cli("draft", "register", "somewhere").code == code


_COMMAND = """
import sys
from alphaloop.cli import children, main
script = sys.argv.pop()
children.child_command = lambda module, arguments: [sys.executable, "-c", script]
main()
"""
#: A signal that comes between two waits is not lost: it stays pending.
_COUNTING = (
    _PRELUDE
    + """
received = []
awaited = (signal.SIGINT, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
tell("note", text=f"ready {os.getpgrp()}")
while len(received) < 2:
    received.append(signal.Signals(signal.sigwait(awaited)).name)
    tell("note", text=f"got {received}")
sys.exit(130)
"""
)


def started(folder: Path, *arguments: str, **given: Any) -> subprocess.Popen[str]:
    """`alphaloop ARGUMENTS`, whose process is a script: the last argument."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ALPHALOOP_DATA_DIR": str(folder)}
    command = [sys.executable, "-c", _COMMAND, *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **given)


def test_signals_are_passed_on_once_each(tmp_path: Path) -> None:
    with started(tmp_path, "draft", "register", "somewhere", _COUNTING, process_group=0) as parent:
        ready = parent.stderr.readline().split()
        # As a terminal does: to the whole group, of which the process is no member.
        assert int(ready[1]) != os.getpgid(parent.pid) == parent.pid
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stderr.readline() == "got ['SIGINT']\n"
        parent.send_signal(signal.SIGTERM)
        assert parent.stderr.readline() == "got ['SIGINT', 'SIGTERM']\n"
        assert parent.wait(30) == 130
        assert parent.stderr.read() == ""


def test_the_first_ctrl_c_of_a_measurement_is_answered_at_once(tmp_path: Path) -> None:
    """Before its process has ended, which here takes two signals."""
    with started(tmp_path, "measure", "--prompts", "mine.jsonl", _COUNTING) as parent:
        assert parent.stderr.readline().startswith("ready")
        parent.send_signal(signal.SIGINT)
        said = [parent.stderr.readline() for _ in range(2)]
        assert any(line.startswith("stopping after this round") for line in said)
        assert parent.poll() is None
        parent.send_signal(signal.SIGINT)
        assert parent.wait(30) == 130


def test_ctrl_c_while_the_models_are_loaded_ends_the_measurement_at_once(tmp_path: Path) -> None:
    """Its process would not end by itself."""
    loading = 'tell("stage", name="loading the models")\ntell("note", text="loads")'
    script = _COUNTING.replace('tell("note", text=f"ready {os.getpgrp()}")', loading)
    with started(tmp_path, "measure", "--prompts", "mine.jsonl", script) as parent:
        assert [parent.stderr.readline() for _ in range(2)] == ["loading the models …\n", "loads\n"]
        parent.send_signal(signal.SIGINT)
        assert parent.wait(30) == 130
        assert parent.stderr.read() == "interrupted before anything was measured\n"


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Children obey SIGINT even if a shell started these tests in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupting_while_prompts_are_read_ends_both(tmp_path: Path, interrupts: None) -> None:
    script = _PRELUDE + "print(os.getpid(), file=sys.stderr, flush=True)\nsys.stdin.read()"
    with started(tmp_path, "measure", "--prompts", "-", script, stdin=subprocess.PIPE) as parent:
        pid = int(parent.stderr.readline())
        parent.send_signal(signal.SIGINT)
        assert parent.wait(30) == 130
        assert parent.stderr.read() == "interrupted\n"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
