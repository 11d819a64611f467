"""`[refresh] command` and `hook`: what they may do, and what they are ended or refused for."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from alphaloop.commands import CommandEvent, StageEvent
from alphaloop.errors import AlphaloopError, UnsupportedModel
from alphaloop.settings.models import TargetSettings
from engine.models import load_weights
from engine.training.heads import SequentialHeadsInTraining
from engine.training.recipe import Recipe
from engine.training.rivals import judge_rivals
from worker.commands import TrainingEvents
from worker.training.command import CommandAgain, CommandFailed, CommandLimits, run_command, run_hook

LIMITS: Final = CommandLimits(seconds=60.0, max_bytes=256 << 20, num_threads=1)
GOOD: Final = """
import pathlib, sys
out = pathlib.Path(sys.argv[-1])
(out / "config.json").write_text("{}")
(out / "model.safetensors").write_bytes(b"weights")
"""


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "work"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)  # gigabytes, and pytest keeps the folders of three runs


def run(
    work: Path,
    code: str,
    *,
    limits: CommandLimits = LIMITS,
    on_event: Callable[[CommandEvent], object] = lambda event: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    script = work.parent / "command.py"
    script.write_text(code)
    given = [work / "prompts.jsonl", "target", work.parent / "parent", work / "out"]
    return run_command([sys.executable, str(script)], given, work, limits, on_event=on_event, should_stop=should_stop)


def test_a_command_gets_four_paths_and_reports_events(work: Path) -> None:
    events: list[CommandEvent] = []
    code = f"""{GOOD}
