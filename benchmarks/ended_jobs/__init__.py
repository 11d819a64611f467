"""Whether claims, outcomes, queries and retention keep their time with millions of ended jobs."""

from __future__ import annotations
