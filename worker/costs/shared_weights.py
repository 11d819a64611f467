"""Shared-weight drafters take the same time: one of them is measured and corrected, the others have its times.

Measured apart they would differ by noise, and rounds would correct only the drafter in use.
"""

from __future__ import annotations

from collections.abc import Sequence

from alphaloop.deciding.goodput import DrafterState


def timed_by(drafters: Sequence[DrafterState]) -> dict[str, str]:
    """By drafter, the drafter whose times it has: of those with its weights the one with the longest drafts.

    Of several the first. Drafters that are measured themselves are not in the mapping.
    """
    longest: dict[str, DrafterState] = {}
    for drafter in drafters:
        known = longest.get(drafter.shared_weights)
        if drafter.shared_weights and (known is None or drafter.max_draft_tokens > known.max_draft_tokens):
            longest[drafter.shared_weights] = drafter
    whose = {drafter.name: longest[drafter.shared_weights].name for drafter in drafters if drafter.shared_weights}
    return {name: other for name, other in whose.items() if name != other}
