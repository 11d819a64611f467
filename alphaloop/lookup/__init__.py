"""Look-up without an engine: what followed earlier occurrences of a text's last tokens. Standard library only."""

from __future__ import annotations
