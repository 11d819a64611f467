"""The drift test of traffic: sequential, two-sided, with a memory that is stored between two runs.

`watch_traffic` is a run over all streams. docs/concepts/drift.md explains the test.
"""

from __future__ import annotations

from scheduler.drift.watching import watch_traffic

__all__ = ["watch_traffic"]
