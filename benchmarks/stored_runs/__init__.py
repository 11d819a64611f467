"""Whether the documents' queries and the scheduler's reads keep their time with 20 million stored runs."""

from __future__ import annotations
