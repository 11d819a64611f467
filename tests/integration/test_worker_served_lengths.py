"""A worker in front of a server that follows requests in how long they draft: each task gets the length that pays."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from sqlalchemy import text

from alphaloop.settings import Settings
from alphaloop.store.database import Database
from tests.fakes import FakeEngine
from tests.fixtures.inference_server import ServedEngine, engine_over
from tests.fixtures.worker import Client, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NUM_JOBS: Final = 15  #: of each task, of which it is known how they were accepted, and as many that are decided then


class _OfTwoTasks(FakeEngine):
    """Drafts for prompts that ask for code are nearly always right, and for others seldom."""

    def _round(self, sequence: Any) -> int:
        body = sequence.prepared.job.body
        words = body.prompt or " ".join(message.content for message in body.messages)
        self._acceptance = (0.97,) if "code" in words else (0.4,)
        return super()._round(sequence)


def jobs(task: str, first: int, **fields: str) -> list[bytes]:
    plain = {"task": task, "max_tokens": 40, **fields}
    numbers = range(first, first + NUM_JOBS)
    return [json.dumps({"job_id": f"{task}-{i}", "prompt": f"{task} number {i}", **plain}).encode() for i in numbers]


def test_two_tasks_get_different_draft_lengths_at_one_endpoint(worker_settings: Settings, database: Database) -> None:
    server = ServedEngine(_OfTwoTasks(), "lookup", 4, 0.004, draft_s=0.0012, tells_exactly=True, switches_drafts=True)
    client = Client(worker_settings)
    with engine_over({"both": server}) as engine, running_worker(worker_settings, engine) as running:
        costs = running.worker.costs.table.rounds(1)
        assert (costs.round_ms("lookup", 1) or 0.0) < (costs.round_ms("lookup", 4) or 0.0), "both were asked for"
        for number, task in enumerate(("code", "chat")):
            client.send(task, jobs(task, 0, decoding="speculative"))
            client.results((2 * number + 1) * NUM_JOBS)
            client.send(task, jobs(task, NUM_JOBS))
            client.results((2 * number + 2) * NUM_JOBS)
    with database.begin() as connection:
        query = "SELECT task, num_draft_tokens, reason, array_length(proposed, 1) FROM decode_runs WHERE drafter <> ''"
        rows = connection.execute(text(query)).all()
    assert all(k == longest for _, k, _, longest in rows), "each was drafted for as its row says"
    chosen = {
        task: {k for name, k, reason, _ in rows if (name, reason) == (task, "faster")} for task in ("code", "chat")
    }
    assert min(chosen["code"]) > max(chosen["chat"] | {1})
    asked = [body["vllm_xargs"] for body in server.bodies if "alphaloop_task" in body.get("vllm_xargs", {})]
    of_chat = {one.get("alphaloop_num_draft_tokens") for one in asked if one["alphaloop_task"] == "chat"}
    assert of_chat & {1, 2}, "and the server was asked for it"
