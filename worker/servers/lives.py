"""What evidence calls a server: the names of an earlier life where it answers as it did then, new ones otherwise.

Cause and blame rest on these names. Another target revision says that the model changed, another engine that the server
or its arithmetic did; the drift report names either (docs/concepts/drift.md).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from alphaloop.errors import ConfigError
from alphaloop.server_identity import ServerIdentity, changes, differs, told_apart
from alphaloop.store.workers import ServerIdentityStore, ServerLife

log = logging.getLogger(__name__)

_REVISION_CHARS: Final = 12  #: as many as the revision of a model that this process loads


@dataclass(frozen=True, slots=True)
class NamedServers:
    """The servers of one worker, as its evidence calls them."""

    target_revision: str  #: of all of them
    engine: str  #: of those that differ, all, joined by +
    context_length: int | None  #: the shortest that is told
    changed: Mapping[str, str]  #: by endpoint, what is other than in its last life, in words


def name_servers(found: Mapping[str, ServerIdentity], store: ServerIdentityStore) -> NamedServers:
    """Name the servers of a worker, by endpoint, and remember what they were.

    Raises ConfigError where two of them serve different models: their texts would be two, and their evidence one.
    """
    refuse_different_models(found)
    engines: dict[str, str] = {}
    changed: dict[str, str] = {}
    with store.naming() as naming:
        known = naming.known()
        revision = revision_of(found, known)
        for endpoint, identity in found.items():
            engines[endpoint] = engine_of(identity, revision, known)
            last = next((life for life in known if life.endpoint == endpoint), None)
            told = differs(last.identity, identity) if last is not None else None
            if told is not None:
                changed[endpoint] = told
            naming.saw(endpoint, identity, target_revision=revision, engine=engines[endpoint], changed=told)
    for endpoint, told in changed.items():
        log.warning("endpoint %s: %s", endpoint, told, extra={"action": "server_changed", "endpoint": endpoint})
    lengths = [one.context_length for one in found.values() if one.context_length is not None]
    return NamedServers(revision, "+".join(sorted(set(engines.values()))), min(lengths, default=None), changed)


def name_unstored(found: Mapping[str, ServerIdentity]) -> NamedServers:
    """The same without a memory of earlier lives, for a measurement that needs no database. Raises ConfigError."""
    refuse_different_models(found)
    lengths = [one.context_length for one in found.values() if one.context_length is not None]
    engine = "+".join(sorted({one.server for one in found.values()}))
    return NamedServers(revision_of(found, ()), engine, min(lengths, default=None), {})


def refuse_different_models(found: Mapping[str, ServerIdentity]) -> None:
    """Every server of a worker answers as the first does, or a ConfigError says which does not."""
    (first, identity), *others = found.items()
    for name, other in others:
        told = told_apart(identity, other)
        if told is not None and told.nature == "weights":
            raise ConfigError(
                f"models.endpoints.{name}: expected the model of {first}, because a task may be sent to either; "
                f"found another: {told.sentence}",
                hint="serve the same weights at both, or give one of them a worker of its own",
            )
        if told is not None:
            log.warning(
                "endpoints %s and %s: the second %s, so texts of one job may differ at near-ties",
                first,
                name,
                told.sentence.removeprefix("it "),
                extra={"action": "servers_differ", "endpoint": name},
            )


def revision_of(found: Mapping[str, ServerIdentity], known: Sequence[ServerLife]) -> str:
    """The revision of an earlier life with the same weights under the same name, else a new one."""
    for life in known:
        if any(_is_same_model(life.identity, identity) for identity in found.values()):
            return life.target_revision
    return next(iter(found.values())).sha256()[:_REVISION_CHARS]


def engine_of(identity: ServerIdentity, revision: str, known: Sequence[ServerLife]) -> str:
    """Kind and version; behind them a number of the arithmetic, where it is not the first of this model there."""
    lives = [life for life in known if life.target_revision == revision and life.identity.server == identity.server]
    for life in lives:
        if told_apart(life.identity, identity) is None:
            return life.engine
    numbered = {life.engine for life in lives}
    return identity.server if not numbered else f"{identity.server}-arithmetic-{len(numbered) + 1}"


def _is_same_model(before: ServerIdentity, after: ServerIdentity) -> bool:
    """Whether nothing says that the weights are others. A moved folder holds the same ones if it answers the same."""
    natures = {change.nature for change in changes(before, after)}
    has_other_name = before.model != after.model
    return "weights" not in natures and not has_other_name
