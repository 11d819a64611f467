"""Large prompts and texts in a folder or an object store, with bounds on size and time; messages refer to them.

fsspec's client of each scheme does the reading and writing. A prompt is stored under its digest, a text under its job.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from alphaloop.claim_check.addresses import is_below
from alphaloop.claim_check.clients import StoreClient, scheme_of
from alphaloop.errors import (
    ContentAltered,
    ContentError,
    ContentMissing,
    ContentStoreUnavailable,
    InvalidField,
)
from alphaloop.files import replace_file
from alphaloop.messages import Choice, ContentReference, Job, Result, encode_job, encode_prompt
from alphaloop.settings import ClaimCheckSettings


class ContentStore:
    """One folder or prefix that content is written to, and all that it may be read from. Threads share it.

    Every method raises ContentStoreUnavailable where the store does not answer: the same call works later.
    """

    def __init__(self, settings: ClaimCheckSettings) -> None:
        """The settings name a store. Raises ConfigError where a scheme's package is missing or refuses its options."""
        self._url = settings.url or ""
        self._prefixes = (self._url, *settings.read_urls)
        self._max_bytes = settings.max_bytes
        options = settings.client_options()
        self._clients = {scheme: StoreClient(scheme, options) for scheme in set(map(scheme_of, self._prefixes))}

    @classmethod
    def of(cls, settings: ClaimCheckSettings) -> Self | None:
        """The store that the settings name; None where they name none."""
        return None if settings.url is None else cls(settings)

    def check(self, reference: ContentReference, field: str) -> None:
        """Raises InvalidField, for `field` of a message, where the reference may not be followed."""
        if not is_below(reference.url, self._prefixes):
            raise InvalidField(
                "expected an address below claim_check.url or one of claim_check.read_urls, found another",
                field=f"{field}.url",
                hint="write the content where workers may read, in plain names without . or ..",
            )
        if reference.num_bytes > self._max_bytes:
            raise InvalidField(
                f"expected at most {self._max_bytes} bytes, found {reference.num_bytes}",
                field=f"{field}.num_bytes",
                hint="shorten the content, or raise claim_check.max_bytes",
            )

    def read(self, reference: ContentReference) -> bytes:
        """The content, verified.

        Raises ContentMissing where nothing readable is there, ContentAltered where it is not what was referred to,
        InvalidField where the address may not be read.
        """
        self.check(reference, "reference")
        client, path = self._place(reference.url)

        def read() -> bytes:
            self._refuse_links(reference.url, path)
            facts = client.ask("info", path)
            if facts.get("type") != "file":
                raise ContentMissing(f"no object at {reference.url}")
            if facts.get("size") != reference.num_bytes:
                raise ContentAltered(_differs(reference, "another length"))
            # One byte more than promised, so that content that grows meanwhile is seen and never read whole.
            content = client.ask("cat_file", path, start=0, end=reference.num_bytes + 1)
            if not reference.fits(content):
                raise ContentAltered(_differs(reference, "other content"))
            return bytes(content)

        try:
            return self._answer(reference.url, read)
        except _NOT_THERE:
            self._require_root(reference.url)
            raise ContentMissing(f"nothing that can be read at {reference.url}") from None

    def write(self, name: str, content: bytes) -> ContentReference:
        """Store the content under this name, below the store's own address; again the same is harmless."""
        url = f"{self._url}/{name}"
        client, path = self._place(url)

        def write() -> None:
            if scheme_of(url) == "file":
                self._require_root(url)  # made here, a folder would hide that its disk is not mounted
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                replace_file(Path(path), content)
            else:
                client.ask("pipe_file", path, content)

        try:
            self._answer(url, write)
        except _NOT_THERE:
            raise ContentStoreUnavailable(f"cannot write below {self._url}", hint=_MAY_NOT) from None
        return ContentReference.to(url, content)

    def written_before(self, folder: str, moment: datetime) -> list[str]:
        """The objects in this folder, below the store's own address, that were last written before `moment`."""
        url = f"{self._url}/{folder}"
        client, path = self._place(url)
        try:
            objects = self._answer(url, lambda: client.ask("ls", path, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            self._require_root(url)
            return []
        except OSError as error:
            raise ContentStoreUnavailable(f"cannot list {url}: {type(error).__name__}", hint=_MAY_NOT) from None
        return [
            f"{url}/{_name_of(facts)}" for facts in objects if facts.get("type") == "file" and _is_old(facts, moment)
        ]

    def delete(self, url: str, *, written_before: datetime | None = None) -> None:
        """Delete what lies there; nothing there is as good, unless the folder or bucket itself is not there.

        With `written_before`, what was written since then stays.
        """
        if not is_below(url, self._prefixes):
            hint = "add where it lies to claim_check.read_urls"
            raise ContentStoreUnavailable(f"cannot delete {url}: it lies outside claim_check.url", hint=hint)
        client, path = self._place(url)

        def delete() -> None:
            if written_before is None or _is_old(client.ask("info", path), written_before):
                client.ask("rm_file", path)

        try:
            self._answer(url, delete)
        except FileNotFoundError:
            self._require_root(url)
        except OSError as error:
            raise ContentStoreUnavailable(f"cannot delete {url}: {type(error).__name__}", hint=_MAY_NOT) from None

    def _place(self, url: str) -> tuple[StoreClient, str]:
        client = self._clients[scheme_of(url)]
        return client, client.path_of(url)

    def _answer(self, url: str, act: Callable[[], _Answer]) -> _Answer:
        """What `act` answers; whatever a client raises because its store is away becomes ContentStoreUnavailable."""
        try:
            return act()
        except (ContentError, InvalidField, *_NOT_THERE):
            raise
        except Exception as error:
            # Every client has exceptions of its own; their texts may hold credentials.
            raise ContentStoreUnavailable(
                f"no answer from the store of {url.rpartition('/')[0]}: {type(error).__name__}",
                hint="is the store up, and are its credentials right?",
            ) from None

    def _refuse_links(self, url: str, path: str) -> None:
        """A link in the folder must not lead out of it."""
        if scheme_of(url) == "file" and not any(
            Path(os.path.realpath(path)).is_relative_to(os.path.realpath(prefix.removeprefix("file://")))
            for prefix in self._prefixes
            if scheme_of(prefix) == "file"
        ):
            raise ContentMissing(f"{url} leads out of the folder")

    def _require_root(self, url: str) -> None:
        """Raises ContentStoreUnavailable where the folder or bucket itself is not there, or refuses the login."""
        prefix = next(prefix for prefix in self._prefixes if url.startswith(f"{prefix}/"))
        client, path = self._place(prefix)
        root = path if scheme_of(prefix) == "file" else path.split("/")[0]
        try:
            if not self._answer(prefix, lambda: client.ask("exists", root)):
                # Clients of object stores say no as well where they are not let in, and here they say why.
                self._answer(prefix, lambda: client.ask("info", root))
        except PermissionError:
            raise ContentStoreUnavailable(f"not let into {prefix}", hint=_MAY_NOT) from None
        except FileNotFoundError:
            hint = "is the disk mounted, and does the bucket exist?"
            raise ContentStoreUnavailable(f"there is no {prefix}", hint=hint) from None


def by_reference(job: Job, max_bytes: int, store: ContentStore | None) -> Job:
    """The job as it is sent: its prompt in the store if its message would be larger than `max_bytes`.

    The prompt is stored under its digest, so that the same job sent twice has the same reference. Without a store the
    job stays as it is, and a worker refuses it. Raises ContentStoreUnavailable.
    """
    if store is None or job.body_ref is not None or len(encode_job(job)) <= max_bytes:
        return job
    content = encode_prompt(job)
    digest = hashlib.sha256(content).hexdigest()
    reference = store.write(f"{_BODIES}/{digest[:2]}/{digest}.json", content)
    return job.model_copy(update={"body_ref": reference})


def text_by_reference(result: Result, store: ContentStore) -> Result:
    """The result with its text in the store, or with text and choices, which have the text, where it has choices.

    The name there is of job and attempt: a repeat writes the same.
    """
    digest = hashlib.sha256(result.job_id.encode()).hexdigest()
    name = f"{_RESULTS}/{digest[:2]}/{digest}.{result.attempt}"
    if result.choices:
        reference = store.write(f"{name}.json", _CHOICES.dump_json(result.choices, exclude_none=True))
        return result.model_copy(update={"text": None, "choices": (), "choices_ref": reference})
    reference = store.write(f"{name}.txt", (result.text or "").encode())
    return result.model_copy(update={"text": None, "text_ref": reference})


def with_text(result: Result, store: ContentStore | None) -> Result:
    """The result with its texts, wherever they lie; as it is without a store. Raises ContentError, InvalidField."""
    if store is None:
        return result
    if result.text_ref is not None:
        return result.model_copy(update={"text": store.read(result.text_ref).decode(), "text_ref": None})
    if result.choices_ref is not None:
        try:
            choices = _CHOICES.validate_json(store.read(result.choices_ref))
        except ValidationError:
            raise ContentAltered(f"{result.choices_ref.url} has no choices of a result") from None
        text = choices[0].said.content
        return result.model_copy(update={"text": text, "choices": choices, "choices_ref": None})
    return result


def drop_prompts(store: ContentStore, before: datetime, time_is_up: Callable[[], bool]) -> tuple[int, bool]:
    """Delete what `by_reference` has not written again since `before`; returns how much, and whether that is all.

    Runs of different hours begin at different folders, so that each folder has its turn where the time is up early.
    Raises ContentStoreUnavailable.
    """
    num_dropped = 0
    first = int(before.timestamp() // 3600) * _STRIDE
    for number in range(first, first + _NUM_FOLDERS):
        if time_is_up():
            return num_dropped, False
        for url in store.written_before(f"{_BODIES}/{number % _NUM_FOLDERS:02x}", before):
            if not _PROMPT.fullmatch(url.rpartition("/")[2]):
                continue
            if time_is_up():
                return num_dropped, False
            store.delete(url, written_before=before)
            num_dropped += 1
    return num_dropped, True


_Answer = TypeVar("_Answer")
_NOT_THERE: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_MAY_NOT: Final = "are the credentials right, and may they read, write, delete and list there?"


def _name_of(facts: Mapping[str, Any]) -> str:
    return str(facts["name"]).rstrip("/").rpartition("/")[2]


def _is_old(facts: Mapping[str, Any], moment: datetime) -> bool:
    written = _written_at(facts)
    return written is not None and written < moment


def _differs(reference: ContentReference, content: str) -> str:
    return f"expected {reference.num_bytes} bytes with the digest of the reference at {reference.url}, found {content}"


_BODIES: Final = "bodies"
_RESULTS: Final = "results"
_CHOICES: Final = TypeAdapter(Annotated[tuple[Choice, ...], Field(min_length=1)])
_NUM_FOLDERS: Final = 256
#: A prompt, or what a writer left of one when it was killed.
_PROMPT: Final = re.compile(r"[0-9a-f]{64}\.json(\.[0-9a-f]{32}\.part)?")
#: Shares no factor with the number of folders, so that a day's runs begin all over it.
_STRIDE: Final = 37
#: What clients call the moment of the last write.
_WRITTEN_AT: Final = ("LastModified", "mtime", "last_modified", "created")


def _written_at(facts: Mapping[str, Any]) -> datetime | None:
    """When an object was last written, from what `info` or `ls` say of it; None where the client does not say it."""
    moment = next((facts[name] for name in _WRITTEN_AT if name in facts), None)
    if isinstance(moment, int | float):
        return datetime.fromtimestamp(moment, UTC)
    return moment if isinstance(moment, datetime) and moment.tzinfo else None
