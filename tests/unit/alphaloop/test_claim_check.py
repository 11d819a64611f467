"""What may be read where, and what a store of contents does with missing, altered, oversized and hostile objects."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from alphaloop.claim_check.addresses import is_below, prefix_of
from alphaloop.claim_check.store import ContentStore, by_reference, text_by_reference, with_text
from alphaloop.errors import (
    ConfigError,
    ContentAltered,
    ContentMissing,
    ContentStoreUnavailable,
    InvalidField,
    MessageError,
)
from alphaloop.messages import Body, ContentReference, Job, Result, encode_job, payload_digest, with_prompt
from alphaloop.settings import ClaimCheckSettings
from tests.fixtures.answers import ALL
from tests.fixtures.messages import read, succeeded

MAX_BYTES = 1 << 16
ELSEWHERE = {"url": "s3://b/a", "sha256": "0" * 64, "num_bytes": 5}
WRONG_PREFIXES = (
    "",
    "/",
    "contents",
    "file://host/folder",
    "http://host/a",
    "s3://key:secret@bucket/a",
    "/srv/../etc",
    "s3:///bucket",
    "simplecache::s3://bucket",
    "memory://a",
    "s3://bucket/a?versionId=1",
    "file:////etc",
)
NO_PLAIN_NAMES = (
    "../secret",
    "a/../../secret",
    "a/./b",
    "a//b",
    "/etc/passwd",
    "",
    "a/",
    "..",
    "a%2f..%2fb",
    "%2e%2e/b",
    "a\\b",
    "a?x=1",
    "a#b",
    "a::b",
    "a b",
    "a\n",
    "a*",
    "[a]",
    "{a,b}",
    "~root/b",
)
OTHER_PLACES = (
    "s3://bucket/inside/a",
    "s3://bucket/in",
    "s3://other/in/a",
    "S3://bucket/in/a",
    "file:///bucket/in/a",
    "http://169.254.169.254/in/a",
    "s3://bucket@evil/in/a",
    "xs3://bucket/in/a",
    " s3://bucket/in/a",
)


def store_in(folder: Path, **settings: object) -> ContentStore:
    settings = {"url": str(folder), "max_bytes": MAX_BYTES, **settings}
    return ContentStore.of(ClaimCheckSettings.model_validate(settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "contents"
    found.mkdir()
    return found


@pytest.fixture
def store(folder: Path) -> ContentStore:
    return store_in(folder)


class TestAddresses:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("/srv/contents/", "file:///srv/contents"),
            ("file:///srv/contents", "file:///srv/contents"),
            ("s3://bucket/alphaloop", "s3://bucket/alphaloop"),
            ("gs://bucket", "gs://bucket"),
        ],
    )
    def test_a_prefix_has_one_spelling(self, given: str, expected: str) -> None:
        assert prefix_of(given) == expected

    @pytest.mark.parametrize("given", WRONG_PREFIXES)
    def test_other_prefixes_are_refused_without_being_repeated(self, given: str) -> None:
        with pytest.raises(ValidationError) as caught:
            ClaimCheckSettings(url=given)
        (error,) = caught.value.errors(include_input=False)
        assert "secret" not in str(error["msg"])

    @pytest.mark.parametrize("names", NO_PLAIN_NAMES)
    def test_what_is_no_plain_name_is_not_below(self, names: str) -> None:
        assert not is_below(f"s3://bucket/in/{names}", ["s3://bucket/in"])

    @pytest.mark.parametrize("url", OTHER_PLACES)
    def test_another_place_is_not_below(self, url: str) -> None:
        assert not is_below(url, ["s3://bucket/in"])

    def test_plain_names_are_below(self) -> None:
        assert is_below("s3://bucket/in/2026/11/a-b_c.json", ["file:///srv", "s3://bucket/in"])

    @given(st.text("ab./%2eE\\:@?#*~ \n", max_size=12))
    def test_nothing_allowed_leaves_its_prefix_however_it_is_read(self, names: str) -> None:
        url = f"s3://bucket/in/{names}"
        if is_below(url, ["s3://bucket/in"]):
            for read in (url, unquote(url), unquote(unquote(url))):
                parts = urlsplit(read)
                assert (parts.scheme, parts.netloc, parts.query, parts.fragment) == ("s3", "bucket", "", "")
                assert posixpath.normpath(parts.path) == parts.path
                assert parts.path.startswith("/in/")


class TestStore:
    def test_size_is_bounded_before_anything_is_read(self, store: ContentStore) -> None:
        large = ContentReference.to(f"{store_url(store)}/none", b"x" * (MAX_BYTES + 1))
        with pytest.raises(InvalidField, match=f"at most {MAX_BYTES} bytes") as caught:
            store.check(large, "body_ref")
        assert caught.value.field == "body_ref.num_bytes"

    def test_only_configured_addresses_are_read(self, folder: Path, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        reference = store_in(elsewhere).write("a.json", b"content")
        with pytest.raises(InvalidField, match=r"below claim_check\.url") as caught:
            store_in(folder).read(reference)
        assert caught.value.field == "reference.url"
        assert store_in(folder, read_urls=(str(elsewhere),)).read(reference) == b"content"

    def test_a_link_out_of_the_folder_is_not_followed(self, store: ContentStore, folder: Path, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"planted")
        (folder / "link").symlink_to(secret)
        with pytest.raises(ContentMissing, match="leads out"):
            store.read(ContentReference.to(f"{store_url(store)}/link", b"planted"))

    def test_what_is_no_file_is_missing(self, store: ContentStore, folder: Path) -> None:
        os.mkfifo(folder / "pipe")  # opened, it would wait for ever
        with pytest.raises(ContentMissing):
            store.read(ContentReference.to(f"{store_url(store)}/pipe", b"x"))

    def test_a_folder_that_is_gone_is_an_outage_and_no_missing_object(self, store: ContentStore, folder: Path) -> None:
        reference = store.write("a.txt", b"a text")
        moved = folder.rename(folder.with_name("unmounted"))
        with pytest.raises(ContentStoreUnavailable, match="there is no file://"):
            store.read(reference)
        with pytest.raises(ContentStoreUnavailable, match="there is no file://"):
            store.write("b.txt", b"a text")
        with pytest.raises(ContentStoreUnavailable, match="there is no file://"):
            store.delete(reference.url)
        assert not folder.exists()
        moved.rename(folder)
        assert store.read(reference) == b"a text"

    def test_a_folder_that_cannot_be_written_is_an_outage(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ContentStoreUnavailable):
            store_in(tmp_path / "file").write("a.txt", b"a text")

    def test_what_lies_elsewhere_is_not_deleted(self, store: ContentStore, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"planted")
        for url in (f"file://{secret}", f"{store_url(store)}/../secret", "s3://bucket/secret"):
            with pytest.raises(ContentStoreUnavailable, match="outside"):
                store.delete(url)
        assert secret.exists()

    def test_half_a_file_is_never_seen(self, store: ContentStore, folder: Path) -> None:
        store.write("a.txt", b"a text")
        assert [path.name for path in folder.rglob("*") if path.is_file()] == ["a.txt"]

    def test_an_exception_of_a_client_becomes_an_outage_without_its_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = ContentStore(ClaimCheckSettings().model_copy(update={"url": "memory://bucket"}))

        def fail(*given: object, **named: object) -> None:
            raise RuntimeError("credentials: planted")

        monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", fail)
        with pytest.raises(ContentStoreUnavailable, match="RuntimeError") as caught:
            store.read(ContentReference.to("memory://bucket/a", b"x"))
        assert "planted" not in str(caught.value)
        assert caught.value.__cause__ is None

    def test_a_missing_package_is_named(self) -> None:
        with pytest.raises(ConfigError, match="needs the package adlfs") as caught:
            ContentStore.of(ClaimCheckSettings(url="abfs://container/a"))
        assert caught.value.hint == "pip install adlfs"

    def test_options_are_secret(self) -> None:
        settings = ClaimCheckSettings(url="s3://b/a", options={"secret": SecretStr("planted")})
        assert "planted" not in repr(settings)
        assert settings.client_options() == {"secret": "planted"}


class TestMessages:
    def job(self, prompt: str) -> Job:
        return Job(job_id="a", task="code", body=Body(prompt=prompt, max_tokens=4))

    def test_a_job_that_fits_keeps_its_prompt(self, store: ContentStore, folder: Path) -> None:
        job = self.job("short")
        assert by_reference(job, 1000, store) is job
        assert by_reference(self.job("x" * 2000), 1000, None).body_ref is None
        assert not any(folder.iterdir())

    def test_a_large_job_travels_by_reference_and_is_the_same_job_each_time(self, store: ContentStore) -> None:
        large = self.job("x" * 2000)
        sent = by_reference(large, 1000, store)
        assert by_reference(large, 1000, store) == sent
        value = encode_job(sent)
        assert len(value) < 1000
        arrived = read(encode_job(sent))
        assert arrived.is_elsewhere
        assert arrived.body_ref is not None
        whole = with_prompt(arrived, store.read(arrived.body_ref))
        assert (whole.body, whole.is_elsewhere) == (large.body, False)
        assert payload_digest(whole) == payload_digest(arrived) == payload_digest(sent)
        other = by_reference(self.job("y" * 2000), 1000, store)
        assert payload_digest(other) != payload_digest(sent)

    @pytest.mark.parametrize(
        ("content", "field"),
        [
            (b"", None),
            (b"[]", None),
            (b"{}", "body_ref"),
            (b'{"prompt": ""}', "body_ref"),
            (b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "body_ref"),
            (b'{"prompt": "a", "max_tokens": 9}', "body_ref"),
            (b'{"messages": [{"role": "user", "content": {"a": {"b": 1}}}]}', "body_ref"),
            (b"\xff", None),
        ],
    )
    def test_content_that_is_no_prompt_is_refused_with_its_place(self, content: bytes, field: str | None) -> None:
        job = read({"body_ref": ELSEWHERE})
        with pytest.raises(MessageError) as caught:
            with_prompt(job, content)
        assert caught.value.field == field

    def test_a_prompt_stands_in_one_place(self) -> None:
        for beside in ({"prompt": "a"}, {"body": {"prompt": "a"}}, {"messages": [{"role": "user", "content": "a"}]}):
            with pytest.raises(InvalidField, match="neither messages nor prompt beside body_ref"):
                read({"body_ref": ELSEWHERE, **beside})

    def test_a_text_lies_under_its_job_and_attempt(self, store: ContentStore) -> None:
        result = succeeded("a/../b", "ü" * 2000)
        smaller = text_by_reference(result, store)
        assert (smaller.text, smaller.usage) == (None, result.usage)
        assert text_by_reference(result, store) == smaller
        assert with_text(smaller, store) == result
        assert with_text(smaller, None) is smaller
        assert with_text(result, store) is result

    @pytest.mark.parametrize("name", ALL)
    def test_choices_lie_under_their_job_and_attempt_with_the_text(self, name: str, store: ContentStore) -> None:
        choices = ALL[name]
        result = succeeded("a/../b", "").model_copy(update={"text": choices[0].said.content, "choices": choices})
        smaller = text_by_reference(result, store)
        assert (smaller.text, smaller.text_ref, smaller.choices, smaller.usage) == (None, None, (), result.usage)
        assert (smaller.is_elsewhere, smaller.response) == (True, None)
        assert text_by_reference(result, store) == smaller
        assert with_text(Result.decode(smaller.encode()), store) == result

    def test_choices_that_are_none_are_altered_ones(self, store: ContentStore) -> None:
        for content in (b"[]", b"{}", b'[{"index": "first"}]'):
            reference = store.write("results/aa/x.1.json", content)
            with pytest.raises(ContentAltered, match="no choices"):
                with_text(succeeded("a", "").model_copy(update={"text": None, "choices_ref": reference}), store)


def store_url(store: ContentStore) -> str:
    return store.write("any", b"x").url.rpartition("/")[0]
