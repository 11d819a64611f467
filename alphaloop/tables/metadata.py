"""The one MetaData, and the columns that several tables share."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, Column, DateTime, MetaData, Text, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.schema import SchemaItem

metadata: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def column(
    name: str, kind: Any, comment: str, *items: SchemaItem, nullable: bool = False, default: str = "", **kwargs: Any
) -> Column[Any]:
    """A column with its comment; `default` is SQL. Every row has a value unless the column is `nullable`."""
    given: dict[str, Any] = {"server_default": text(default)} if default else {}
    return Column(name, kind, *items, nullable=nullable, comment=comment, **given, **kwargs)


def instant(name: str, comment: str, *, nullable: bool = False, **kwargs: Any) -> Column[Any]:
    """A column of a point in time with its zone."""
    return column(name, DateTime(timezone=True), comment, nullable=nullable, **kwargs)


def counts_by_position(name: str, comment: str) -> Column[Any]:
    """One integer a draft position, first position first; empty when nothing was proposed."""
    return column(name, ARRAY(BigInteger, as_tuple=True), comment, default="'{}'")


def evidence_key(*, primary_key: bool = False) -> list[Column[Any]]:
    """The key of all evidence, alphaloop.acceptance.EvidenceKey; empty text where a part does not apply."""
    parts = {
        "task": "Kind of prompt",
        "segment": "Caller's label; empty without one",
        "target_revision": "Hash of the target's weights",
        "drafter": "Name of the drafter; empty for vanilla",
        "draft_revision": "Revision of the drafter; empty for vanilla",
        "engine": "Decoding library, version and dtype",
        "sampling_bucket": "Sampling settings that share a history",
        "prompt_bucket": "Prompt lengths that share a history",
    }
    given: dict[str, Any] = {"primary_key": True} if primary_key else {"default": "''"}
    return [column(name, Text, comment, **given) for name, comment in parts.items()]
