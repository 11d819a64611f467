"""Fuzzed messages are jobs, or refused with a field that their sender can find, before anything else reads them.

Without a broker, so that many more are read. FUZZ_MESSAGES and the seed are those of the other fuzzers.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any, Final

import pytest

from alphaloop.engine import Sampling
from alphaloop.errors import MessageError
from alphaloop.kafka.offsets import Record
from alphaloop.messages import Job, Origin, encode_job, fields_of, parse_job, payload_digest
from alphaloop.messages.capabilities import EngineFeatures, Feature, features_of, refusal_of
from alphaloop.settings import TaskSettings
from tests.fuzz.mutations import mutated
from worker.intake.validation import sampling_of

NUM_MESSAGES: Final = int(os.environ.get("FUZZ_MESSAGES", "2000"))
NOBODY: Final = EngineFeatures("nobody", frozenset())
TASK: Final = TaskSettings(temperature=0.5)


@pytest.mark.timeout(180 + NUM_MESSAGES // 20)
def test_no_message_crashes_what_reads_it() -> None:
    chance = random.Random(int(os.environ.get("TEST_SEED", "0")))
    met: Counter[str] = Counter()
    for offset in range(NUM_MESSAGES):
        record = mutated(chance, offset)
        try:
            job = parse_job(record.value, Origin("c", record.topic, 0, offset), task="code")
            sampling = sampling_of(job, TASK)
        except MessageError as error:
            met[error.code] += 1
        else:
            met["jobs"] += 1
            met.update(f"asks for {one.value}" for one in check_job(job, sampling, record))
    print(sorted(met.items()))
    assert met["jobs"] > NUM_MESSAGES // 20
    assert NUM_MESSAGES < 2000 or met.keys() >= {f"asks for {one.value}" for one in Feature}, "the fuzzer knows all"


def check_job(job: Job, sampling: Sampling, record: Record) -> frozenset[Feature]:
    """What the parts behind rely on: it is written and read alike, and what it asks for stands somewhere in it."""
    again = parse_job(encode_job(job), Origin("other", "jobs.other", 0, 0), task=job.task, max_bytes=2**24)
    assert (again.body, payload_digest(again)) == (job.body, payload_digest(job))
    found = features_of(job.body, sampling)
    assert features_of(again.body, sampling_of(again, TASK)) == found
    if found:
        refusal = refusal_of(job.body, found, [NOBODY])
        assert refusal is not None
        assert is_there(refusal.field or "", fields_of(encode_job(job)) or {}), (refusal.field, record.value)
    return found


def is_there(path: str, fields: Any) -> bool:
    for part in path.split("."):
        if not isinstance(fields, dict | list):
            return False
        if isinstance(fields, list):
            fields = fields[int(part)]
        elif part not in fields:
            return False
        else:
            fields = fields[part]
    return True
