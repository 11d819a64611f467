"""Who may use the API, what it refuses, and in which form: no broker is needed for that."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from pydantic import SecretStr
from sqlalchemy import text

from alphaloop.batches.advancing import Advancing
from alphaloop.errors import ConfigError
from alphaloop.settings import PostgresSettings, Settings, TaskSettings
from alphaloop.store.api import ApiKeyStore
from alphaloop.store.database import Database
from tests.fixtures.cli import Cli
from tests.fixtures.console import PASSWORD, Visitor
from tests.fixtures.openai_api import BY_TEST, client, create_key, served, told

pytestmark = pytest.mark.postgres

RUN_ONCE = Advancing.run_once
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}'


@pytest.fixture(autouse=True)
def nobody_advances(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no broker."""
    monkeypatch.setattr(Advancing, "run_once", lambda self: 0)


@pytest.fixture
def settings(console_login: SecretStr) -> Settings:
    """With the login of the Compose stack."""
    return Settings(
        postgres=PostgresSettings(url=console_login), tasks={"code": TaskSettings(), "chat": TaskSettings()}
    )


@pytest.fixture
def url(settings: Settings, tmp_path: Path) -> Iterator[str]:
    with served(settings, tmp_path, max_batch_mb=1, max_open_batches=2, max_stored_mb=1) as address:
        yield address


def uploaded(api: openai.OpenAI, content: bytes = LINE) -> str:
    return api.files.create(file=("requests.jsonl", content), purpose="batch").id


def batch_of(api: openai.OpenAI, file_id: str, **given: Any) -> Any:
    asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **given}
    return api.batches.create(input_file_id=file_id, **asked)


