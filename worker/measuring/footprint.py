"""What target and drafters take of the memory."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A model that is loaded. A drafter without weights is no part."""

    name: str
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_slot: int  #: of a sequence that fills the context


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of this process."""

    parts: tuple[Part, ...]
    peak_process_bytes: int  #: main memory, everything that was ever loaded among it
    device_bytes: int | None  #: the most that was held on a GPU between two texts; None on a CPU


def peak_process_bytes() -> int:
    """The most main memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
