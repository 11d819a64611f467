"""Whether the machine did other work while it was measured: vanilla's own rounds should all take about as long."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Final

from worker.measuring.observations import Observation

#: Of the middle half of the prompts, the slowest over the fastest round. A longer context adds a few per cent.
_USUAL_SPREAD: Final = 1.25
_LEAST: Final = 8  #: prompts: quarters of fewer say nothing


def busy_note(vanilla: Sequence[Observation], load: float | None, num_cores: int) -> str | None:
    """A remark for the report, or None where vanilla's rounds took alike. `load` is the system's load average."""
    ms = sorted(1000 * o.times.round_s / o.times.num_steps for o in vanilla if o.times.num_steps)
    if len(ms) < _LEAST:
        return None
    low, _, high = statistics.quantiles(ms, n=4)
    if high <= _USUAL_SPREAD * low:
        return None
    why = "the machine seems to have been busy with other work"
    if load is not None and load > num_cores:
        why = f"the machine was busy with other work (load {load:.1f} on {num_cores} cores)"
    return (
        f"vanilla's own rounds took {low:.1f} to {high:.1f} ms in the middle half of the prompts: {why}. "
        "Ratios suffer less than times, because a prompt is compared with itself at almost the same time; "
        "on a quiet machine all bounds are narrower"
    )


def load_average() -> float | None:
    """Of the last five minutes; None where the system does not tell."""
    return os.getloadavg()[1] if hasattr(os, "getloadavg") else None
