"""`alphaloop tail` against real servers: live texts, ends of every kind, jobs that nobody knows."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from alphaloop.settings import Settings
from tests.fakes import FakeEngine
from tests.fixtures.cli import Cli
from tests.fixtures.worker import Client, Streamed, running_worker
from tests.integration.test_worker_streams import job

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


def test_jobs_of_a_worker_are_shown_until_all_have_ended(stack_cli: Cli, worker_settings: Settings) -> None:
    client = Client(worker_settings)
    with running_worker(worker_settings, FakeEngine(num_slots=2)):
        client.send("code", [job(1), job(2, stream=False), job(3, deadline="2020-01-01T00:00:00Z")])
        shown = stack_cli("tail", "job-1", "job-2", "job-3", "--json")
        results = {result.job_id: result for result in client.results(3)}
        again = stack_cli("tail", "job-1")
        plain = stack_cli("tail", "job-2")
        late = stack_cli("tail", "job-3")
    lines = [json.loads(line) for line in shown.out.splitlines()]
    ends = {line["job_id"]: line for line in lines if "streamed" in line}
    assert {job_id: (end["status"], end["text"], end["streamed"]) for job_id, end in ends.items()} == {
        "job-1": ("succeeded", results["job-1"].text, True),
        "job-2": ("succeeded", results["job-2"].text, False),
        "job-3": ("expired", None, True),
    }
    assert shown.code == 1
    assert (again.code, again.out) == (0, f"{results['job-1'].text}\n")
    assert (plain.code, plain.out) == (0, f"{results['job-2'].text}\n")
    assert "not streamed" in plain.err
    assert (late.code, late.out) == (1, "")
    assert "expired" in late.err


def test_a_text_grows_piece_by_piece_and_a_new_attempt_that_says_the_same_goes_on(
    stack_cli: Cli, worker_settings: Settings
) -> None:
    streamed = Streamed(worker_settings.kafka)
    jobs = [json.dumps({"job_id": job_id, "prompt": "tell"}).encode() for job_id in "abcde"]
    Client(worker_settings).send("code", jobs)
    streamed.text("a", 1, 0, "one ")
    streamed.text("a", 1, 1, "two ")
    streamed.text("a", 2, 0, "one ")
    streamed.text("a", 1, 2, "of a suspended worker")
    streamed.text("a", 2, 0, "one ")
    streamed.text("a", 2, 1, "two three")
    streamed.end("a", 2, 2)
    shown = stack_cli("tail", "a", "--timeout", "30")
    assert (shown.code, shown.out) == (0, "one two three\n")
    assert "it waits in Kafka" in shown.err
    streamed.text("b", 1, 0, "one ")
    streamed.end("b", 1, 3, whole_text="one two three")
    assert stack_cli("tail", "b").out == "one two three\n", "two chunks are missing for good"
    as_json = [json.loads(line) for line in stack_cli("tail", "a", "--json").out.splitlines()]
    assert [(line["attempt"], line["new_text"]) for line in as_json if "new_text" in line] == [
        (1, "one "),
        (1, "two "),
        (2, "one "),
        (2, "two three"),
    ]
    streamed.text("c", 1, 0, "one way")
    streamed.text("c", 4, 0, "another ")
    streamed.text("c", 4, 1, "way")
    streamed.end("c", 4, 2)
    shown = stack_cli("tail", "c")
    assert (shown.out, "decoded again" in shown.err) == ("one way\nanother way\n", True), "another text begins anew"
    for number, piece in enumerate(("first line\nsec", "ond line")):
        for job_id in ("d", "e"):
            streamed.text(job_id, 1, number, piece)
    for job_id in ("d", "e"):
        streamed.end(job_id, 1, 2)
    shown = stack_cli("tail", "d", "e", "d")
    assert sorted(shown.out.splitlines()) == ["d  first line", "d  second line", "e  first line", "e  second line"]
    Client(worker_settings).send("code", [b'{"job_id": "slow", "prompt": "tell"}'])
    shown = stack_cli("tail", "slow", "nobody", "--timeout", "0.5")
    told = ("nobody: unknown: ", "not ended within 0.5 s: slow", "alphaloop status")
    assert (shown.code, [one for one in told if one not in shown.err]) == (1, [])


def test_enqueue_streams_texts_as_they_are_decoded(stack_cli: Cli, worker_settings: Settings, tmp_path: Path) -> None:
    """One text as it is, several by lines with their job_ids; a refused job ends the wait, too."""
    client = Client(worker_settings)
    file = tmp_path / "jobs.jsonl"
    lines = [{"job_id": f"s-{n}", "task": "code", "prompt": f"tell story {n}", "max_tokens": 24} for n in range(3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**lines[0], "job_id": "no", "model": "gpt"}]))
    output = tmp_path / "results.jsonl"
    with running_worker(worker_settings, FakeEngine(num_slots=2)):
        one = stack_cli("enqueue", "--task", "code", "--prompt", "tell me", "--max-tokens", 24, "--stream")
        several = stack_cli("enqueue", "--file", file, "--stream", "--output", output, "--timeout", "120")
        results = {result.job_id: result for result in client.results(4)}
    (alone,) = (result for result in results.values() if not result.job_id.startswith("s-"))
    assert alone.num_chunks, "it was streamed"
    assert (one.code, one.out) == (0, f"{alone.text}\n")
    assert (several.code, "1 refused" in several.err, "3 succeeded" in several.err) == (1, True, True)
    for line in lines:
        text = results[line["job_id"]].text
        assert "".join(f"{line['job_id']}  {part}\n" for part in (text or "").split("\n")) in several.out
    assert [json.loads(row)["status"] for row in output.read_text().splitlines()] == [*["succeeded"] * 3, "refused"]


def test_a_priority_and_a_deadline_are_the_jobs(stack_cli: Cli, worker_settings: Settings) -> None:
    client = Client(worker_settings)
    before = datetime.now(UTC)
    asked = ("enqueue", "--task", "code", "--prompt", "p")
    assert stack_cli(*asked, "--priority", 7, "--deadline", "90m", "--stream", "--timeout", "0").code == 1
    (sent,) = client.read(["jobs.code"], lambda found: bool(found))
    job = json.loads(sent.value or b"")
    assert (job["priority"], job["body"]["stream"]) == (7, True)
    assert (
        timedelta() <= datetime.fromisoformat(job["deadline"]) - before - timedelta(minutes=90) < timedelta(minutes=5)
    )
    for wrong in ("2020-01-01", "soon", "-5m"):
        ran = stack_cli(*asked, "--deadline", wrong)
        assert (ran.code, "--deadline: expected a time" in ran.err) == (1, True)
    assert stack_cli(*asked, "--priority", 101).code == 2
    assert stack_cli(*asked, "--stream", "--json").code == 2
    assert stack_cli(*asked, "--stream", "--output", "-").code == 2
