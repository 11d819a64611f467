"""The control topic: `{"action": "cancel", "job_id": "…"}`. The worker that reads it stores it for all workers."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from alphaloop.errors import InvalidField, MalformedMessage
from alphaloop.messages.job import Identifier


class Cancellation(BaseModel):
    """A request to cancel one job, before or while it is decoded. A job that has ended is not changed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    action: Literal["cancel"]
    job_id: Identifier


def parse_cancellation(value: bytes | None) -> Cancellation:
    """Raises MalformedMessage or InvalidField."""
    try:
        return Cancellation.model_validate(json.loads(value or b""))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise InvalidField(first["msg"], field=".".join(map(str, first["loc"])) or None) from None
    except (ValueError, RecursionError):
        raise MalformedMessage('expected {"action": "cancel", "job_id": "…"}, found no JSON') from None
