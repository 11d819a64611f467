"""A reference to content that is too large for a message: where it lies, and how to know it again."""

from __future__ import annotations

import hashlib
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Address = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[!-~]+$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class ContentReference(BaseModel):
    """Content of a job or a result outside Kafka. Readers refuse content of another length or digest."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    url: Address = Field(description="Where the content lies, below an address that the worker is allowed to read.")
    sha256: Sha256 = Field(description="SHA-256 of the content, in lower-case hexadecimal digits.")
    num_bytes: int = Field(ge=1, description="Length of the content.")

    @classmethod
    def to(cls, url: str, content: bytes) -> Self:
        """The reference to this content at `url`."""
        return cls(url=url, sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content))

    def fits(self, content: bytes) -> bool:
        """Whether this is the content that was referred to."""
        return len(content) == self.num_bytes and hashlib.sha256(content).hexdigest() == self.sha256
