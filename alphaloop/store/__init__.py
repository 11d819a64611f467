"""The only code that talks to Postgres: one module a concern, each a small class over one Database."""

from __future__ import annotations
