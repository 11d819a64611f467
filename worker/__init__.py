"""The GPU process: jobs from Kafka, through the engine, into Postgres and back."""

from __future__ import annotations
