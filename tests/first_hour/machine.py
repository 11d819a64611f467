"""An empty machine: a fresh checkout, a fresh home, and nothing of the environment that would change what is tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def fresh_environment(home: Path) -> dict[str, str]:
    """The environment of a new user, who has this machine's programs and, if it is here, Apache Kafka."""
    home.mkdir()
    own = ("ALPHALOOP_", "XDG_", "MAKE", "MFLAGS", "PYTEST", "VIRTUAL_ENV", "KAFKA_", "DATABASE_URL")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    if kafka := find_kafka_home(Settings()):
        environment["KAFKA_HOME"] = str(kafka)
    return {**environment, "HOME": str(home)}
