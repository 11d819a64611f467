"""Where candidates are kept: a folder a revision below `[drafts] url`, and a manifest with the digest of every file.

The manifest is written last, so a folder without one holds nothing. Every file is compared with the manifest each time
that a draft is fetched, because whoever writes there decides what workers draft with.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from alphaloop.claim_check.addresses import is_below
from alphaloop.claim_check.clients import StoreClient, scheme_of
from alphaloop.errors import AlphaloopError, ConfigError, ContentAltered, ContentMissing, ContentStoreUnavailable
from alphaloop.files import replace_file
from alphaloop.settings import Settings

MANIFEST: Final = "manifest.json"
#: Files of a draft: nothing else is kept or fetched.
FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.(safetensors|json)")
_PART_BYTES: Final = 1 << 20
_Answer = TypeVar("_Answer")


class KeptFile(BaseModel):
    """One file of a draft."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @classmethod
    def of(cls, path: Path) -> KeptFile:
        """What a file is now."""
        digest, num_bytes = hashlib.sha256(), 0
        with path.open("rb") as file:
            while part := file.read(_PART_BYTES):
                digest.update(part)
                num_bytes += len(part)
        return cls(num_bytes=num_bytes, sha256=digest.hexdigest())


class Manifest(BaseModel):
    """All files of a draft, by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: dict[str, KeptFile]


class KeptDrafts:
    """The folders below one address. Every method raises ContentStoreUnavailable where the store does not answer."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where the package of the address's scheme is missing."""
        self._url = settings.drafts_url
        self._is_local = scheme_of(self._url) == "file"
        self._client = StoreClient(scheme_of(self._url), {})
        self._cache = settings.data_dir / "drafts-fetched"

    def keep(self, folder: Path, revision: str) -> str:
        """Copy the files of a draft; its address. The same draft again is harmless."""
        location = f"{self._url}/{revision}"
        paths = sorted(path for path in folder.iterdir() if FILE_NAME.fullmatch(path.name) and path.name != MANIFEST)
        manifest = Manifest(files={path.name: KeptFile.of(path) for path in paths}).model_dump_json(indent=2)

        def write() -> None:
            self._client.ask("makedirs", self._client.path_of(location), exist_ok=True)
            for path in paths:
                self._put(path, f"{location}/{path.name}")
            if self._is_local:
                replace_file(Path(self._client.path_of(f"{location}/{MANIFEST}")), manifest)
            else:
                self._client.ask("pipe_file", self._client.path_of(f"{location}/{MANIFEST}"), manifest.encode())

        self._answer(location, write)
        return location

    def fetch(self, location: str) -> Path:
        """A folder of this machine with the draft's files, each of them checked.

        Raises ConfigError for an address elsewhere, ContentMissing where no draft is kept, ContentAltered where a file
        is not the one that was kept.
        """
        if not is_below(location, (self._url,)):
            raise ConfigError(f"expected a draft below drafts.url, {self._url}, found one at {location}")
        manifest = self._manifest(location)
        if self._is_local:
            folder = Path(self._client.path_of(location))
            _compare(folder, manifest, location)
            return folder
        folder = self._cache / location.rpartition("/")[2]
        if not folder.is_dir():
            self._download(location, manifest, folder)
        _compare(folder, manifest, location)
        return folder

    def _manifest(self, location: str) -> Manifest:
        path = self._client.path_of(f"{location}/{MANIFEST}")
        try:
            content = self._answer(location, lambda: self._client.ask("cat_file", path))
        except FileNotFoundError:
            raise ContentMissing(f"no draft is kept at {location}", hint="was its folder deleted?") from None
        try:
            manifest = Manifest.model_validate_json(content)
        except ValidationError:
            raise ContentAltered(f"{location}/{MANIFEST} is no manifest of a draft") from None
        if wrong := [name for name in manifest.files if not FILE_NAME.fullmatch(name)]:
            raise ContentAltered(f"{location}/{MANIFEST}: expected safetensors and JSON files, found {wrong[0]!r}")
        return manifest

    def _download(self, location: str, manifest: Manifest, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = folder.with_name(f"{folder.name}.{secrets.token_hex(8)}.part")
        part.mkdir()
        try:
            for name in manifest.files:
                there, here = self._client.path_of(f"{location}/{name}"), str(part / name)
                self._answer(location, lambda: self._client.ask("get_file", there, here, takes_long=True))  # noqa: B023
            _compare(part, manifest, location)
            if not folder.is_dir():
                part.rename(folder)
        except FileNotFoundError:
            raise ContentAltered(f"{location}: expected the files of its {MANIFEST}, found fewer") from None
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _put(self, path: Path, url: str) -> None:
        there = self._client.path_of(url)
        if self._is_local:
            part = f"{there}.{secrets.token_hex(8)}.part"
            try:
                shutil.copyfile(path, part)
                os.replace(part, there)
            finally:
                Path(part).unlink(missing_ok=True)
        else:
            self._client.ask("put_file", str(path), there, takes_long=True)

    def _answer(self, location: str, act: Callable[[], _Answer]) -> _Answer:
        try:
            return act()
        except (AlphaloopError, FileNotFoundError):
            raise
        except Exception as error:
            # Every client has exceptions of its own; their texts may hold credentials.
            raise ContentStoreUnavailable(
                f"{location}: {type(error).__name__}", hint="is there room, and may this process read and write there?"
            ) from None


def _compare(folder: Path, manifest: Manifest, location: str) -> None:
    """Raise ContentAltered unless the folder holds the draft's files, and no further weights."""
    for name, kept in manifest.files.items():
        path = folder / name
        if not path.exists() or not stat.S_ISREG(path.lstat().st_mode):
            raise ContentAltered(f"{location}/{name}: expected a file, found none")
        if path.stat().st_size != kept.num_bytes or KeptFile.of(path) != kept:
            raise ContentAltered(f"{location}/{name}: expected the file that was kept, found other content")
    if strange := sorted(path.name for path in folder.glob("*.safetensors") if path.name not in manifest.files):
        raise ContentAltered(f"{location}/{strange[0]}: expected no weights beside those of {MANIFEST}")
