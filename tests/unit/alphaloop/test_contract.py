from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import alphaloop
from alphaloop import contract
from alphaloop.errors import MalformedMessage
from alphaloop.messages import Failure, dead_letter
from alphaloop.messages.dead_letter import OUTCOME, SHORTENED
from alphaloop.messages.headers import RetryHeaders
from tests.fixtures.messages import ORIGIN, described, job_validator, read


def test_the_generated_files_are_up_to_date() -> None:
    assert contract.outdated() == [], "run make generated"


@pytest.mark.parametrize("path", sorted(contract.REFERENCE.glob("schemas/*.json")), ids=lambda path: path.stem)
def test_the_schemas_are_schemas(path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(described(path.stem))


@pytest.mark.parametrize(
    "message",
    [
        {"task": "code", "prompt": "x"},
        {"prompt": "x", "max_completion_tokens": 5, "stop": ["a"], "messages": None},
        {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "n": 1},
        {"body": {"prompt": "x", "tools": [], "seed": -1}, "job_id": "j", "deadline": "2026-01-31T09:00:00Z"},
        {"body": {"messages": [{"role": "user", "content": "x"}], "prompt": None}, "unknown": 5},
        {"prompt": "x", "stop": "a", "stream": None},
        {"prompt": "x", "stop": None, "stream": True},
    ],
)
def test_the_schema_accepts_what_the_reader_accepts(message: dict[str, Any]) -> None:
    read(message)
    job_validator().validate(message)


def test_the_dead_letter_headers_are_the_ones_described() -> None:
    schema = described("dead_letter_headers")
    names = set(schema["properties"]) - {SHORTENED}
    failure = Failure(code="decode_failed", message="no luck", field="body")
    for error, expected in ((MalformedMessage(field="body"), names - {OUTCOME}), (failure, names)):
        told = {"group": "g", "num_deliveries": 1, "key": None, "value": None, "headers": (), "job_id": "j"}
        letter = dead_letter(error, replace(ORIGIN, timestamp_ms=1), **told)  # type: ignore[arg-type]
        headers = {name: content.decode() for name, content in letter.headers}
        jsonschema.validate(headers, schema)
        assert set(headers) == expected


def test_the_retry_headers_are_the_ones_described() -> None:
    headers = RetryHeaders("jobs.code", 0, 3, 1, 2, 1, "decode_failed").headers(())
    jsonschema.validate({name: value.decode() for name, value in headers}, described("retry_headers"))
    assert {name for name, _ in headers} == described("retry_headers")["properties"].keys()


def test_every_reference_of_the_asyncapi_document_leads_somewhere() -> None:
    document = json.loads((contract.REFERENCE / "asyncapi.json").read_text(encoding="utf-8"))
    assert document["info"]["version"] == alphaloop.__version__
    references = list(_references(document))
    assert references
    for reference in references:
        if reference.startswith("#"):
            node: Any = document
            for part in reference.removeprefix("#/").split("/"):
                node = node[part]
        else:
            assert (contract.REFERENCE / reference).is_file()


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [reference for child in node.values() for reference in _references(child)]
    return []


def test_the_command_writes_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contract, "REFERENCE", tmp_path)
    assert contract.main(["--check"]) == 1
    assert "make generated" in capsys.readouterr().err
    assert contract.main([]) == 0
    assert contract.main(["--check"]) == 0
    (tmp_path / "settings.md").write_text("", encoding="utf-8")
    assert contract.outdated() == ["settings.md"]
