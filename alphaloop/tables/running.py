"""What runs on this schema: which code may, and which scheduler leads."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Table, Text

from alphaloop.tables.metadata import NOW, instant, metadata

#: A migration that only adds inserts its own revision; one that removes something also deletes the rows of the
#: releases that still use it.
code_revisions: Final = Table(
    "code_revisions",
    metadata,
    Column("revision", Text, primary_key=True, comment="The newest schema revision that such a release knows"),
    comment="Which releases can run on the schema as it is now; the oldest of them is the oldest code that can",
)

leader_terms: Final = Table(
    "leader_terms",
    metadata,
    Column("role", Text, primary_key=True, comment="What is led: scheduler"),
    Column("term", BigInteger, nullable=False, comment="Number of the leader, from 1"),
    instant("began_at", "When it began to lead", server_default=NOW),
    comment="Who leads now, by number: a leader of an earlier term can write nothing any more",
)

leader_leases: Final = Table(
    "leader_leases",
    metadata,
    Column("role", Text, primary_key=True, comment="What is led: scheduler"),
    Column("owner", Text, nullable=False, comment="Process that leads"),
    instant("expires_at", "When another may lead, unless it is renewed"),
    comment="Who leads behind a pooler in transaction mode, where no session keeps an advisory lock",
)
