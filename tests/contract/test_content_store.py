"""What every store of contents does with missing, altered and oversized objects: a folder, and an object store."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from alphaloop.claim_check.store import ContentStore, by_reference, drop_prompts
from alphaloop.errors import ContentAltered, ContentMissing, ContentStoreUnavailable, InvalidField
from alphaloop.messages import Body, ContentReference, Job
from alphaloop.settings import ClaimCheckSettings
from tests.fixtures.object_store import BUCKET, ObjectStore

MAX_BYTES = 1 << 20


@pytest.fixture(params=["folder", "memory", "S3"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> ClaimCheckSettings:
    if request.param == "S3":
        server: ObjectStore = request.getfixturevalue("object_store")
        return server.settings(f"test-{uuid.uuid4().hex}", max_bytes=MAX_BYTES)
    if request.param == "folder":
        return ClaimCheckSettings(url=str(tmp_path), max_bytes=MAX_BYTES)
    # No user may configure it; it is a store of objects without folders, as a client of fsspec's own sees one.
    return ClaimCheckSettings.model_construct(
        **{**ClaimCheckSettings(max_bytes=MAX_BYTES).model_dump(), "url": f"memory://{uuid.uuid4().hex}"}
    )


@pytest.fixture
def store(settings: ClaimCheckSettings) -> ContentStore:
    return ContentStore(settings)


def test_what_is_written_is_read_and_deleted(store: ContentStore) -> None:
    largest = bytes(range(256)) * (MAX_BYTES // 256)
    for content in (b"a text", largest):
        reference = store.write("results/ab/c.txt", content)
        assert (reference.num_bytes, store.read(reference)) == (len(content), content)
        assert store.write("results/ab/c.txt", content) == reference
        store.delete(reference.url)
        store.delete(reference.url)
        with pytest.raises(ContentMissing, match="nothing that can be read"):
            store.read(reference)

    def travel(number: int) -> bool:
        content = b"%d" % number * 1000
        return store.read(store.write(f"a/{number}.txt", content)) == content

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(travel, range(40)))


def test_other_content_and_what_is_too_large_is_refused_and_not_read(store: ContentStore) -> None:
    reference = store.write("a.txt", b"a text")
    for found in (b"A text", b"a text and more", b"a"):
        store.write("a.txt", found)
        with pytest.raises(ContentAltered) as caught:
            store.read(reference)
        assert "text and more" not in str(caught.value)
    large = store.write("large.bin", b"x" * (MAX_BYTES + 1))
    with pytest.raises(InvalidField, match=f"at most {MAX_BYTES} bytes"):
        store.read(large)
    # Nor is more of it read than the reference promises.
    small = ContentReference(url=large.url, sha256=large.sha256, num_bytes=MAX_BYTES)
    with pytest.raises(ContentAltered, match="another length"):
        store.read(small)


def test_what_never_was_or_is_a_folder_is_missing(store: ContentStore, settings: ClaimCheckSettings) -> None:
    store.write("folder/a.txt", b"a text")
    for name in ("none", "folder", "folder/a.txt/none"):
        with pytest.raises(ContentMissing):
            store.read(ContentReference.to(f"{settings.url}/{name}", b"a text"))


def test_old_prompts_are_deleted_and_all_else_stays(store: ContentStore) -> None:
    def written(prompt: str) -> ContentReference:
        job = Job(job_id="a", task="code", body=Body(prompt=prompt))
        reference = by_reference(job, 1, store).body_ref
        assert reference is not None
        return reference

    first = written("first")
    others = [store.write(name, b"a text") for name in ("bodies/mine.json", "bodies/00/mine.json", "results/00/a.txt")]
    address = others[2].url.removesuffix("results/00/a.txt")
    store.write(f"{first.url.removeprefix(address)}.{'0' * 32}.part", b"half a")
    past, future = (datetime.now(UTC) + timedelta(hours=hours) for hours in (-1, 1))
    assert drop_prompts(store, past, lambda: False) == (0, True)
    store.delete(first.url, written_before=past)
    assert store.read(first)
    second = written("second")  # behind the first listing
    assert drop_prompts(store, future, lambda: True) == (0, False)
    assert drop_prompts(store, future, lambda: False) == (3, True)
    for gone in (first, second):
        with pytest.raises(ContentMissing):
            store.read(gone)
    assert [store.read(one) for one in others] == [b"a text"] * 3


@pytest.mark.parametrize("kind", ["folder", "S3"])
def test_a_folder_or_bucket_that_is_not_there_is_an_outage(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    url = str(tmp_path / "none")
    options = {}
    if kind == "S3":
        url, options = "s3://no-such-bucket/a", request.getfixturevalue("object_store").options()
    settings = ClaimCheckSettings.model_validate({"url": url, "options": options})
    store = ContentStore(settings)
    reference = ContentReference.to(f"{settings.url}/a.txt", b"a text")
    for act in (lambda: store.read(reference), lambda: store.write("a.txt", b"x"), lambda: store.delete(reference.url)):
        with pytest.raises(ContentStoreUnavailable) as caught:
            act()
        assert caught.value.hint
    assert BUCKET not in url
