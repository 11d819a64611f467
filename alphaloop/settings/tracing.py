"""`[tracing]`: whether the way of a job is sent to a collector of OpenTelemetry traces."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr, StringConstraints

from alphaloop.settings.section import Section, Share

HttpUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+\S*$", max_length=2000)]


class TracingSettings(Section):
    """Where spans go. They hold names, counts and times, and never text of a prompt or of a result."""

    endpoint: HttpUrl | None = (
        None  #: OTLP over HTTP, with its path: http://collector:4318/v1/traces; unset: no traces are made
    )
    headers: dict[str, SecretStr] = Field({})  #: sent with every request to the endpoint, for its credentials
    sample_share: Share = (
        1.0  #: share of the jobs without a trace of their own that get one; a job with a trace does as its trace says
    )
