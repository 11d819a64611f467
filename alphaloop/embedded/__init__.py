"""The broker and the database as child processes, for a laptop and for tests."""

from __future__ import annotations
