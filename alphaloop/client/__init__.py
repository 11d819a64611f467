"""The Python client: send jobs, read their results and texts, cancel. It needs Kafka, no database and no model."""

# ruff: noqa: I001 - each name once, as itself: it is exported
from __future__ import annotations

from alphaloop.client.arrivals import (
    Piece as Piece,
    ResultsMissing as ResultsMissing,
    ToolCallPiece as ToolCallPiece,
)
from alphaloop.client.asynchronous import AsyncClient as AsyncClient
from alphaloop.client.arrivals import Batch as Batch, SubmissionStopped as SubmissionStopped
from alphaloop.client.sync import Client as Client
from alphaloop.messages import Job as Job, Result as Result, Status as Status
from alphaloop.settings import KafkaSettings as KafkaSettings, Settings as Settings
