"""`[claim_check]`: the store of content that is too large for Kafka."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator

from alphaloop.claim_check.addresses import prefix_of
from alphaloop.settings.section import Section


class ClaimCheckSettings(Section):
    """Where content lies that is too large for a message: prompts of jobs, texts of results."""

    url: str | None = None  #: a folder, or s3://bucket/path (gs, abfs); unset: nothing travels by reference
    read_urls: tuple[str, ...] = Field(
        (), max_length=100
    )  #: further folders or prefixes from which workers read the prompts of jobs
    max_bytes: int = Field(32 << 20, ge=1 << 10)  #: of one prompt or text
    options: dict[str, SecretStr | bool | int | float] = Field(
        {}
    )  #: of the object store's client, such as endpoint_url; credentials come better from its own environment variables

    @field_validator("url")
    @classmethod
    def _one_spelling(cls, url: str | None) -> str | None:
        return None if url is None else prefix_of(url)

    @field_validator("read_urls")
    @classmethod
    def _one_spelling_each(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(prefix_of(url) for url in urls)

    def client_options(self) -> dict[str, str | bool | int | float]:
        """The options as the client takes them. They hold secrets: never log them."""
        return {
            name: option.get_secret_value() if isinstance(option, SecretStr) else option
            for name, option in self.options.items()
        }
