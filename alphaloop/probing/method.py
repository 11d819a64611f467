"""How a drafter is measured on a prompt: decoded, or scored on the control's text. Pure.

Both give the same counts. A score costs one pass of the draft in place of a text, but it does not run what an engine
may do wrong: rounds, caches, verification. So where the engine itself is in question, every prompt is decoded. Where a
measurement is merely old, a share of its prompts is decoded, for the watch over exactness, and the rest is scored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from datetime import datetime
from math import ceil

from alphaloop.probing.due import Due


def num_decoded(due: Due, num_prompts: int, decoded_share: float) -> int:
    """How many of the prompts of a measurement are decoded with the drafter: at least one."""
    return max(1, ceil(decoded_share * num_prompts)) if due.is_scored else num_prompts


def decoded_positions(
    due: Due, positions: Collection[int], scheduled_for: datetime, decoded_share: float
) -> frozenset[int]:
    """Which ones: drawn by lot for each run, so that every prompt gets its turn. The same run draws the same."""

    def lot(position: int) -> bytes:
        return hashlib.sha256(f"{due.task} {scheduled_for.timestamp()} {position}".encode()).digest()

    return frozenset(sorted(positions, key=lot)[: num_decoded(due, len(positions), decoded_share)])
