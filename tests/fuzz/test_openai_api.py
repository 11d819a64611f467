"""Any request to the API is answered: in OpenAI's form where it is refused, and never with a failure of ours.

API_REQUESTS sets how many are made.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr
from starlette.types import ASGIApp, Message

from alphaloop.batches.advancing import Advancing
from alphaloop.console.app import Console
from alphaloop.console.reading import Sources
from alphaloop.settings import ConsoleSettings, PostgresSettings, Settings, TaskSettings
from alphaloop.store.database import Database
from tests.fixtures.openai_api import create_key

pytestmark = pytest.mark.postgres

NUM_REQUESTS: Final = int(os.environ.get("API_REQUESTS", "500"))
ID: Final = "f" * 32
FIELD: Final = 'Content-Disposition: form-data; name="'

words = st.sampled_from(
    ["files", "batches", "models", "content", "cancel", "chat", "completions", f"file-{ID}", f"batch_{ID}", "..", ""]
)
paths = st.lists(st.one_of(words, st.text(max_size=20)), max_size=5).map("/".join)
values = st.one_of(
    st.sampled_from(["1", "0", "-1", "100000", "asc", "desc", "batch", f"file-{ID}"]), st.text(max_size=30)
)
queries = st.dictionaries(st.sampled_from(["limit", "after", "order", "purpose", "x"]), values, max_size=4)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10), inner, max_size=4)),
    max_leaves=10,
)
batches = st.fixed_dictionaries(
    {},
    optional={
        "input_file_id": st.one_of(st.just(f"file-{ID}"), json_values),
        "endpoint": st.one_of(st.just("/v1/chat/completions"), json_values),
        "completion_window": st.one_of(st.just("24h"), st.from_regex(r"[0-9]{1,4}[hdm]"), json_values),
        "metadata": st.one_of(
            st.just({"task": "code"}), st.dictionaries(st.text(max_size=70), json_values, max_size=18)
        ),
    },
).map(lambda found: json.dumps(found).encode())
parts = st.tuples(
    st.one_of(st.sampled_from(["file", "purpose", "expires_after[seconds]"]), st.text(max_size=10)),
    st.one_of(st.none(), st.text(max_size=20)),
    st.one_of(st.just(b"batch"), st.just(b"7200"), st.binary(max_size=200)),
)


def form_of(found: list[tuple[str, str | None, bytes]]) -> bytes:
    content = b""
    for name, filename, value in found:
        named = f'{FIELD}{name}"' + ("" if filename is None else f'; filename="{filename}"')
        content += b"--b\r\n" + named.encode("utf-8", "surrogatepass") + b"\r\n\r\n" + value + b"\r\n"
    return content + b"--b--\r\n"


forms = st.lists(parts, max_size=12).map(form_of)
damaged = st.tuples(forms, st.integers(0, 300)).map(lambda found: found[0][: found[1]])
bodies = st.one_of(
    st.binary(max_size=200), batches, json_values.map(lambda one: json.dumps(one).encode()), forms, damaged
)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


async def answer(app: ASGIApp, scope: Mapping[str, Any], body: bytes) -> Answer:
    """What the application says, the body given in two pieces, after which the client is gone."""
    half = len(body) // 2
    pieces = [(body[:half], True), (body[half:], False)]
    said: list[Message] = []

    async def receive() -> Message:
        if not pieces:
            return {"type": "http.disconnect"}
        piece, more = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": more}

    async def send(message: Message) -> None:
        said.append(message)

    await app(dict(scope), receive, send)
    start, *rest = said
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
    return Answer(start["status"], headers, b"".join(message.get("body", b"") for message in rest))


def test_no_request_makes_the_api_fail(database_url: SecretStr, database: Database, tmp_path: Path) -> None:
    key = create_key(database, "fuzz", tasks=["code"])
    made = Settings(
        postgres=PostgresSettings(url=database_url),
        tasks={"code": TaskSettings()},
        console=ConsoleSettings(max_batch_mb=1),
        data_dir=tmp_path,
    )
    with closing(Sources.of(made)) as sources:
        app = Console(sources, Advancing(made, sources.database, owner="fuzz")).app()

        @settings(max_examples=NUM_REQUESTS, deadline=None, suppress_health_check=list(HealthCheck))
        @given(
            method=st.sampled_from(["GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"]),
            path=paths,
            query=queries,
            body=bodies,
            kind=st.sampled_from(
                ["application/json", "multipart/form-data; boundary=b", "multipart/form-data", "", "\xff"]
            ),
            scheme=st.sampled_from(["Bearer ", "bearer ", "Basic ", ""]),
            secret=st.one_of(st.just(key), st.just(key), st.text(max_size=60)),
        )
        def try_it(
            method: str, path: str, query: dict[str, str], body: bytes, kind: str, scheme: str, secret: str
        ) -> None:
            scope = {
                "type": "http",
                "asgi": {"version": "3.0"},
                "http_version": "1.1",
                "method": method,
                "scheme": "http",
                "path": f"/v1/{path}",
                "raw_path": b"",
                "root_path": "",
                "query_string": urlencode(query, errors="replace").encode(),
                "headers": [
                    (b"authorization", f"{scheme}{secret}".encode("utf-8", "replace")),
                    (b"content-type", kind.encode("latin-1")),
                ],
                "client": ("127.0.0.1", 1),
                "server": ("127.0.0.1", 80),
            }
            found = asyncio.run(answer(app, scope, body))
            assert found.status < 500, found
            if method == "HEAD":
                return
            if found.status >= 400:
                error = json.loads(found.body)
                assert set(error) == {"error"}, found
                assert set(error["error"]) == {"message", "type", "param", "code"}
                assert key not in json.dumps(error)
            elif found.headers["content-type"] == "application/json":
                assert json.loads(found.body)["object"] in ("list", "file", "batch", "model")

        try_it()
