"""What a round costs on this device, measured through the engine's seam."""

from __future__ import annotations

from collections.abc import Iterable

from alphaloop.cost import CostPoint
from worker.engine import Engine


def calibrate(engine: Engine, batches: Iterable[int], widths: Iterable[int], num_samples: int) -> list[CostPoint]:
    """One point a shape, the target's first, then each drafter's own.

    A drafter is measured from width 2, one proposed token, up to the widest it can fill: width 1 asks nothing of it.
    """
    shapes = [(batch, width) for batch in sorted(set(batches)) for width in sorted(set(widths))]
    points = [
        CostPoint(None, batch, width, engine.measure_round_ms(None, batch, width, num_samples), num_samples)
        for batch, width in shapes
    ]
    for drafter in engine.drafters:
        points += [
            CostPoint(
                drafter.name,
                batch,
                width,
                engine.measure_round_ms(drafter.name, batch, width, num_samples),
                num_samples,
            )
            for batch, width in shapes
            if 1 < width <= drafter.max_draft_tokens + 1
        ]
    return points
