"""Every setting at the least that it allows: the processes start all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from alphaloop.messages.result import Status
from alphaloop.settings import Settings
from tests.fakes import FakeEngine
from tests.fixtures.worker import Client, running_worker

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]


def least(section: BaseModel) -> dict[str, Any]:
    """The lowest allowed value of each field that has one, and no value where a sequence may be empty."""
    found: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        if lowest := [rule.ge for rule in field.metadata if hasattr(rule, "ge")]:
            found[name] = lowest[0]
        if isinstance(getattr(section, name), tuple):
            found[name] = ()
    return found


def test_a_worker_decodes_with_the_least_of_everything(worker_settings: Settings) -> None:
    sections = ("kafka", "postgres", "worker", "policy")
    update = {name: getattr(worker_settings, name) for name in sections}
    lowest = {name: section.model_copy(update=least(section)) for name, section in update.items()}
    settings = worker_settings.model_copy(update=lowest)
    assert settings.kafka.session_timeout_ms == 1000
    assert settings.worker.max_buffered_bytes == 1 << 20
    client = Client(settings)
    with running_worker(settings, FakeEngine()):
        client.send("code", [json.dumps({"task": "code", "prompt": f"tell story {n}"}).encode() for n in range(8)])
        assert [result.status for result in client.results(8)] == [Status.SUCCEEDED] * 8
