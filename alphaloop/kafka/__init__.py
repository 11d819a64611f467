"""The only code that talks to a broker: settings to librdkafka, one consumer, one producer, topics, error mapping."""

from __future__ import annotations
