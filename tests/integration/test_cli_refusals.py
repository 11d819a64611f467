"""Refused messages as commands show them: from `results` while they wait, and from the dead letter later."""

from __future__ import annotations

import json

import pytest

from alphaloop.errors import InvalidField
from alphaloop.settings import Settings
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.worker import Client, running_worker, write_letter

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


def lines(*jobs: dict[str, object]) -> bytes:
    return "\n".join(map(json.dumps, jobs)).encode()


def test_who_waits_hears_of_a_refusal_and_who_asks_later_gets_the_same_answer(
    stack_cli: Cli, worker_settings: Settings
) -> None:
    client = Client(worker_settings)
    with running_worker(worker_settings, FakeEngine()):
        client.send("code", [lines({"job_id": "order", "prompt": "the first"})])
        client.results(1)
        conflict = {"job_id": "order", "task": "code", "prompt": "another"}
        waited = stack_cli("enqueue", "--file", "-", "--output", "-", "--timeout", 60, stdin=lines(conflict))
        client.send("code", [lines({"job_id": "wrong", "prompt": "x", "temperature": 9, "custom_id": "c"})])
        followed = stack_cli("tail", "wrong", "--json", "--timeout", 60)
        answers = {record.key: json.loads(record.value or b"") for record in client.refusals(2)}
        asked = stack_cli("wait", "wrong", "--json", "--timeout", 60)
        told = stack_cli("job", "wrong", "order", "--json").json
    row = json.loads(waited.out)
    assert (waited.code, row["status"], row["claimed_job_id"]) == (1, "refused", "order")
    assert "order: refused, job_conflict" in waited.err
    assert row == answers[row["job_id"].encode()]
    end = json.loads(followed.out.splitlines()[-1])
    assert (followed.code, end["job_id"], end["status"]) == (1, "wrong", "refused")
    assert (asked.code, json.loads(asked.out)) == (1, answers[b"wrong"]), "the dead letter gives the same answer"
    assert [(one["place"], one["status"]) for one in told] == [("refused", "refused"), ("ended", "succeeded")]


def test_a_refused_message_whose_offset_is_not_committed_yet_does_not_wait(
    stack_cli: Cli, worker_settings: Settings
) -> None:
    """No worker runs, so that the message stays behind the group's offset."""
    client = Client(worker_settings)
    value = lines({"job_id": "wrong", "prompt": "x", "temperature": 9})
    client.send("code", [value], partition=0)
    assert stack_cli("job", "wrong", "--json").json[0]["place"] == "waiting"
    for offset, place in ((7, "waiting"), (0, "refused")):  # of another message with this id, of this one
        write_letter(worker_settings.kafka, InvalidField("too hot", field="temperature"), value, offset=offset)
        assert stack_cli("job", "wrong", "--json").json[0]["place"] == place
        told = stack_cli("tail", "wrong", "--timeout", 0).err, stack_cli("wait", "wrong", "--timeout", 0).err
        assert all(("too hot" in one) == (place == "refused") for one in told), "one that was sent again waits"
