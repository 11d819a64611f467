"""How many bytes a model takes on a device, and how many the device has left.

Keys and values of one position: 2 · layers · key/value heads · head size · bytes a number. The slot cache keeps every
position of every layer, so a layer with a sliding window counts like any other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from worker.decoding.network.kv_layout import KvShape

# Version 1 says "no limit" with the largest number of whole pages.
_UNLIMITED_BYTES: Final = 1 << 60
_LOGITS_BYTES: Final = 4  #: float32
_PROBABILITY_BYTES: Final = 8  #: float64, in which a sampled job is verified


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one position of one sequence in the slot cache; `config` is the model's."""
    return KvShape.of(config, dtype).bytes_per_token


def pass_bytes(vocabulary: int, num_rows: int) -> int:
    """Bytes that the rows of a pass (slots · width) take behind the head: logits, and probabilities where sampled."""
    return num_rows * vocabulary * (_LOGITS_BYTES + _PROBABILITY_BYTES)


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be taken on `device` before it, or the container around this process, runs out."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds without using it is free too.
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_host_bytes()


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of main memory left: what the kernel calls available, or less where a control group allows less.

    `root` is the file system to read, for tests.
    """
    limits = [_from_meminfo(root), *_from_control_groups(root)]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _from_meminfo(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _from_control_groups(root: Path) -> Iterator[int]:
    """What is left in this process's control group, and in every one around it, of either version."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        top = root / mount
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if (left := _left(folder, limit, usage, cache)) is not None:
                yield left
            if folder == top:
                break


def _left(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    allowed, used = (next(_lines(folder / name), "") for name in (limit, usage))
    if not allowed.isdigit() or not used.isdigit() or int(allowed) >= _UNLIMITED_BYTES:
        return None
    # Pages of files that were read once count as used, and are given up when memory is wanted.
    fields = (line.split() for line in _lines(folder / "memory.stat"))
    reclaimable = next((int(field[1]) for field in fields if field[0] == cache), 0)
    return int(allowed) - int(used) + reclaimable


def _lines(file: Path) -> Iterator[str]:
    try:
        yield from file.read_text(encoding="ascii").splitlines()
    except OSError:
        return