import json
print("not an event")
print(json.dumps({{"event": "stage", "name": "steps", "total": 7, "done": 2}}))
print(json.dumps({{"event": "stage", "name": 7}}))
print(json.dumps({{"event": "note", "text": " ".join(sys.argv[1:])}}))
"""
    assert run(work, code, on_event=events.append)
    given = f"{work}/prompts.jsonl target {work.parent}/parent {work}/out"
    assert [event.model_dump() for event in events] == [
        StageEvent(name="steps", total=7, done=2).model_dump(),
        {"event": "note", "text": given},
    ]


def test_it_finds_nothing_of_alphaloops_environment(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "DATABASE_URL",
        "KAFKA_BOOTSTRAP_SERVERS",
        "ALPHALOOP_DATA_DIR",
        "AWS_SECRET_ACCESS_KEY",
        "PYTHONPATH",
    ):
        monkeypatch.setenv(name, "planted-secret")
    said: list[Any] = []
    code = GOOD + 'import json, os\nprint(json.dumps({"event": "report", "data": dict(os.environ)}))\n'
    assert run(work, code, on_event=lambda event: said.append(event))
    (report,) = said
    assert set(report.data) <= {
        *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
        *("HOME", "TMPDIR", "OMP_NUM_THREADS"),
    }
    assert report.data["HOME"] == str(work)
    assert "planted-secret" not in report.data.values()


@pytest.mark.parametrize(
    ("left", "why"),
    [
        ('(out / "model.bin").write_bytes(b"x")', "expected safetensors and JSON files alone, found 'model.bin'"),
        ('(out / "a b.json").write_text("{}")', "expected safetensors and JSON files alone, found 'a b.json'"),
        ('(out / "more").mkdir()', "'more': expected a regular file, found a link, a folder or a device"),
        ('(out / "more.json").symlink_to("/etc/passwd")', "'more.json': expected a regular file"),
        ('os.link(out / "config.json", out / "more.json")', "expected a regular file, found a link"),
        ('os.mkfifo(out / "more.json")', "'more.json': expected a regular file"),
        ('(out / "config.json").unlink()', "expected config.json and safetensors in OUT, found model.safetensors"),
        ('(out / "model.safetensors").unlink()', "expected config.json and safetensors in OUT, found config.json"),
        ('os.truncate(out / "config.json", 1 << 25)', "config.json: expected at most 16777216 bytes, found 33554432"),
        ('sys.exit("no CUDA here")', "the command ended with code 1: no CUDA here"),
        (
            'print(\'{"event": "failed", "message": "diverged"}\'); sys.exit(3)',
            "the command ended with code 3: diverged",
        ),
        ("os.kill(os.getpid(), 9)", "the command ended with code 137: no word"),
        ("print('a\\0b', end=''); sys.exit(1)", r"the command ended with code 1: a\x00b"),
    ],
)  # fmt: skip
def test_what_it_leaves_is_refused_with_the_reason(work: Path, left: str, why: str) -> None:
    with pytest.raises(CommandFailed) as failed:
        run(work, f"{GOOD}\nimport os\n{left}\n")
    assert why in failed.value.message


def test_a_pickle_is_never_read(work: Path) -> None:
    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(work.parent / "was-run"),)

    (work.parent / "planted").write_bytes(pickle.dumps(Planted()))
    code = f"{GOOD}\nimport shutil\nshutil.copy({str(work.parent / 'planted')!r}, out / 'pytorch_model.bin')\n"
    with pytest.raises(CommandFailed, match=r"found 'pytorch_model\.bin'"):
        run(work, code)
    assert not (work.parent / "was-run").exists()


def test_code_75_asks_for_another_attempt(work: Path) -> None:
    with pytest.raises(CommandAgain, match="the device is taken"):
        run(work, 'import sys; print(\'{"event": "failed", "message": "the device is taken"}\'); sys.exit(75)')


def test_a_command_that_is_not_there_fails(work: Path) -> None:
    given = [work / "prompts.jsonl", "target", "parent", work / "out"]
    with pytest.raises(CommandFailed):
        run_command(["/no/such/program"], given, work, LIMITS, on_event=lambda event: None, should_stop=lambda: False)


HANG: Final = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[-1], "pids.json").write_text(f"[{below.pid}]")
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_one_that_hangs_is_ended_with_all_that_it_started(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.training.command._GRACE_S", 0.2)
    with pytest.raises(CommandFailed, match="was ended after 3 s, the longest that it may take"):
        run(work, HANG, limits=CommandLimits(3.0, LIMITS.max_bytes, 1))
    (below,) = json.loads((work / "out" / "pids.json").read_text())
    assert not is_running(below)


def test_a_stop_ends_it(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.training.command._GRACE_S", 0.2)
    pids = work / "out" / "pids.json"
    assert not run(work, HANG, should_stop=lambda: pids.exists() and bool(pids.read_text()))
    (below,) = json.loads(pids.read_text())
    assert not is_running(below)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ('open(sys.argv[-1] + "/model.safetensors", "wb").truncate(10 << 30); time.sleep(600)', "files"),
        ('f = open(sys.argv[-1] + "/x.safetensors", "wb")\nwhile True: f.write(bytes(1 << 20))', "files"),
        ('import os\nf = open(os.environ["TMPDIR"] + "/x", "wb")\nwhile True: f.write(bytes(1 << 20))', "files"),
        ('while True: print("x" * 10000)', "files"),
        ('held = bytearray(b"x") * (600 << 20); time.sleep(600)', "memory"),
    ],
    ids=["10 GB with holes", "weights without end", "temporary files", "log without end", "memory"],
)  # fmt: skip
def test_one_that_takes_too_much_is_ended(work: Path, code: str, what: str) -> None:
    with pytest.raises(CommandFailed) as failed:
        run(work, f"import sys, time\n{code}\n")
    assert f"expected at most {LIMITS.max_bytes} bytes of {what}, found" in failed.value.message


@pytest.mark.parametrize("line", ["x" * 10000, "", '{"event": "note", "text": "x"}', "x" * 10 + "\r"])
def test_one_that_prints_without_end_is_looked_at_all_the_same(work: Path, line: str) -> None:
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    assert not run(work, f"while True: print({line!r})\n", should_stop=should_stop)
    assert asked == 4


FACTS: Final = ("tiny", "heads-2", "h2", "/drafts/h2")


def hooked(
    work: Path, code: str, *, seconds: float = 60.0, should_stop: Callable[[], bool] = lambda: False
) -> str | None:
    script = work.parent / "hook.py"
    script.write_text(f"import os, signal, subprocess, sys, time\n{code}\n")
    limits = CommandLimits(seconds, LIMITS.max_bytes, 1)
    return run_hook([sys.executable, str(script), "--now"], FACTS, work, limits, should_stop=should_stop)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(*sys.argv[1:])", "code 0: --now tiny heads-2 h2 /drafts/h2"),
        ("print('a\\n\\nb\\nc\\nd', end=''); sys.exit(3)", "code 3: b / c / d"),
        ("sys.exit('no server there')", "code 1: no server there"),
        ("print('a\\x1b[2J\\0\\u202e')", r"code 0: a\x1b[2J\x00\u202e"),
        ("sys.stdout.buffer.write(b'\\xff' * 1000)", "code 0: " + "\ufffd" * 300),
        ("pass", "code 0: no word"),
        ("os.kill(os.getpid(), 9)", "code 137: no word"),
    ],
)
def test_a_hook_gets_four_facts_and_its_end_is_said(work: Path, code: str, said: str) -> None:
    assert hooked(work, code) == f"the hook ended with {said}"


def test_a_hook_finds_nothing_of_alphaloops_environment(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "planted-secret")
    assert hooked(work, "print('planted-secret' in str(os.environ), os.getcwd())") == (
        f"the hook ended with code 0: False {work}"
    )


SLEEPS: Final = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pid.part", "w").write(str(below.pid))
os.rename("pid.part", "pid")
time.sleep(600)
"""


