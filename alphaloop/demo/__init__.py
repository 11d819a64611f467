"""`alphaloop demo`: real jobs over the sources of the running Python, from Kafka to the drift report."""

from __future__ import annotations
