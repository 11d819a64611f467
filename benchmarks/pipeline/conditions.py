"""The machine and the moment that the figures belong to."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from alphaloop.embedded.install import find_java, java_version


def conditions(folder: Path) -> dict[str, Any]:
    """Hardware, versions, the file system of the servers' data, and how busy the machine was before the run."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    java = find_java()
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "java": java_version(java) if java else None,
        "file_system": _file_system(folder),
        "load_before": os.getloadavg()[0],
    }


def _file_system(folder: Path) -> str | None:
    """The type of the file system that holds `folder`; None where /proc does not tell."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return None
    folder = folder.resolve()
    found = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    holding = [(point, kind) for point, kind in found if folder.is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]))[1] if holding else None
