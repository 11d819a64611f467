"""Main memory of this process."""

from __future__ import annotations

import resource
import sys


def peak_process_bytes() -> int:
    """The most that it has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
