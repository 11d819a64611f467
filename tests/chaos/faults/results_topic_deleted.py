"""Somebody deletes the results topic. What was on it was read before, as a consumer of results does."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from alphaloop.kafka.topics import RESULTS
from tests.chaos.faults.fault import Fault, Target
from tests.chaos.reading import TopicReader

if TYPE_CHECKING:
    from tests.chaos.world import World


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    reader = TopicReader(world.brokers.addresses)
    world.kept_results += reader.results()
    reader.delete(RESULTS)
    reader.close()
    world.deleted_at = datetime.now(UTC)
    world.wait(seconds)


FAULT: Final = Fault("results topic deleted", "the results topic deleted, and not created again", Target.KAFKA, _inject)
