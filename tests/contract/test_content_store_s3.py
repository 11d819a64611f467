"""A claim check against a server that speaks S3's protocol: wrong credentials, few rights, slow, cut off, killed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import get_loop

from alphaloop import logs
from alphaloop.claim_check import clients
from alphaloop.claim_check.store import ContentStore
from alphaloop.embedded.process import free_ports
from alphaloop.errors import ContentMissing, ContentStoreUnavailable
from alphaloop.messages import ContentReference
from tests.chaos.proxy import Proxy
from tests.fixtures.object_store import BUCKET, SECRETS, ObjectStore
from tests.fixtures.worker import until

CONTENT = b"a prompt that nobody may log " * 300
WAIT_S = 20.0


def opened(server: ObjectStore, options: dict[str, Any]) -> ContentStore:
    return ContentStore(server.settings("s3-tests", options=options))


@pytest.fixture
def written(object_store: ObjectStore) -> ContentReference:
    return opened(object_store, object_store.options()).write("a.txt", CONTENT)


@pytest.fixture
def proxy(object_store: ObjectStore) -> Iterator[Proxy]:
    found = Proxy(object_store.port)
    yield found
    found.close()


def missing_object() -> ContentReference:
    return ContentReference.to(f"s3://{BUCKET}/s3-tests/none", CONTENT)


def every_call(store: ContentStore, reference: ContentReference) -> list[Callable[[], object]]:
    return [
        lambda: store.read(reference),
        lambda: store.write("b.txt", CONTENT),
        lambda: store.delete(reference.url),
    ]


@pytest.mark.parametrize("wrong", [{"secret": "planted-wrong"}, {"key": "nobody"}])
def test_wrong_credentials_are_an_outage_and_no_failure_of_the_job(
    object_store: ObjectStore, written: ContentReference, wrong: dict[str, str]
) -> None:
    """Somebody mends them; were the objects taken for missing, every job would fail for good meanwhile."""
    store = opened(object_store, {**object_store.options(), **wrong})
    for reference in (written, missing_object()):
        for act in every_call(store, reference):
            with pytest.raises(ContentStoreUnavailable) as caught:
                act()
            assert "credentials right" in (caught.value.hint or "")
            assert "planted" not in str(caught.value)
    assert opened(object_store, object_store.options()).read(written) == CONTENT


def test_who_may_only_read_reads_and_is_told_what_he_lacks(
    object_store: ObjectStore, written: ContentReference
) -> None:
    reader = opened(object_store, object_store.options("reader"))
    read, *others = every_call(reader, written)
    assert read() == CONTENT
    with pytest.raises(ContentMissing):
        reader.read(missing_object())
    for act in others:
        with pytest.raises(ContentStoreUnavailable, match=r"cannot (write|delete)") as caught:
            act()
        assert "may they read, write, delete and list" in (caught.value.hint or "")


def test_neither_secrets_nor_content_are_logged_at_any_level(
    object_store: ObjectStore, written: ContentReference, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("DEBUG")
    for options in (object_store.options(), {**object_store.options(), "secret": "planted-wrong"}):
        store = opened(object_store, options)
        for act in every_call(store, written):
            try:
                act()
            except ContentStoreUnavailable as error:
                logging.getLogger("alphaloop").error("refused", exc_info=error)
    told = capsys.readouterr().err
    assert "refused" in told
    for secret in ("planted", "nobody may log", SECRETS["alphaloop"]):
        assert secret not in told


def test_a_server_that_says_nothing_is_given_up_in_time_and_nothing_piles_up(
    object_store: ObjectStore, written: ContentReference, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = opened(object_store, object_store.options(port=proxy.port))
    assert patient.read(written) == CONTENT
    proxy.hold()
    with monkeypatch.context() as impatient:
        impatient.setattr(clients, "TIMEOUT_S", 1.0)
        for act in every_call(opened(object_store, object_store.options(port=proxy.port)), written):
            with pytest.raises(ContentStoreUnavailable, match="TimeoutError"):
                act()
    # All clients of fsspec share this loop.
    until(lambda: not asyncio.all_tasks(get_loop()), "what was given up has ended", WAIT_S)
    proxy.release()
    assert patient.write("a.txt", CONTENT) == written
    assert patient.read(written) == CONTENT


def test_a_connection_that_breaks_in_the_middle_of_an_object_is_an_outage(
    object_store: ObjectStore, proxy: Proxy
) -> None:
    direct = opened(object_store, object_store.options())
    large = direct.write("large.bin", b"x" * (2 << 20))
    store = opened(object_store, object_store.options(port=proxy.port))
    proxy.cut_answers(after_bytes=1 << 20)
    with pytest.raises(ContentStoreUnavailable, match="no answer from the store"):
        store.read(large)
    assert proxy.num_cuts
    proxy.cut_answers(after_bytes=None)
    assert len(store.read(large)) == 2 << 20


def test_a_server_that_is_down_is_an_outage(
    object_store: ObjectStore, written: ContentReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "TIMEOUT_S", 1.0)
    (port,) = free_ports(1)
    store = opened(object_store, object_store.options(port=port))
    for act in every_call(store, written):
        with pytest.raises(ContentStoreUnavailable, match="no answer from the store") as caught:
            act()
        assert "is the store up" in (caught.value.hint or "")


def test_the_guides_lifecycle_rule_is_one_that_a_server_takes(object_store: ObjectStore) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs/guides/large-messages.md").read_text(encoding="utf-8")
    (rule,) = (json.loads(code) for code in re.findall(r"```json\n(.*?)```", guide, re.DOTALL) if '"Rules"' in code)
    operator = fsspec.filesystem("s3", **object_store.options("operator"))
    operator.call_s3("put_bucket_lifecycle_configuration", Bucket=BUCKET, LifecycleConfiguration=rule)
    found = operator.call_s3("get_bucket_lifecycle_configuration", Bucket=BUCKET)["Rules"]
    assert {one["ID"]: one.get("Expiration") for one in found} == {
        "alphaloop-prompts": {"Days": 61},
        "alphaloop-rest": None,
    }
