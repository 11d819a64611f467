"""What `make` installs: the lock file fits pyproject.toml, and the set-up says what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.first_hour.machine import wheel_of_sdist

ROOT: Final = Path(__file__).resolve().parents[1]
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD: Final = ["hatchling>=1.26,<2", "editables"]
#: vLLM pins versions that others may not have beside it, so whoever takes it has an environment of its own.
UNLOCKED: Final = "vllm"
EXTRAS: Final = [group for name, group in PROJECT["optional-dependencies"].items() if name != UNLOCKED]
GROUPS: Final = [PROJECT["dependencies"], *EXTRAS, BUILD]
DECLARED: Final = [Requirement(text) for group in GROUPS for text in group]


def locked() -> dict[str, Version]:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins), "exact versions, of no machine's build"
    return {canonicalize_name(name): Version(exact) for name, exact in (pin.split("==") for pin in pins)}


def test_the_lock_is_complete_fits_every_range_and_holds_nothing_needless() -> None:
    lock = locked()
    found: set[str] = set()
    waiting = list(DECLARED)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        assert name in lock, f"{name} is not locked"
        assert lock[name] in requirement.specifier, f"{requirement} is not met"
        extras = requirement.extras or {""}
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        key = f"{name}{sorted(requirement.extras)}"
        if key in found:
            continue
        found.add(key)
        for text in requires(name) or ():
            inner = Requirement(text)
            wanted = [inner.marker.evaluate({"extra": extra}) for extra in extras] if inner.marker else [True]
            if any(wanted):
                waiting.append(Requirement(text.split(";")[0]))
    assert {key.split("[")[0] for key in found} == set(lock)


def test_what_is_installed_is_what_is_locked() -> None:
    for name, exact in locked().items():
        try:
            assert Version(version(name)).public == str(exact), name
        except PackageNotFoundError:
            pytest.fail(f"{name} is locked and not installed", pytrace=False)


def test_a_python_that_is_too_old_is_named_before_anything_is_made(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "scripts/venv.sh", str(tmp_path / "venv")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHON": "false"},
        timeout=60,
    )
    assert done.returncode == 1
    assert "expected Python 3.11 or newer, found false" in done.stderr
    assert "hint: install Python 3.11" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_help_needs_nothing_installed(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text(encoding="utf-8"), encoding="utf-8")
    # The tests may run under make themselves, whose flags would be handed down.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}
    done = subprocess.run(["make"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()][:3] == ["help", "demo", "test"]
    assert not (tmp_path / ".venv").exists()


def test_a_wheel_holds_what_the_program_reads_and_the_sdist_builds_the_same_one(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        holds = {name: opened.read(name) for name in opened.namelist()}
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in filter(None, listed.split("\0")):
        top = path.partition("/")[0]
        if top in ("alphaloop", "configs", "docs", "migrations", "scheduler", "worker"):
            inside = f"alphaloop/{path}" if top in ("configs", "docs", "migrations") else path
            assert holds.get(inside) == (ROOT / path).read_bytes(), path
    assert wheel_of_sdist(tmp_path / "dist").read_bytes() == wheel.read_bytes()