def test_a_hook_that_hangs_is_ended_with_all_that_it_started(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.training.command._GRACE_S", 0.2)
    assert hooked(work, SLEEPS, seconds=3.0) == "the hook was ended after 3 s, the longest that it may take"
    assert not is_running(int((work / "pid").read_text()))


def test_a_stop_ends_a_hook(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.training.command._GRACE_S", 0.2)
    assert hooked(work, SLEEPS, should_stop=(work / "pid").exists) is None
    assert not is_running(int((work / "pid").read_text()))


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("open('x', 'wb').truncate(10 << 30); time.sleep(600)", "files"),
        ("while True: print('x' * 10000)", "files"),
        ("held = bytearray(b'x') * (600 << 20); time.sleep(600)", "memory"),
    ],
)
def test_a_hook_that_takes_too_much_is_ended(work: Path, code: str, what: str) -> None:
    said = hooked(work, code) or ""
    assert said.startswith(f"the hook was ended: expected at most {LIMITS.max_bytes} bytes of {what}, found ")


def test_a_hook_that_is_not_there_is_said(work: Path) -> None:
    said = run_hook(["/no/such/program"], FACTS, work, LIMITS, should_stop=lambda: False)
    assert said is not None
    assert said.startswith("the hook could not be run")


@pytest.fixture(scope="module")
def parent(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of the tiny target, as they are before a step of training."""
    target = load_weights(str(tiny_models["llama"]), None, "float32", torch.device("cpu")).model
    embeddings, head = (
        each.weight.detach() for each in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    heads = SequentialHeadsInTraining(embeddings, head, None, Recipe())
    folder = tmp_path_factory.mktemp("parent")
    heads.save(folder, torch.float32, {})
    return folder


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda x: {**x, "inner.weight": x["inner.weight"][:, 1:].contiguous()}, "expected inner.weight of"),
        (lambda x: {name: t for name, t in x.items() if name != "outer.weight"}, "expected the tensor outer.weight"),
        (lambda x: {**x, "lm_head.weight": x["lm_head.weight"][:, 1:].contiguous()}, "expected a head over 64 numbers"),
        (lambda x: {**x, "more.weight": torch.zeros(1)}, "expected no further tensors, found more.weight"),
    ],
)
def test_heads_of_wrong_shapes_are_not_judged(
    parent: Path, tiny_models: dict[str, Path], tmp_path: Path, spoil: Callable[[Any], Any], why: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_bytes((parent / "config.json").read_bytes())
    save_file(spoil(load_file(parent / "model.safetensors")), out / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=why):
        judged(parent, out, tiny_models["llama"], tmp_path)


def test_heads_for_other_states_are_not_judged(parent: Path, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    config = json.loads((parent / "config.json").read_text()) | {"hidden_size": 128}
    (out / "config.json").write_text(json.dumps(config))
    (out / "model.safetensors").write_bytes((parent / "model.safetensors").read_bytes())
    with pytest.raises(AlphaloopError, match="The heads read states of 128 numbers, the target's have 64"):
        judged(parent, out, tiny_models["llama"], tmp_path)


def judged(parent: Path, out: Path, target: Path, state: Path) -> object:
    served = TargetSettings(name="tiny", source=str(target), dtype="float32", device="cpu", num_threads=1)
    return judge_rivals(
        served,
        "heads",
        str(parent),
        str(out),
        lambda tokenizer: [],
        state=state,
        recipe=Recipe(),
        progress=TrainingEvents(lambda event: None),
        should_stop=lambda: False,
    )
