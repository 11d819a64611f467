"""`alphaloop demo`: real jobs over text that is on every machine with a Python, from Kafka to the drift report."""

from __future__ import annotations
