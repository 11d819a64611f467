"""Somebody deletes the topics of jobs after an election and makes them anew, so that other brokers lead them.

Messages that no worker had read are gone by this. Their sender sends them again at the end of the phase, and only
those, so that the faults that follow meet work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from alphaloop.errors import BrokerError
from alphaloop.kafka.topics import TopicIds, ensure_topics
from alphaloop.messages.topics import high_topic, jobs_topic
from tests.chaos.faults.fault import Fault, Target
from tests.chaos.lost_jobs import send_lost_again
from tests.chaos.reading import TopicReader
from tests.chaos.work import TASK

if TYPE_CHECKING:
    from tests.chaos.world import World

_TOPICS: Final = (jobs_topic(TASK), high_topic(TASK))
#: Until the controller counts a silent broker as gone, and the others lead its partitions.
_ELECTION_S: Final = 12.0
#: A topic of that name may still be going, and brokers that have just started answer late.
_MAKING_S: Final = 120.0
_AGAIN_S: Final = 0.5
#: Brokers learn of a new topic one after the other. A client that is told of the old one meanwhile sends to nobody.
_AGREEMENT_S: Final = 5.0


def _inject(world: World, rng: random.Random, seconds: float) -> None:
    if world.brokers.num_nodes > 1:
        number = rng.randrange(world.brokers.num_nodes)
        world.brokers.kill([number])
        try:
            world.wait(_ELECTION_S)
        finally:
            world.brokers.start([number])
    world.num_sent_before_anew = world.feeder.make_anew(lambda: _make_anew(world))
    world.wait(seconds)
    reader = TopicReader(world.brokers.addresses)
    world.num_sent_again += send_lost_again(world, reader)
    reader.close()


def _make_anew(world: World) -> None:
    reader, ids = TopicReader(world.brokers.addresses), TopicIds(world.kafka)
    old = ids.ask(_TOPICS)
    world.watcher.gone_ids.update(f"topic_id={one}" for one in old.values())
    for topic in _TOPICS:
        reader.delete(topic)
    reader.close()
    deadline = time.monotonic() + _MAKING_S
    while not _are_new(world, ids, old):
        if time.monotonic() > deadline:
            raise TimeoutError(f"topics not made anew in {_MAKING_S:.0f} s: {', '.join(_TOPICS)}")
        world.wait(_AGAIN_S)
    world.wait(_AGREEMENT_S)


def _are_new(world: World, ids: TopicIds, old: Mapping[str, str]) -> bool:
    try:
        ensure_topics(world.kafka, [TASK])
        now = ids.ask(_TOPICS)
    except BrokerError:
        return False  # the old ones are still going
    return now.keys() == old.keys() and not set(now.values()) & set(old.values())


FAULT: Final = Fault(
    "jobs topics made anew",
    "one broker killed and started again, then both lanes' topics deleted and made anew",
    Target.KAFKA,
    _inject,
)
