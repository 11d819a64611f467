"""Another commit as a folder of its own, and which code a process would run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from alphaloop.settings import KafkaSettings
from benchmarks.reporting import REPOSITORY, commit_of
from benchmarks.servers import Servers
from benchmarks.workers import check_imports, environment_of, worktree


def git(folder: Path, *arguments: str) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    identity = {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=own | identity, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for content in ("old", "new"):
        (folder / "file").write_text(content, encoding="utf-8")
        git(folder, "add", "file")
        git(folder, "commit", "--quiet", "--message", content)
    return folder


def test_a_worktree_holds_the_commit_and_leaves_nothing_behind(repository: Path, tmp_path: Path) -> None:
    before = commit_of(repository, "HEAD~1")
    with worktree(repository, before, tmp_path / "baseline") as folder:
        assert (folder / "file").read_text(encoding="utf-8") == "old"
    assert not (tmp_path / "baseline").exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert git(repository, "status", "--porcelain") == ""


def test_what_a_killed_run_left_is_replaced(repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "baseline"
    git(repository, "worktree", "add", "--detach", str(folder), "HEAD")
    with worktree(repository, commit_of(repository, "HEAD~1"), folder):
        assert (folder / "file").read_text(encoding="utf-8") == "old"


def environment(checkout: Path, tmp_path: Path) -> dict[str, str]:
    servers = Servers(KafkaSettings(bootstrap_servers="b:1"), "postgresql://d", tmp_path)
    return environment_of(checkout, servers, database_url="postgresql://d", num_slots=8, data_dir=tmp_path)


def test_a_process_that_imports_another_checkout_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for package in ("alphaloop", "worker"):
        (other / package).mkdir(parents=True)
        (other / package / "__init__.py").write_text("", encoding="utf-8")
    check_imports(other, environment(other, tmp_path))
    with pytest.raises(RuntimeError, match="the process imports"):
        check_imports(REPOSITORY, environment(other, tmp_path))
