"""The id of a job is derived from its record, and a digest tells a redelivery from another payload."""

from __future__ import annotations

from dataclasses import replace

from alphaloop.messages import (
    Job,
    Origin,
    derived_job_id,
    parse_job,
    payload_digest,
)
from tests.fixtures.messages import read


def test_a_derived_id_names_the_record_and_nothing_else() -> None:
    record = Origin("cluster", "jobs.code", 2, 41, 1_700_000_000_000)
    others = {
        derived_job_id(replace(record, **change), b"{}")
        for change in (
            {"cluster": "other"},
            {"topic": "jobs.sql"},
            {"partition": 1},
            {"offset": 42},
            {"timestamp_ms": 1_700_000_000_001},
            {"timestamp_ms": None},
        )
    }
    same = derived_job_id(record, b"{}")
    assert derived_job_id(replace(record), b"{}") == same, "a redelivery is the same job"
    assert same not in others
    assert len(others) == 6


def test_offsets_that_begin_again_give_other_ids() -> None:
    first = Origin("cluster", "jobs.code", 0, 0, 1_700_000_000_000)
    after_a_restart = replace(first, timestamp_ms=1_700_000_060_000)
    assert derived_job_id(first, b"{}") != derived_job_id(after_a_restart, b"{}")


def test_another_payload_is_never_a_conflict_of_derived_ids() -> None:
    # A sender may set the timestamps of its records, to 0 for example.
    replayed = Origin("cluster", "jobs.code", 0, 0, 0)
    one, other = (parse_job(b'{"prompt": "' + text + b'"}', replayed, task="code") for text in (b"first", b"second"))
    assert one.job_id != other.job_id


def test_the_digest_tells_a_redelivery_from_a_conflict() -> None:
    job = read({"job_id": "a", "prompt": "x", "temperature": 1})
    chat = [{"role": "user", "content": "x"}]
    again = read({"temperature": 1.0, "priority": 0, "job_id": "a", "messages": chat} | {"stream": None})
    assert payload_digest(job) == payload_digest(again)
    for other in [{"prompt": "y"}, {"temperature": 0.5}, {"segment": "s"}, {"decoding": "vanilla"}, {"max_tokens": 5}]:
        assert payload_digest(read({"job_id": "a", "prompt": "x", "temperature": 1} | other)) != payload_digest(job)
    assert payload_digest(read({"job_id": "b", "prompt": "x", "temperature": 1})) == payload_digest(job)


def test_a_later_releases_new_field_does_not_turn_old_jobs_into_conflicts() -> None:
    class LaterJob(Job):
        lane: str = "normal"

    old = read({"prompt": "x"})
    assert payload_digest(LaterJob.model_validate(old.model_dump())) == payload_digest(old)