def ask(url: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
    """Any request, and what is answered."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, sent, encode_chunked="Transfer-Encoding" in sent)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, json.loads(answer.read())
    finally:
        connection.close()


def test_a_key_that_is_wrong_revoked_or_expired_is_refused(url: str, database: Database) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    valid = create_key(database, "valid")
    refused = [f"al-{'x' * 43}", "al-short", "", valid[:-1], create_key(database, "old", expires_at=past)]
    with client(url, valid) as api:
        assert list(api.files.list()) == []
        ApiKeyStore(database).revoke("valid", BY_TEST)
        with pytest.raises(openai.AuthenticationError):
            api.files.list()
    for secret in [*refused, valid]:
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/files"),
            ("POST", "/v1/batches"),
            ("GET", "/v1/models"),
        ):
            status, headers, found = ask(url, method, path, b"{}", Authorization=f"Bearer {secret}")
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert (found["error"]["code"], found["error"]["type"]) == ("invalid_api_key", "invalid_request_error")
            assert "al-x" not in json.dumps(found)
    stored = database.rows(text("SELECT row_to_json(api_keys)::text FROM api_keys"))
    assert not any(secret in row[0] for row in stored for secret in refused if secret)
    new = create_key(database, "valid")
    assert new != valid
    with pytest.raises(ConfigError, match="there is a key"):
        create_key(database, "valid")
    ApiKeyStore(database).revoke("valid", BY_TEST)
    with pytest.raises(ConfigError, match="expected the segment"):
        create_key(database, "valid", segment="another")


def test_what_belongs_to_another_key_is_as_what_is_not_there(url: str, database: Database) -> None:
    with ExitStack() as stack:
        mine = stack.enter_context(client(url, create_key(database, "mine", tasks=["chat"])))
        other = stack.enter_context(client(url, create_key(database, "other", tasks=["chat"])))
        file_id = uploaded(mine)
        batch_id = batch_of(mine, file_id).id
        nowhere = {file_id: f"file-{'0' * 32}", batch_id: f"batch_{'0' * 32}"}
        for known, unknown in nowhere.items():
            is_file = known == file_id
            calls = (
                ("files.retrieve", "files.content", "files.delete")
                if is_file
                else ("batches.retrieve", "batches.cancel")
            )
            for name in calls:
                answers = []
                for identifier in (known, unknown):
                    group, _, call = name.partition(".")
                    with pytest.raises(openai.NotFoundError) as refused:
                        getattr(getattr(other, group), call)(identifier)
                    answers.append(json.dumps(told(refused.value)).replace(identifier, "ID"))
                assert answers[0] == answers[1]
            with pytest.raises(openai.NotFoundError):
                (other.files if is_file else other.batches).list(after=known)
        with pytest.raises(openai.NotFoundError):
            batch_of(other, file_id)
        assert list(other.files.list()) == list(other.batches.list()) == []
        assert mine.batches.retrieve(batch_id).status == "validating"
        assert mine.files.content(file_id).content == LINE


def test_limits_on_bytes_and_open_batches(url: str, database: Database) -> None:
    with client(url, create_key(database, "much", tasks=["chat"])) as api:
        with pytest.raises(openai.APIStatusError) as too_large:
            uploaded(api, b"x" * 1_000_001)
        assert (too_large.value.status_code, told(too_large.value)["code"]) == (413, "file_too_large")
        with pytest.raises(openai.APIStatusError) as far_too_large:
            uploaded(api, b"x" * 1_900_000)
        assert (far_too_large.value.status_code, told(far_too_large.value)["param"]) == (413, "file")
        file_id = uploaded(api, b"x" * 999_000)
        with pytest.raises(openai.RateLimitError, match="the files of this key have"):
            uploaded(api, b"x" * 2_000)
        made = [batch_of(api, file_id).id for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as full:
            batch_of(api, file_id)
        assert (told(full.value)["type"], full.value.response.headers["retry-after"]) == ("rate_limit_error", "10")
        page = api.batches.list(limit=1)
        assert (page.has_more, [one.id for one in page]) == (True, made[::-1])
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            api.files.delete(file_id)
    assert database.scalar(text("SELECT count(*) FROM audit WHERE action = 'batch_created'")) == 2


def test_a_file_whose_time_is_over_is_deleted_with_its_content(
    settings: Settings, database: Database, tmp_path: Path
) -> None:
    with (
        served(settings, tmp_path) as url,
        client(url, create_key(database, "old", tasks=["chat"])) as api,
    ):
        gone, read, kept = uploaded(api), uploaded(api), uploaded(api)
        batch_of(api, read)
        aged = text("UPDATE api_files SET expires_at = now() WHERE id = ANY(:ids)")
        database.change(aged, {"ids": [gone, read]})
        database.change(text("UPDATE api_batches SET look_at = now() + interval '1 day'"))
        RUN_ONCE(Advancing(settings.model_copy(update={"data_dir": tmp_path}), database, owner="test"))
        assert [one.id for one in api.files.list()] == [kept]
        with pytest.raises(openai.NotFoundError):
            api.files.content(gone)
    left = {path.stem for path in (tmp_path / "console" / "api").iterdir()}
    assert left == {read, kept}, "an open batch still reads one"


def test_a_body_in_chunks_is_taken_and_bounded(url: str, database: Database) -> None:
    key = create_key(database, "chunks")
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    given = {
        "Authorization": f"Bearer {key}",
        "Content_Type": "multipart/form-data; boundary=b",
        "Transfer_Encoding": "chunked",
    }
    status, _, found = ask(url, "POST", "/v1/files", iter([head, LINE, b"\r\n--b--\r\n"]), **given)
    assert (status, found["bytes"], found["filename"]) == (200, len(LINE), "f")
    status, _, found = ask(url, "POST", "/v1/files", iter([head, *[b"x" * 100_000] * 15]), **given)
    assert (status, found["error"]["code"]) == (413, "file_too_large")


def test_every_other_address_answers_in_openais_form(url: str, database: Database) -> None:
    key = create_key(database, "lost", tasks=["chat"])
    with (
        client(url, key) as api,
        pytest.raises(openai.NotFoundError, match="Send online requests to the inference servers"),
    ):
        api.chat.completions.create(model="x", messages=[{"role": "user", "content": "Hello"}])
    bearer = {"Authorization": f"Bearer {key}"}
    for method, path, status in (
        ("GET", "/v1", 404),
        ("GET", "/v1/", 404),
        ("POST", "/v1/completions", 404),
        ("GET", "/v1/files/", 404),
        ("GET", "/v1/assistants", 404),
        ("PATCH", "/v1/files", 405),
        ("DELETE", "/v1/batches", 405),
        ("GET", "/v1/files?limit=0", 400),
        ("GET", "/v1/files?limit=x", 400),
        ("GET", "/v1/files?order=up", 400),
        ("GET", "/v1/files/..%2f..%2fetc", 404),
        ("GET", "/v1/batches?after=%00", 404),
        ("GET", "/v1/models/none", 404),
    ):
        found = ask(url, method, path, **bearer)
        assert (found[0], set(found[2]["error"])) == (status, {"message", "type", "param", "code"}), path
    wrong = {
        "endpoint": ("/v1/embeddings", "endpoint"),
        "completion_window": ("8d", "completion_window"),
        "metadata": ({"task": "math"}, "metadata.task"),
    }
    with client(url, key) as api:
        file_id = uploaded(api)
        for name, (value, param) in wrong.items():
            with pytest.raises(openai.BadRequestError) as refused:
                batch_of(api, file_id, **{name: value})
            assert told(refused.value)["param"] == param
        with pytest.raises(openai.BadRequestError) as refused:
            api.files.create(file=("f", LINE), purpose="vision")
        assert told(refused.value)["param"] == "purpose"
        kept = api.files.create(
            file=("f", LINE), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert kept.expires_at == kept.created_at + 3600
    for body in (b"", b"[1", b"[]", b"null", b'"\xff"', b"[" * 5000, b"x" * 70_000, b'{"input_file_id": 1}'):
        status, _, found = ask(url, "POST", "/v1/batches", body, **bearer)
        assert status in (400, 413), body[:20]
        assert found["error"]["type"] == "invalid_request_error"
    status, _, found = ask(url, "POST", "/v1/files", b"{}", Content_Type="application/json", **bearer)
    assert (status, found["error"]["code"]) == (415, "unsupported_media_type")


def test_a_session_opens_no_api_and_a_key_opens_no_page(settings: Settings, database: Database, tmp_path: Path) -> None:
    key = create_key(database, "key")
    with served(settings, tmp_path, password=SecretStr(PASSWORD)) as url:
        visitor = Visitor(url)
        assert visitor.sign_in().status == 303
        assert visitor.get("/v1/files").status == 401
        stranger = Visitor(url)
        assert stranger.get("/jobs.json", Authorization=f"Bearer {key}").status == 401
        foreign = stranger.get("/v1/files", Host="elsewhere.example", Authorization=f"Bearer {key}")
        assert (foreign.status, foreign.data["data"]) == (200, []), "a key is enough, by whatever name"
    found = database.rows(text("SELECT by_kind, by, action FROM audit WHERE action = 'signed_in'"))
    assert [tuple(row) for row in found] == [("login", "alphaloop", "signed_in")]


def test_a_database_that_is_away_is_told_without_a_name_of_it(settings: Settings, tmp_path: Path) -> None:
    away = PostgresSettings(url=SecretStr("postgresql://u:secret@127.0.0.1:1/nowhere"))
    with served(settings.model_copy(update={"postgres": away}), tmp_path) as url:
        status, headers, found = ask(url, "GET", "/v1/files", Authorization=f"Bearer al-{'x' * 43}")
    assert (status, headers["retry-after"], found["error"]["type"]) == (503, "10", "server_error")
    assert "nowhere" not in json.dumps(found)


@pytest.mark.usefixtures("cli_environment")
def test_keys_are_made_listed_and_revoked_by_commands(database: Database, cli: Cli) -> None:
    secret = cli("keys", "create", "nightly", "--segment", "gold", "--task", "chat").out.strip()
    assert ApiKeyStore(database).find(secret) is not None
    (row,) = cli("keys", "list", "--json").json
    assert (row["name"], row["segment"], row["tasks"], row["prefix"]) == ("nightly", "gold", ["chat"], secret[:9])
    assert row["last_used_at"] is not None
    assert secret not in cli("keys", "list").out
    assert cli("keys", "create", "nightly", "--segment", "gold").code == 1
    assert cli("keys", "create", "a b", "--segment", "gold").code == 1
    assert cli("keys", "create", "x", "--segment", "gold", "--task", "nothing").code == 1
    assert cli("keys", "revoke", "nightly").code == 0
    assert ApiKeyStore(database).find(secret) is None
    assert cli("keys", "revoke", "nightly").code == 1
    found = database.scalars(text("SELECT action FROM audit WHERE by_kind = 'command' ORDER BY id"))
    assert found == ["key_created", "key_revoked"]
