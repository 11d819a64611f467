"""Dead letters from the command line, on a real broker and a real database: listed, shown, sent again, deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
from sqlalchemy import text

from alphaloop.errors import InvalidField, MalformedMessage, UnknownTask
from alphaloop.kafka.consumer import Consumer
from alphaloop.kafka.topics import RESULTS, ensure_topics
from alphaloop.messages import DeadLetter, Failure, Result, Status
from alphaloop.messages.topics import high_topic, jobs_topic
from alphaloop.settings import Settings
from alphaloop.store.database import Database
from alphaloop.store.known_jobs import RedriveStore
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.worker import Client, everything, running_worker, write_letter
from tests.integration.test_worker_retries import UnluckyEngine, asking

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

SECRET = "the prompt that nobody may list"
Write = Callable[..., DeadLetter]


@pytest.fixture
def client(worker_settings: Settings, stack_cli: Cli) -> Client:
    return Client(worker_settings)


@pytest.fixture
def write(worker_settings: Settings, client: Client) -> Write:
    """Writes a dead letter."""
    return partial(write_letter, worker_settings.kafka)


def test_a_failed_job_is_redriven_once_and_both_outcomes_stand(
    cli: Cli, client: Client, worker_settings: Settings, database: Database
) -> None:
    client.send("code", [asking("bad one", job_id="order-17", custom_id="mine", batch_id="monday")])
    with running_worker(worker_settings, UnluckyEngine({"bad": 99})):
        (failed,) = client.results(1)
        client.read(["jobs.code.dlq"], lambda found: bool(found))
    (listed,) = cli("dlq", "list", "--task", "code", "--json").json
    assert (listed["job_id"], listed["code"], listed["redriven"]) == ("order-17", "decode_failed", False)
    for _ in range(2):  # a second run finds it marked
        assert cli("dlq", "redrive", "--task", "code", "--code", "decode_failed", "--json").code == 0
    again = cli("dlq", "redrive", "--task", "code", "--code", "decode_failed", "--again", "--json").json
    assert (again["sent"], again["sent_before"]) == (1, 0)
    engine = FakeEngine(num_slots=4)
    with running_worker(worker_settings, engine):
        records = client.read([RESULTS], lambda found: len(found) >= 3)
    assert cli("dlq", "list", "--task", "code", "--json").json[0]["redriven"] is True
    copies = [record for record in records if record.key == b"order-17~1"]
    assert len({record.value for record in copies}) == 1, "sent twice, decoded once"
    result = Result.decode(copies[0].value or b"")
    assert (result.status, result.redrive_of, result.custom_id) == (Status.SUCCEEDED, "order-17", "mine")
    rows = dict(database.rows(text("SELECT job_id, outcome->>'status' FROM jobs")))  # type: ignore[arg-type]
    assert rows == {"order-17": "failed", "order-17~1": "succeeded"}
    assert failed.status is Status.FAILED
    assert [job["job_id"] for job in cli("job", "order-17", "--json").json] == ["order-17", "order-17~1"]
    for command in (("wait", "order-17"), ("wait", "--batch-id", "monday"), ("tail", "order-17")):
        assert (ran := cli(*command, "--timeout", 60)).code == 0, "the newest of it succeeded"
        assert ran.out == f"{result.text}\n"
    assert "order-17~1: ended succeeded" in cli("cancel", "order-17").out
    assert cli("explain", "--job", "order-17").code == 0
    (letter,) = cli("dlq", "list", "--job-id", "order-17", "--json").json
    assert (letter["job_id"], letter["redriven"]) == ("order-17", True)
    assert cli("erase", "--job", "order-17", "--yes", "--json").json["num_jobs"] == 2
    erased = dict(database.rows(text("SELECT job_id, outcome->>'text' FROM jobs")))  # type: ignore[arg-type]
    assert erased == {"order-17": None, "order-17~1": None}


def test_letters_are_chosen_corrected_and_sent_where_they_came_from(
    cli: Cli, write: Write, worker_settings: Settings
) -> None:
    ensure_topics(worker_settings.kafka, (), high=["code"])
    hot, trace = b'{"job_id": "hot", "prompt": "x", "temperature": 9}', (("traceparent", b"00-1"),)
    write(InvalidField("expected at most 2", field="body.temperature"), hot, topic=high_topic("code"), headers=trace)
    write(UnknownTask(), b'{"prompt": "no id"}', offset=7)
    write(MalformedMessage(), b"no JSON")
    arguments = ("dlq", "redrive", "--task", "code", "--json")
    ran = cli(*arguments, "--code", "invalid_field")
    assert ran.code == 1
    assert (ran.json["sent"], ran.json["wrong"], ran.json["problems"][0]["code"]) == (0, 1, "invalid_field")
    tried = cli(*arguments, "--code", "invalid_field", "--set", "temperature=0.5", "--dry-run")
    assert (tried.code, tried.json["sent"]) == (0, 1)
    assert everything(worker_settings.kafka, high_topic("code")) == []
    assert cli(*arguments, "--code", "invalid_field", "--set", "temperature=0.5").json["sent"] == 1
    (sent,) = everything(worker_settings.kafka, high_topic("code"))
    assert json.loads(sent.value or b"") == {"job_id": "hot~1", "redrive_of": "hot", "prompt": "x", "temperature": 0.5}
    assert (sent.key, sent.headers) == (b"key", trace)
    rest = cli(*arguments)
    assert (rest.code, rest.json["sent"], rest.json["sent_before"], rest.json["wrong"]) == (1, 1, 1, 1)
    (named,) = everything(worker_settings.kafka, jobs_topic("code"))
    assert json.loads(named.value or b"")["job_id"], "so that a second copy would be the same job"
    assert cli("dlq", "redrive").code == 2, "nothing was chosen"


def test_a_redrive_that_dies_before_it_marked_sends_the_same_job_again(
    cli: Cli, write: Write, worker_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure(code="decode_failed", message="no luck")
    write(failure, b'{"prompt": "x", "redrive_of": "a"}', job_id="a~1")
    with monkeypatch.context() as patched:
        patched.setattr(RedriveStore, "mark", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        cli("dlq", "redrive", "--task", "code")
    assert cli("dlq", "redrive", "--task", "code").code == 0
    values = {record.value for record in everything(worker_settings.kafka, jobs_topic("code"))}
    assert [json.loads(value or b"")["job_id"] for value in values] == ["a~2"]


def test_one_letter_is_shown_and_its_message_only_when_asked_for(cli: Cli, write: Write) -> None:
    value = json.dumps({"job_id": "a", "prompt": SECRET}).encode()
    write(InvalidField("expected something else", field="body.model"), value, headers=(("x", b"y"),))
    (letter,) = cli(
        "dlq", "list", "--task", "code", "--code", "invalid_field", "--job-id", "a", "--since", "1h", "--json"
    ).json
    assert (letter["topic"], letter["field"], letter["size_bytes"]) == ("jobs.code", "body.model", len(value))
    assert cli("dlq", "list", "--task", "code", "--until", "1h", "--json").json == []
    assert SECRET not in str(letter) + cli("dlq", "list", "--task", "code").out
    assert SECRET in cli("dlq", "list", "--task", "code", "--show-value", "--json").json[0]["value"]
    assert cli("dlq", "list", "--task", "nonesuch").out == ""
    shown = cli("dlq", "show", letter["at"], "--json")
    assert (shown.json["headers"]["x"], shown.json["code"]) == ("y", "invalid_field")
    assert SECRET not in shown.out + cli("dlq", "show", letter["at"]).out
    missing = cli("dlq", "show", "jobs.code.dlq:0:999")
    assert (missing.code, "no dead letter" in missing.err) == (1, True)


@pytest.mark.parametrize("option", ["--job-id", "--code", "--at"])
def test_each_name_of_a_letter_has_to_be_there(cli: Cli, write: Write, worker_settings: Settings, option: str) -> None:
    write(Failure(code="decode_failed", message="no luck"), b'{"prompt": "x"}', job_id="a")
    what, known = {
        "--job-id": ("job_id", "a"),
        "--code": ("code", "decode_failed"),
        "--at": ("place", "jobs.code.dlq:0:0"),
    }[option]
    ran = cli("dlq", "redrive", option, known, option, "nosuch")
    assert (ran.code, f"no dead letter of any time has the {what} nosuch\n" in ran.err) == (1, True)
    assert everything(worker_settings.kafka, jobs_topic("code")) == []
    assert cli("dlq", "redrive", option, known).code == 0


def test_a_purge_deletes_old_letters_after_a_dry_run(
    cli: Cli, write: Write, worker_settings: Settings, database: Database
) -> None:
    for number in range(3):
        write(UnknownTask(), b'{"prompt": "%d"}' % number)
    assert cli("dlq", "redrive", "--task", "code", "--limit", 1, "--json").json["sent"] == 1
    with closing(Consumer(worker_settings.kafka, group_id="unused")) as consumer:
        consumer.assign_from(["jobs.code.dlq"], at="earliest")
        assert cli("dlq", "purge", "--task", "code", "--before", "1h", "--yes", "--json").json["letters"] == 0
        plan = cli("dlq", "purge", "--task", "code", "--before", "0s", "--dry-run", "--json").json
        assert (plan["letters"], plan["deleted"]) == (3, False)
        assert plan["partitions"][0]["codes"] == {"unknown_task": 3}
        assert len(everything(worker_settings.kafka, "jobs.code.dlq")) == 3
        assert cli("dlq", "purge", "--task", "code", "--before", "0s", "--yes").code == 0
    assert everything(worker_settings.kafka, "jobs.code.dlq") == []
    assert cli("dlq", "list", "--task", "code", "--json").json == []
    assert database.scalar(text("SELECT count(*) FROM redrives")) == 0


def test_the_list_fits_eighty_columns(cli: Cli, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "expected JSON, found something else at character 17, and a good many words more than fit"
    write(MalformedMessage(long), b"nonsense", job_id="5f0c6f9d2b3e4a0f9a7f4f4e6c9a1b2d")
    write(InvalidField("expected a number from 0 to 2", field="body.temperature"), b"{}")
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli("dlq", "list").out.splitlines()
    assert max(map(len, shown)) <= 80
    assert "\n".join(shown).count("body.temperature") == 1
    for whole in ("malformed_message", "invalid_field", "jobs.code.dlq:0:1", "5f0c6f9d2b3e4a0f9a7f4f4e6c9a1b2d"):
        assert sum(whole in line for line in shown) == 1, "no word is broken over two lines"
