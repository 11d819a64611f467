"""Candidates are kept where every worker finds them, and no other weights than those that were kept are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from alphaloop.errors import ConfigError, ContentAltered, ContentMissing, ContentStoreUnavailable
from alphaloop.settings import Settings
from alphaloop.settings.processes import DraftsSettings
from tests.fixtures.object_store import BUCKET, ObjectStore
from worker.training.keep import KeptDrafts


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """A finished run's folder."""
    folder = tmp_path / "work" / "draft"
    (folder / ".training").mkdir(parents=True)
    (folder / ".training" / "texts.jsonl").write_text("a text of a job")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 9000)
    return folder


@pytest.fixture
def kept(tmp_path: Path) -> KeptDrafts:
    return KeptDrafts(Settings(data_dir=tmp_path / "data"))


def test_a_draft_is_kept_without_texts_and_comes_back_as_it_was(draft: Path, kept: KeptDrafts, tmp_path: Path) -> None:
    location = kept.keep(draft, "abc-l1.2")
    assert location == f"file://{tmp_path}/data/drafts/abc-l1.2"
    assert kept.keep(draft, "abc-l1.2") == location
    folder = kept.fetch(location)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == (draft / "model.safetensors").read_bytes()


def changed(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)


def linked(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


def named(folder: Path, name: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["config.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: changed(folder, "model.safetensors"), "model.safetensors: expected the file that was kept"),
        (lambda folder: changed(folder, "config.json"), "config.json: expected the file that was kept"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: expected a file, found none"),
        (lambda folder: (folder / "b.safetensors").write_bytes(b""), "b.safetensors: expected no weights beside"),
        (linked, "model.safetensors: expected a file, found none"),
        (lambda folder: named(folder, "../config.json"), "expected safetensors and JSON files, found '../config.json'"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is no manifest of a draft"),
    ],
)
def test_what_was_changed_since_is_not_loaded(
    draft: Path, kept: KeptDrafts, spoil: Callable[[Path], object], why: str
) -> None:
    location = kept.keep(draft, "abc")
    spoil(kept.fetch(location))
    with pytest.raises(ContentAltered) as altered:
        kept.fetch(location)
    assert why in altered.value.message


def test_an_address_elsewhere_and_one_without_a_draft_are_refused(draft: Path, kept: KeptDrafts) -> None:
    location = kept.keep(draft, "abc")
    for elsewhere in (f"file://{draft}", f"{location}/../../x", "s3://other/abc"):
        with pytest.raises(ConfigError, match=r"expected a draft below drafts\.url"):
            kept.fetch(elsewhere)
    with pytest.raises(ContentMissing):
        kept.fetch(f"{location}d")


def test_a_full_or_closed_folder_is_the_stores_fault(draft: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = KeptDrafts(Settings(drafts=DraftsSettings(url=str(tmp_path / "file"))))
    with pytest.raises(ContentStoreUnavailable):
        kept.keep(draft, "abc")


def test_workers_fetch_from_an_object_store(
    draft: Path, tmp_path: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = object_store.options()
    monkeypatch.setattr("fsspec.config.conf", {"s3": options})
    settings = Settings(data_dir=tmp_path / "data", drafts=DraftsSettings(url=f"s3://{BUCKET}/drafts-{tmp_path.name}"))
    kept = KeptDrafts(settings)
    location = kept.keep(draft, "abc")
    with pytest.raises(ContentMissing):
        kept.fetch(f"{location}d")
    folder = kept.fetch(location)
    assert folder.is_relative_to(tmp_path / "data")
    assert (folder / "model.safetensors").read_bytes() == (draft / "model.safetensors").read_bytes()
    assert kept.fetch(location) == folder
    changed(folder, "model.safetensors")
    with pytest.raises(ContentAltered):
        kept.fetch(location)
