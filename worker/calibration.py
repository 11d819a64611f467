"""What a round costs on this device, measured through the engine's seam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from alphaloop.cost import CostPoint
from worker.engine import Engine

#: A burst of somebody else's work lasts longer than one shape's samples: everything is measured in this many passes.
NUM_PASSES: Final = 3


def calibrate(engine: Engine, batches: Iterable[int], widths: Iterable[int], num_samples: int) -> list[CostPoint]:
    """One point a shape, the target's first, then each drafter's own: the least of its medians over the passes.

    Other work on the machine only ever adds to a time, and a decision rests on ratios between shapes, so one shape
    measured in a busy moment would distort every decision. A drafter is measured from width 2, one proposed token, up
    to the widest it can fill: width 1 asks nothing of it.
    """
    shapes = [(batch, width) for batch in sorted(set(batches)) for width in sorted(set(widths))]
    wanted: list[tuple[str | None, int, int]] = [(None, batch, width) for batch, width in shapes]
    for drafter in engine.drafters:
        widest = drafter.max_draft_tokens + 1
        wanted += [(drafter.name, batch, width) for batch, width in shapes if 1 < width <= widest]
    least: dict[tuple[str | None, int, int], float] = {}
    for _ in range(NUM_PASSES):
        for shape in wanted:
            median_ms = engine.measure_round_ms(*shape, 256, num_samples)
            least[shape] = min(median_ms, least.get(shape, median_ms))
    return [CostPoint(*shape, median_ms, NUM_PASSES * num_samples) for shape, median_ms in least.items()]
