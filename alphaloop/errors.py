"""Every error alphaloop raises, in one tree.

    AlphaloopError
    ├── ConfigError               a setting is missing, misspelt or out of range
    ├── MessageError              a Kafka message that cannot become a job; goes to the dead-letter topic
    │   ├── MalformedMessage      not a UTF-8 JSON object within the size and depth limits
    │   ├── InvalidField          a field of the wrong type, out of range, or not supported
    │   ├── UnknownTask           a task that configs/tasks.toml does not name
    │   ├── PromptTooLong         prompt and requested output do not fit the target's context
    │   ├── JobTooLarge           the job's keys and values would not fit the memory, even alone
    │   └── JobConflict           a known job_id with another payload
    ├── BrokerError               Kafka refused or is gone
    │   ├── BrokerUnavailable     no broker answers at bootstrap.servers
    │   │   └── BrokerLoginRefused a broker answers, but refuses the login or the TLS connection
    │   ├── DeliveryFailed        a message was not acknowledged in time
    │   ├── TopicUnavailable      no message reaches the topic: it is missing, or this user may not write to it
    │   ├── MessageRefused        Kafka refuses this one message, however often it is sent
    │   │   └── MessageTooLarge   the message is larger than its topic or the client accepts
    │   ├── StaleAssignment       a commit for partitions that this group member no longer owns
    │   └── FatalBrokerError      the client cannot continue and must be replaced: the process exits
    ├── StoreError                Postgres refused
    │   ├── StoreUnavailable      Postgres is away or cannot do this now: the same statement works later
    │   │   ├── StoreBusy         another transaction holds what the statement needs
    │   │   └── StoreLoginRefused Postgres answers, but refuses the login, the database or the TLS connection
    │   ├── StoreValueRefused     a row that Postgres never takes, whoever sends it
    │   ├── LeadershipLost        another scheduler leads: what this one would write is refused
    │   └── SchemaMismatch        the database's revision is outside the range this code runs on
    ├── ContentError              content that a message refers to
    │   ├── ContentStoreUnavailable the store of content is away: the same call works later
    │   ├── ContentMissing        nothing that can be read is at the address of a reference
    │   └── ContentAltered        the content is not what was referred to
    ├── ModelError                a model or tokenizer
    │   ├── ModelNotFound         nothing to load at the given source
    │   ├── UnsupportedModel      found, but incomplete or not decodable exactly here
    │   ├── IncompatiblePair      a draft model that cannot or should not draft for this target
    │   ├── DecodeFailed          the engine could not decode a job; a self-test says whose fault that is
    │   └── EngineSick            the engine can decode nothing any more: the process exits, jobs are given back
    ├── ServerError               an inference server that a worker sends jobs to
    │   ├── ServerUnavailable     the server is away, or cannot take this request now: the same one works later
    │   │   ├── ServerBusy        the server asks to be asked again later, and may say when
    │   │   ├── ServerUnreachable no connection could be made, so the request never reached the server
    │   │   ├── ServerSilent      the server took the request, and then said nothing for too long
    │   │   └── ServerLoginRefused the server answers, but refuses the credentials or the TLS connection
    │   ├── ServerFailed          the server reports an error of its own about this request
    │   ├── ReplyCut              the connection ended before the whole reply had come
    │   ├── ReplyInvalid          a reply in another form than documented, too large, or at odds with itself
    │   ├── RequestRefused        the server refuses this one request, however often it is sent
    │   ├── RequestKillsServer    servers die whenever they work on this request: it is sent to none any more
    │   └── ModelNotServed        the server does not serve the model that was asked for
    ├── EmbeddedError             the broker or database that alphaloop starts itself
    │   ├── InstallFailed         a download was refused, interrupted, or differs from its checksum
    │   └── StartFailed           a child process did not start
    ├── NotificationFailed        a service did not take a notification: the same one is sent again later
    └── WorkerThreadDied          a thread of the worker ended with an error of alphaloop's: the process exits

A message names what was found and what was expected; a hint says what to do. Control flow is not an error: a lost
lease, an expired deadline and a cancellation are outcomes, not exceptions.
"""

from __future__ import annotations

import re
from typing import ClassVar


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
