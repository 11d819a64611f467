"""The only code that talks to Postgres: one module for each group of tables, each a small class over one Database."""

from __future__ import annotations
