"""Every error alphaloop raises, in one tree, which docs/reference/errors.md draws with the codes.

A message names what was found and what was expected; a hint says what to do. Control flow is not an error: a lost
lease, an expired deadline and a cancellation are outcomes, not exceptions.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from alphaloop import page

#: The extra of alphaloop that brings a package which not every installation needs.
_EXTRAS: Final = {
    "accelerate": "decode",
    "aiohttp": "servers",
    "apprise": "notify",
    "aws_msk_iam_sasl_signer": "msk",
    "gguf": "decode",
    "llguidance": "decode",
    "numba": "decode",
    "opentelemetry": "tracing",
    "safetensors": "decode",
    "torch": "decode",
    "transformers": "decode",
}


class AlphaloopError(Exception):
    """Something went wrong in alphaloop. Its `code` is the name of its class unless the class says another."""

    code: ClassVar[str] = "error"

    def __init_subclass__(cls) -> None:
        if "code" not in vars(cls):
            cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__.removesuffix("Error")).lower()

    def __init__(self, message: str | None = None, *, hint: str | None = None) -> None:
        self.message = message or (type(self).__doc__ or "").strip().splitlines()[0]
        self.hint = hint
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


def reason_of(error: BaseException) -> str:
    """Why something failed, fit for logs and results: the message of our own error, of any other only the class.

    The text of a foreign exception may quote a prompt.
    """
    return error.message if isinstance(error, AlphaloopError) else type(error).__name__


class ConfigError(AlphaloopError):
    """A setting is missing, misspelt or out of range."""


class UnknownName(AlphaloopError):
    """Nothing has this name."""


def package_missing(error: ImportError, setting: str | None = None) -> ConfigError:
    """The error in words where an optional package is not installed, which `setting` needs; raises any other again."""
    name = (error.name or "").split(".")[0]
    if name not in _EXTRAS:
        raise error
    needs = f"{setting}: needs the package {name}, which" if setting else f"the package {name}"
    hint = f"pip install 'alphaloop[{_EXTRAS[name]}]'"
    if _EXTRAS[name] == "decode":
        hint += f"; without a GPU, take PyTorch's CPU build, which is 4 GB smaller: {page('guides/deploy.md')}"
    return ConfigError(f"{needs} is not installed", hint=hint)


class MessageError(AlphaloopError):
    """A Kafka message cannot become a job.

    `field` is the path of the offending field (`body.temperature`), None when the message as a whole is at fault.
    Neither the message nor the hint ever contains prompt text.
    """

    def __init__(self, message: str | None = None, *, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.field = field

    def __str__(self) -> str:
        text = f"{self.field}: {self.message}" if self.field else self.message
        return f"{text}\nhint: {self.hint}" if self.hint else text


class MalformedMessage(MessageError):
    """The message is not a UTF-8 JSON object within the size and depth limits."""


class InvalidField(MessageError):
    """A field has the wrong type, is out of range, or asks for something not supported."""


class UnknownTask(MessageError):
    """The task is not one that configs/tasks.toml names."""


class PromptTooLong(MessageError):
    """Prompt and requested output do not fit the target's context."""


class JobTooLarge(MessageError):
    """The keys and values of prompt and requested output would not fit the memory set aside for them."""


class JobConflict(MessageError):
    """This job_id is known with another payload."""


class BrokerError(AlphaloopError):
    """Kafka refused a request."""


class BrokerUnavailable(BrokerError):
    """No Kafka broker answers."""


class BrokerLoginRefused(BrokerUnavailable):
    """A Kafka broker answers, but refuses the login or the TLS connection."""


class DeliveryFailed(BrokerError):
    """A message was not acknowledged by the broker."""


class TopicUnavailable(BrokerError):
    """No message reaches the topic, because it is missing or this user may not write to it."""


class MessageRefused(BrokerError):
    """Kafka refuses this one message, however often it is sent."""


