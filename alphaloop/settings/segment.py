"""`[segments.NAME]`: what jobs of one customer or product may take from others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import Field

from alphaloop.settings.section import Section

#: The table of every segment that has none of its own, and of the jobs without a segment.
OTHERS: Final = "*"


class SegmentSettings(Section):
    """One segment of configs/tasks.toml. `"*"` is the table of each one without its own, and of jobs without one."""

    weight: float = Field(
        1.0, ge=0.01, le=100.0
    )  #: while several segments of a task have waiting jobs, they share its device time in proportion to their weights
    max_waiting_jobs: int | None = Field(
        None, ge=1
    )  #: requests of its API batches that may wait; meanwhile a new batch is told to come later. Unset: any number


def settings_of_segment(segments: Mapping[str, SegmentSettings], segment: str) -> SegmentSettings:
    """The settings of a segment; the empty one is that of jobs without a segment."""
    return segments.get(segment) or segments.get(OTHERS) or _DEFAULTS


_DEFAULTS: Final = SegmentSettings()
