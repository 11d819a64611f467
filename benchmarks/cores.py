"""Which cores servers have, and which ones what is measured has."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Processes and threads that this thread starts in the block run on these cores; without any, wherever they may."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def split_cores(servers: Collection[int]) -> tuple[set[int], set[int]]:
    """The servers' cores and all others; without any for the servers alone, all for both.

    Raises ValueError where this process does not have those cores, or would have no other.
    """
    own = os.sched_getaffinity(0)
    if not servers:
        return own, own
    wanted = set(servers)
    if not wanted < own:
        raise ValueError(
            f"--server-cores: expected some of the cores {sorted(own)} and not all, found {sorted(wanted)}"
        )
    return wanted, own - wanted