class MessageTooLarge(MessageRefused):
    """The message is larger than its topic or the client accepts."""


class StaleAssignment(BrokerError):
    """A commit came from a group member that no longer owns the partitions; the new owner will redo the work."""

    code = "broker_stale_assignment"


class FatalBrokerError(BrokerError):
    """The Kafka client reported a fatal error and cannot be used any more."""

    code = "broker_fatal"


class StoreError(AlphaloopError):
    """Postgres refused a statement."""


class StoreUnavailable(StoreError):
    """Postgres is away or cannot do this now: the same statement works later."""


class LeadershipLost(StoreError):
    """Another scheduler leads now, so this one may write nothing."""


class StoreBusy(StoreUnavailable):
    """Another transaction holds what the statement needs: the same statement works once that one has ended."""


class StoreLoginRefused(StoreUnavailable):
    """Postgres answers, but refuses the login, the database or the TLS connection."""


class StoreValueRefused(StoreError):
    """A row that Postgres never takes: malformed, against a constraint, or too large."""


class SchemaMismatch(StoreError):
    """The database's schema revision is outside the range this code runs on."""


class ContentError(AlphaloopError):
    """Content that a message refers to cannot be read or written."""


class ContentStoreUnavailable(ContentError):
    """The store of content that messages refer to does not answer: the same call works later."""


class ContentMissing(ContentError):
    """Nothing that can be read is at the address of a reference."""


class ContentAltered(ContentError):
    """The content at the address of a reference is not what was referred to."""


class ModelError(AlphaloopError):
    """A model or tokenizer cannot be used."""


class ModelNotFound(ModelError):
    """There is nothing to load at the given source."""


class UnsupportedModel(ModelError):
    """The model loads, but cannot be decoded exactly here."""


class IncompatiblePair(ModelError):
    """A draft model cannot, or should not, draft for this target."""


class DecodeFailed(ModelError):
    """The engine could not decode a job."""


class GrammarConflict(ModelError):
    """A text has reached a place at which its grammar and the job's other fields together allow no token."""


class EngineSick(ModelError):
    """The engine can decode nothing any more, so the process exits and gives its jobs back."""


class ServerError(AlphaloopError):
    """An inference server could not decode a job."""


class ServerUnavailable(ServerError):
    """The inference server is away or cannot take this request now: the same request works later."""


class ServerBusy(ServerUnavailable):
    """The inference server asks to be asked again later; `retry_after_s` is None where it does not say when."""

    def __init__(
        self, message: str | None = None, *, hint: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class ServerUnreachable(ServerUnavailable):
    """No connection to the inference server could be made, so the request never reached it."""


class ServerSilent(ServerUnavailable):
    """The inference server took a request and then said nothing for too long."""


class ServerLoginRefused(ServerUnavailable):
    """The inference server answers, but refuses the credentials or the TLS connection."""


class ServerFailed(ServerError):
    """The inference server reports an error of its own about a request."""


class ReplyCut(ServerError):
    """The connection to the inference server ended before the whole reply had come."""


class ReplyInvalid(ServerError):
    """A reply has another form than the documented one, is too large, or contradicts itself."""


class RequestRefused(ServerError):
    """The inference server refuses this one request, however often it is sent."""


class RequestKillsServer(ServerError):
    """Inference servers died while they worked on this request alone, so it is sent to none any more."""


class ModelNotServed(ServerError):
    """The inference server does not serve the model that was asked for."""


class EmbeddedError(AlphaloopError):
    """The embedded broker or database failed."""


class InstallFailed(EmbeddedError):
    """A download was refused, interrupted, or differs from its checksum."""


class StartFailed(EmbeddedError):
    """A child process did not start."""


class NotificationFailed(AlphaloopError):
    """A service did not take a notification."""


class WorkerThreadDied(AlphaloopError):
    """A thread of the worker ended with an error: the process exits, and another worker takes over its jobs."""
