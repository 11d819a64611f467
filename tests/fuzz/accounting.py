"""Records of every kind through workers that are killed; then `results` alone has to account for each of them.

Good jobs, jobs that fail or expire, repeated ones, conflicts, forged probes, poison and fuzzed messages are sent.
Workers die by kill -9 meanwhile. Then every record is delivered again, and every dead letter is sent again.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from pydantic import SecretStr

from alphaloop.dead_letters.reading import DeadLetterFilter
from alphaloop.dead_letters.redriving import Redrive
from alphaloop.kafka.topics import RESULTS, cluster_id, ensure_topics
from alphaloop.messages import Origin, Result, Status, derived_job_id, fields_of
from alphaloop.messages.topics import high_topic, jobs_topic
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import RedriveStore
from tests.chaos.collecting import num_in_outbox
from tests.chaos.fleet import Fleet
from tests.chaos.ledger import Place, ResultRecord
from tests.chaos.oracle import refusals
from tests.chaos.reading import TopicReader, key_of
from tests.chaos.setting_up import GROUP, null_fleet, running_servers
from tests.chaos.size import SHORT
from tests.chaos.work import TASK, Fate, null_jobs
from tests.chaos.world import Servers
from tests.fuzz.mutations import mutated

Say = Callable[[str], None]

FUZZED_TASK: Final = "code"
UNKNOWN_TASK: Final = "unknown"
#: Where fuzzed records go; their jobs name the task of the first.
_FUZZED_TOPICS: Final = (*[jobs_topic(FUZZED_TASK)] * 12, high_topic(FUZZED_TASK), jobs_topic(UNKNOWN_TASK))
_TOPICS: Final = (jobs_topic(TASK), high_topic(TASK), *dict.fromkeys(_FUZZED_TOPICS))
_SHARES: Final = {"job": 0.8, "fuzzed": 0.1, "repeated": 0.04, "conflict": 0.04, "forged": 0.02}
#: Of the jobs.
_PLANTED: Final = {Fate.REFUSED: 0.05, Fate.FAILS: 0.002, Fate.FAILS_FIRST: 0.005, Fate.EXPIRES: 0.01}
_FLUSH_S: Final = 600.0
_LOOK_S: Final = 0.5
#: After so long without a new result something is stuck.
_STILL_S: Final = 300.0


@dataclass(slots=True)
class Account:
    """What was sent, and what `results` says of it."""

    sent: Mapping[Place, frozenset[str]]  #: every record with the job_ids that it may be answered under
    num_redriven: int  #: of these, records that a redrive sent
    refused: Mapping[Place, set[bytes]]  #: the different refused results of each record
    ended: Mapping[str, set[bytes]]  #: the different results of each job
    num_results: int
    num_kills: int
    wrong: list[str] = field(init=False)

    def __post_init__(self) -> None:
        known = frozenset().union(*self.sent.values())
        self.wrong = [
            *(f"{place} has no answer" for place in self.sent if not self.is_answered(place)),
            *(f"{place} was refused and not sent" for place in self.refused.keys() - self.sent.keys()),
            *(f"{place} has several answers" for place, values in self.refused.items() if len(values) > 1),
            *(f"{job_id} ended and was not sent" for job_id in self.ended.keys() - known),
            *(f"{job_id} has several results" for job_id, values in self.ended.items() if len(values) > 1),
        ]

    def is_answered(self, place: Place) -> bool:
        """Whether the record was refused, or its job has ended."""
        return place in self.refused or not self.ended.keys().isdisjoint(self.sent[place])

    def told(self) -> str:
        """In words."""
        results = [Result.decode(next(iter(values))) for values in (*self.ended.values(), *self.refused.values())]
        by_status = Counter(result.status.value for result in results)
        by_code = Counter(result.error.code for result in results if result.status is Status.REFUSED and result.error)
        num_answered = sum(map(self.is_answered, self.sent))
        return (
            f"{len(self.sent):,} records, {self.num_redriven:,} of them redriven; {self.num_kills} workers killed; "
            f"{num_answered:,} answered ({num_answered / len(self.sent):.2%}); {self.num_results:,} results, "
            f"{len(results):,} different: {dict(by_status)}, refused: {dict(by_code)}; wrong: {len(self.wrong)}"
        )


def account(num_records: int, num_kills: int, seed: int, kafka_home: Path, folder: Path, say: Say) -> Account:
    """Play so many records in `folder`, with servers of their own, and account for them."""
    size = replace(SHORT, num_workers=2, round_s=0.0)
    with ExitStack() as stack:
        say(f"seed {seed}; starting a broker and Postgres")
        servers = stack.enter_context(running_servers(size, kafka_home, folder))
        ensure_topics(servers.kafka, [FUZZED_TASK, UNKNOWN_TASK], high=[FUZZED_TASK])
        run = _Run(servers, num_records, num_kills, random.Random(seed))
        stack.callback(run.reader.close)
        for work in (run.send, run.redeliver, run.redrive):
            fleet = null_fleet(size, folder / work.__name__, servers, [TASK, FUZZED_TASK])
            stack.callback(fleet.close)
            run.play(work, fleet)
            say(f"{work.__name__}: {run.num_results:,} results, {run.num_kills} workers killed so far")
        say("reading the results")
        return run.account()


class _Run:
    def __init__(self, servers: Servers, num_records: int, most_kills: int, rng: random.Random) -> None:
        self.reader: Final = TopicReader(servers.brokers.addresses)
        self.num_kills = 0
        self._servers, self._num_records, self._most_kills, self._rng = servers, num_records, most_kills, rng
        self._cluster = cluster_id(servers.kafka)
        self._sent: dict[Place, frozenset[str]] = {}
        self._num_redriven = 0
        self._errors: list[KafkaError] = []
        self._told = "nobody was asked"  #: what was missing when it was looked last

    @property
    def num_results(self) -> int:
        """On the topic now."""
        return sum(self.reader.end_offsets(RESULTS).values())

    def play(self, work: Callable[[], None], fleet: Fleet) -> None:
        """Do the work while the fleet works, and kill its workers now and then, until nothing is left to read."""
        failures: list[BaseException] = []
        begin = self.num_results

        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=guarded, name="work", daemon=True)
        thread.start()
        if work == self.redeliver:
            thread.join()  # while nobody is in the group
        fleet.start()
        moved_s, last, num_kills = time.monotonic(), -1, 0
        while thread.is_alive() or not self._is_settled():
            assert time.monotonic() - moved_s < _STILL_S, f"nothing moved for {_STILL_S:.0f} s; {self._told}"
            try:
                now = self.num_results
            except KafkaException as error:
                self._told = f"the results topic does not answer: {error}"
                time.sleep(_LOOK_S)  # the broker is busy
                continue
            if now != last:
                last, moved_s = now, time.monotonic()
            # No more than these: each kill has records delivered again, and so brings new results by itself.
            due = (num_kills + 0.5) * self._num_records / self._most_kills
            if num_kills < self._most_kills and now - begin > due and (ready := fleet.ready()):
                fleet.kill(self._rng.choice(ready))
                num_kills += 1
                self.num_kills += 1
            time.sleep(_LOOK_S)
        assert not failures, failures
        assert fleet.stop() == {}

    def _is_settled(self) -> bool:
        try:
            behind = {where: number for where, number in self.reader.lag(GROUP).items() if number}
        except KafkaException as error:
            self._told = f"the group does not answer: {error}"
            return False  # a coordinator is being elected
        num_unsent = num_in_outbox(self._servers.database_url)
        self._told = f"records that are not finished: {behind}; results in the outbox: {num_unsent}"
        return not behind and not num_unsent

    def send(self) -> None:
        """Send all of them, and note their places."""
        own = {"enable.idempotence": True, "linger.ms": 20, "message.max.bytes": 8 << 20, "compression.type": "lz4"}
        producer = Producer({"bootstrap.servers": self._servers.brokers.addresses, **own})
        for topic, value, more in self._records():
            while True:
                try:
                    producer.produce(topic, value, **more, on_delivery=partial(self._delivered, value))
                except BufferError:
                    producer.poll(0.1)
                else:
                    break
            producer.poll(0)
        assert producer.flush(_FLUSH_S) == 0
        assert not self._errors, self._errors[:3]

    def redeliver(self) -> None:
        """Have every record delivered again: the group, which is empty, begins anew."""
        begin = [TopicPartition(topic, number, 0) for topic in _TOPICS for number in self.reader.end_offsets(topic)]
        with closing(Consumer({"bootstrap.servers": self._servers.brokers.addresses, "group.id": GROUP})) as consumer:
            consumer.commit(offsets=begin, asynchronous=False)

    def redrive(self) -> None:
        """Send every dead letter again."""
        database = Database(SecretStr(self._servers.database_url))
        with closing(database):
            done = Redrive(Settings(kafka=self._servers.kafka), RedriveStore(database), {}, again=False, dry_run=False)
            done.run(DeadLetterFilter(), None)
        assert done.num_sent > 0
        self._num_redriven = done.num_sent

    def account(self) -> Account:
        """Of all records that lie on the topics of jobs now."""
        num_sent = len(self._sent)
        for message in (message for topic in _TOPICS for message in self.reader.stream(topic)):
            self._note(message, message.value())
        assert len(self._sent) == num_sent + self._num_redriven
        ended: dict[str, set[bytes]] = defaultdict(set)
        refused: dict[Place, set[bytes]] = defaultdict(set)
        for message in self.reader.stream(RESULTS):
            record = ResultRecord(key_of(message), message.value() or b"")
            if found := refusals([record]):
                for place, values in found.items():
                    refused[place] |= values
            else:
                ended[record.job_id].add(record.value)
        return Account(self._sent, self._num_redriven, dict(refused), dict(ended), self.num_results, self.num_kills)

    def _records(self) -> Iterator[tuple[str, bytes | None, Mapping[str, Any]]]:
        rng = self._rng
        kinds = Counter(rng.choices(list(_SHARES), list(_SHARES.values()), k=self._num_records))
        planted = {fate: int(share * kinds["job"]) for fate, share in _PLANTED.items()}
        jobs = null_jobs(kinds["job"], planted, rng=rng, sending_s=1.0)
        order = [kind for kind, number in kinds.items() for _ in range(number)]
        rng.shuffle(order)
        earlier = [(jobs_topic(TASK), "first", b'{"job_id": "first", "prompt": "the first one"}')]
        for number, kind in enumerate(order):
            topic, key, value = rng.choice(earlier)
            if kind == "job":
                job = next(jobs)
                topic, key, value = job.topic, job.job_id, job.value
                if job.fate is Fate.SUCCEEDS:
                    earlier.append((topic, key, value))
            elif kind == "fuzzed":
                record = mutated(rng, number)
                yield rng.choice(_FUZZED_TOPICS), record.value, {"key": record.key, "headers": list(record.headers)}
                continue
            elif kind == "conflict":
                value = json.dumps({"job_id": key, "prompt": f"another one, {number}"}).encode()
            elif kind == "forged":
                value = json.dumps({"job_id": key, "prompt": f"made up, {number}", "purpose": "probe"}).encode()
            yield topic, value, {"key": key}

    def _delivered(self, value: bytes | None, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._errors.append(error)
        else:
            self._note(message, value)

    def _note(self, message: Message, value: bytes | None) -> None:
        place = Place(message.topic() or "", message.partition() or 0, message.offset() or 0, message.timestamp()[1])
        if place not in self._sent:
            own = (fields_of(value) or {}).get("job_id")
            derived = derived_job_id(Origin(self._cluster, *place), value or b"")
            self._sent[place] = frozenset({derived, own} if isinstance(own, str) else {derived})


def shown(wrong: Sequence[str], most: int = 20) -> str:
    """The first of them."""
    return "\n".join([*wrong[:most], *([f"… and {len(wrong) - most} more"] if len(wrong) > most else [])])
