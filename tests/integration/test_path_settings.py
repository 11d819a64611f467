"""Every setting that is a path, whatever lies there: an error that names the setting or the path, or it works."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from alphaloop.claim_check.store import ContentStore
from alphaloop.embedded.install import find_kafka_home
from alphaloop.embedded.stack import EmbeddedStack, running_stack
from alphaloop.errors import AlphaloopError
from alphaloop.kafka.producer import Producer
from alphaloop.settings import Settings, load_settings
from alphaloop.settings.load import SHIPPED_CONFIGS
from worker.decoding.models import find_description, find_weights

NOBODY = 65534


def a_file(place: Path) -> None:
    place.write_text("not what is expected here")


def unreadable(place: Path) -> None:
    place.mkdir(mode=0o000)


def an_unreadable_file(place: Path) -> None:
    place.write_text("secret")
    place.chmod(0o000)


def below_a_file(place: Path) -> None:
    place.parent.rmdir()
    place.parent.write_text("not a folder")


KINDS: dict[str, Callable[[Path], object]] = {
    "file": a_file,
    "folder": Path.mkdir,
    "missing": lambda place: None,
    "unreadable folder": unreadable,
    "unreadable file": an_unreadable_file,
    "dangling link": lambda place: place.symlink_to(place.parent / "nowhere"),
    "below a file": below_a_file,
}


def load(path: Path, **sections: Any) -> Settings:
    return load_settings(overrides={"data_dir": path.parent / "data", **sections})


def start_stack(path: Path) -> None:
    with EmbeddedStack(load_settings(overrides={"data_dir": path}), on_event=lambda line: None):
        pass


def kafka(name: str) -> Callable[[Path], object]:
    given = {"bootstrap_servers": "127.0.0.1:1", "security_protocol": "SSL"}
    return lambda path: Producer(load(path, kafka={**given, name: str(path)}).kafka).close()


def contents(path: Path) -> None:
    store = ContentStore.of(load(path, claim_check={"url": str(path)}).claim_check)
    assert store is not None
    store.read(store.write("one", b"content"))


SETTINGS: dict[str, Callable[[Path], object]] = {
    "configs": lambda path: load_settings(path),
    "profile": lambda path: load_settings(SHIPPED_CONFIGS, profile=str(path.with_suffix(""))),
    "data_dir, read": running_stack,
    "data_dir, started": start_stack,
    "embedded.kafka_home": lambda path: find_kafka_home(load(path, embedded={"kafka_home": str(path)})),
    "kafka.ssl_ca_location": kafka("ssl_ca_location"),
    "kafka.ssl_certificate_location": kafka("ssl_certificate_location"),
    "kafka.ssl_key_location": kafka("ssl_key_location"),
    "claim_check.url": contents,
    "models.target.source": lambda path: find_weights(str(path)),
    "models.target.source, described": lambda path: find_description(str(path)),
}


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        (setting, kind)
        for setting in SETTINGS
        for kind in KINDS
        if setting != "data_dir, started" or kind not in ("folder", "missing")  # there a stack starts
    ],
)
def test_what_lies_at_a_path_is_told_in_words(tmp_path: Path, setting: str, kind: str) -> None:
    place = tmp_path / "folder" / "place.toml"
    place.parent.mkdir()
    KINDS[kind](place)
    a_file(tmp_path / "warm.toml")
    with suppress(Exception):  # so that nothing is imported as another user, who may not read the library
        SETTINGS[setting](tmp_path / "warm.toml")
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(0o755)
    if place.parent.is_dir():
        place.parent.chmod(0o777)
    refusal: AlphaloopError | None = None
    with as_nobody():
        try:
            SETTINGS[setting](place)
        except AlphaloopError as error:
            refusal = error
    works = setting == "data_dir, read" or ("folder" in kind and setting in ("configs", "kafka.ssl_ca_location"))
    if refusal is None:
        assert works
    else:
        assert str(place) in f"{refusal.message} {refusal.hint}" or setting in refusal.message
