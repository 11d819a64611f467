"""One part of a run: a fleet, its jobs, the phases over which they are spread, and the settling at its end."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from confluent_kafka import KafkaException

from tests.chaos.collecting import ended_by, letters_of, num_in_outbox, send_lost_again
from tests.chaos.feeder import Feeder
from tests.chaos.fleet import Fleet
from tests.chaos.ledger import Place, ResultRecord
from tests.chaos.oracle import refusals
from tests.chaos.phases import PhaseReport, run_phase
from tests.chaos.plan import Phase, sending_s
from tests.chaos.reading import TopicReader
from tests.chaos.setting_up import GROUP
from tests.chaos.size import Size
from tests.chaos.watcher import Watcher
from tests.chaos.work import PlannedJob
from tests.chaos.world import Servers, World

_LOOK_S: Final = 1.0
#: From an outcome, or a dead letter, to the moment in which the brokers have taken its result.
_DELETING: Final = timedelta(seconds=2)
#: Until every worker of a fleet has partitions.
_START_S: Final = 600.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Part:
    """What is to be played."""

    fleet: Fleet
    jobs: Sequence[PlannedJob]
    phases: Sequence[Phase]


@dataclass(frozen=True, slots=True)
class Played:
    """What came of it."""

    phases: tuple[PhaseReport, ...]
    sent: tuple[frozenset[str], ...]  #: the jobs that were sent in each phase and in the time to catch up after it
    settled_s: float | None  #: from the last fault until nothing was left to read or publish; None: never
    earlier_results: tuple[ResultRecord, ...]  #: of a results topic that was deleted
    refused: dict[Place, str]  #: the records of messages that are no jobs, and their keys
    may_be_gone: set[Place]  #: of these, records that went with a topic, or whose results may have
    num_asked_again: int  #: jobs sent again, because their messages or results went with a deleted topic
    exit_codes: dict[str, int]  #: of workers that did not drain with 0


def play(part: Part, size: Size, servers: Servers, watcher: Watcher, rng: random.Random, say: Say) -> Played:
    """Start the fleet, inject the faults under load, send the rest, wait until all is settled, stop the fleet."""
    fleet, addresses = part.fleet, servers.brokers.addresses
    jobs_per_s = len(part.jobs) / sending_s(part.phases)
    feeder = Feeder(addresses, part.jobs, jobs_per_s=jobs_per_s, rng=rng)
    world = World(size, servers, watcher, fleet, feeder, num_ended_before=watcher.num_ended)
    with ExitStack() as stack:
        stack.callback(fleet.close)
        stack.callback(feeder.close)
        stack.callback(world.is_ending.set)
        fleet.start()
        watcher.fleets.append(fleet)
        _await_all(world)
        feeder.start()
        reports, sent = [], []
        for phase in part.phases:
            say(f"{fleet.name} fleet: {phase.name}, {phase.seconds:.0f} s; backlog {world.backlog}")
            num_before = feeder.num_sent
            reports.append(run_phase(phase, world))
            sent.append(frozenset(job.job_id for job in feeder.sent[num_before:]))
        say(f"{fleet.name} fleet: the rest of {len(part.jobs)} jobs, then settling; backlog {world.backlog}")
        feeder.finish()
        reader = TopicReader(addresses, watcher.gone_ids)
        stack.callback(reader.close)
        settled_s = _settle(world, reader)
        num_again = _ask_again(world, reader, part.jobs) + send_lost_again(world, reader)
        if num_again:
            say(f"{num_again} jobs sent again, because their messages or results went with a deleted topic")
            settled_s = _settle(world, reader)
        codes = fleet.stop()
        num_again += world.num_sent_again
        kept, refused = tuple(world.kept_results), feeder.refused
        return Played(tuple(reports), tuple(sent), settled_s, kept, refused, feeder.may_be_gone, num_again, codes)


def _await_all(world: World) -> None:
    began = time.monotonic()
    while len(world.fleet.ready()) < len(world.fleet.members):
        if time.monotonic() - began > _START_S:
            raise TimeoutError(
                f"not all workers took partitions in {_START_S:.0f} s; see the logs of {world.fleet.name}"
            )
        world.wait(_LOOK_S / 2)


def _settle(world: World, reader: TopicReader) -> float | None:
    """Wait until no message is unread and no result unpublished; how long it took. None: nothing moved for too long."""
    began_s = moved_s = time.monotonic()
    least_left, most_ended = math.inf, 0
    while time.monotonic() - moved_s < world.size.settle_s:
        num_left: float = num_in_outbox(world.servers.database_url)
        try:
            num_left += sum(reader.lag(GROUP).values())
        except KafkaException:
            num_left = least_left  # a coordinator is being elected
        if not num_left:
            return time.monotonic() - began_s
        num_ended = world.watcher.num_ended
        if num_left < least_left or num_ended > most_ended:
            least_left, most_ended, moved_s = min(num_left, least_left), num_ended, time.monotonic()
        world.wait(_LOOK_S)
    return None


def _ask_again(world: World, reader: TopicReader, jobs: Sequence[PlannedJob]) -> int:
    """Send those jobs again whose results were on the deleted topic and had not been read; returns how many.

    Only what was recorded before the deletion may be missing, and what was refused: later results have to wait for a
    topic.
    """
    if world.deleted_at is None:
        return 0
    results, until = [*world.kept_results, *reader.results()], world.deleted_at + _DELETING
    missing = ended_by(world.servers.database_url, until) - {record.job_id for record in results}
    written = {one.place for one in letters_of(reader) if one.written_at_ms < 1000 * until.timestamp()}
    unanswered = written & world.feeder.refused.keys() - refusals(results).keys()
    world.feeder.may_be_gone |= unanswered
    missing |= {world.feeder.refused[place] for place in unanswered}
    again = [job for job in jobs if job.job_id in missing]
    world.feeder.send_again(again)
    return len(again)
