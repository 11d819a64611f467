"""What decodes: the name of an engine on a device, and the kinds of inference servers that alphaloop knows.

Evidence and costs are stored under the former. All servers have an interface in OpenAI's form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

#: How the device of inference servers is named: several workers may ask the same servers.
SERVERS: Final = "servers "


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What decodes: part of the key of all evidence and of every stored cost."""

    engine: str  #: library, version and dtype, `transformers-5.23.0-bfloat16`: another dtype is another history
    target: str  #: name under which the target is served
    target_revision: str  #: hash of the weights that were loaded
    dtype: str
    device: str  #: as a person would name it: `cpu-2-threads`, `NVIDIA H200`, `NVIDIA L4, small on cpu-2-threads`
    context_length: int  #: tokens of prompt and output together
    host: str  #: the machine: costs of one machine say nothing of another
    adapters: tuple[str, ...] = ()  #: names of the target's adapters that jobs may ask for in place of it

    def decodes(self, model: str | None) -> bool:
        """Whether jobs that ask for this model are decoded here; None asks for none."""
        return model in (None, self.target, *self.adapters)

    def of(self, model: str | None) -> EngineIdentity:
        """What decodes a job that asks for this model: its adapter is another target, with evidence of its own."""
        if model not in self.adapters or model is None:
            return self
        return replace(self, target=model, target_revision=f"{self.target_revision}+{model}", adapters=())

    @property
    def shown_device(self) -> str:
        """Its device, as screens name it."""
        return shown_device(self.device, self.engine, self.host)

    @property
    def shown(self) -> str:
        """What decodes and where, as screens name it."""
        return shown_engine(self.device, self.engine, self.host)

    @property
    def has_shared_device(self) -> bool:
        """Whether other workers with a device of this name have the same device, and not only an equal one."""
        return self.device.startswith(SERVERS)


def shown_device(device: str, engine: str, host: str) -> str:
    """A device as screens and their JSON name it. That of servers is a hash: what serves and where stands for it."""
    return f"{engine} at {host}" if device.startswith(SERVERS) else device


def shown_engine(device: str, engine: str, host: str) -> str:
    """Device and engine as screens name them; servers have one name for both."""
    shown = shown_device(device, engine, host)
    return shown if device.startswith(SERVERS) else f"{shown}, {engine}"


ServerKind = Literal["vllm", "sglang", "llama_cpp", "tensorrt_llm", "openai"]
"""`openai` is any other server: it is asked for nothing, and believed in nothing, that OpenAI's own form lacks."""

Granularity = Literal["rounds", "lengths", "reached", "sums", "counters", "nothing"]
"""How finely a server reports what was drafted and accepted in one request.

`rounds`: of each round, how many tokens were drafted and accepted. `lengths`: how many rounds accepted how many tokens.
`reached`: the same, of a server that changes k by itself and does not report how many tokens were drafted. `sums`: of
what was drafted only the sum, so that positions are estimated. `counters`: the server's own counters, of a slice of
requests that ran alone. `nothing`: not even these.
"""


def how_counted(draft_revision: str) -> str:
    """How the texts under a server's revision of a drafter were counted, in words; empty where by tested positions.

    llama.cpp reports sums of a text, also where its counters are the evidence.
    """
    if draft_revision.startswith("llama_cpp-"):
        return "positions estimated"
    return "of positions reached" if draft_revision.endswith("-reached") else ""


#: Mean distance of log-probabilities that is another model: bfloat16 and float32 of one model differ by .04, and its
#: 4-bit file under llama.cpp by .09.
OTHER_WEIGHTS: Final = 0.15
#: Smallest distance that is a difference at all, where a server's own answers scatter less.
ARITHMETIC: Final = 0.01
_SCATTERS: Final = 3.0  #: times its own scatter, before a server is said to answer otherwise
#: Share of short texts that another model changes, where a server reports no probabilities.
_OTHER_TEXTS: Final = 1 / 3
#: Beside a token that only one of the two servers named among its likeliest.
_UNNAMED: Final = 1.0


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a server goes on with one of the prompts."""

    text: str  #: its first tokens, greedily
    likeliest: Mapping[str, float]  #: log-probabilities of the likeliest first tokens; empty where it reports none


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """What a server says it is, and how it answers. Two identities are compared, never hashed: numbers scatter."""

    server: str  #: kind and version, `vllm-0.32.0`
    model: str  #: name under which it serves
    root: str | None  #: the model's folder or name on a hub, where reported
    context_length: int | None  #: tokens of prompt and text together, where reported
    answers: tuple[Continuation, ...]  #: to the prompts, in their order
    scatter: float = 0.0  #: distance between its own answers, one at a time and all at once
    adapters: tuple[str, ...] = ()  #: of the model, by name

    def as_json(self) -> dict[str, Any]:
        """For the database."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> ServerIdentity:
        """What `as_json` made."""
        answers = tuple(Continuation(answer["text"], dict(answer["likeliest"])) for answer in stored["answers"])
        return cls(**{**stored, "answers": answers, "adapters": tuple(stored["adapters"])})

    def sha256(self) -> str:
        """A digest of names and answers as they came this time: a name for what was seen first, no way to compare."""
        seen = {"model": self.model, "answers": [asdict(answer) for answer in self.answers]}
        return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Change:
    """How the answers of two identities differ."""

    is_of_weights: bool  #: if not, of the arithmetic
    sentence: str


def differs(before: ServerIdentity, after: ServerIdentity) -> str | None:
    """What changed from one life of a server to the next, in words; None where nothing did."""
    named: list[str] = []
    if before.server != after.server:
        named.append(f"the server changed from {before.server} to {after.server}")
    if before.model != after.model:
        named.append(f"it serves {after.model} in place of {before.model}")
    if before.root != after.root and before.root is not None and after.root is not None:
        named.append(f"its model comes from {after.root} in place of {before.root}")
    if before.context_length != after.context_length:
        was, is_now = (length or "an unknown number of" for length in (before.context_length, after.context_length))
        named.append(f"its context changed from {was} to {is_now} tokens")
    if (change := change_between(before, after)) is not None:
        named.append(change.sentence)
    return "; ".join(named) or None


def change_between(before: ServerIdentity, after: ServerIdentity) -> Change | None:
    """Whether their answers show other weights, or other arithmetic with perhaps the same weights; None: neither."""
    moved = distance(before.answers, after.answers)
    if moved is None:
        return _by_texts(before, after)
    if moved <= max(ARITHMETIC, _SCATTERS * max(before.scatter, after.scatter)):
        return None
    how = f"the probabilities of first tokens moved by {moved:.2f} on average"
    if moved > OTHER_WEIGHTS:
        return Change(True, f"it answers as another model does: {how}")
    return Change(False, f"it calculates otherwise (dtype, quantization, kernels, or slightly other weights): {how}")


def distance(before: Sequence[Continuation], after: Sequence[Continuation]) -> float | None:
    """Mean absolute difference of log-probabilities over the likeliest tokens of both; None where there are none.

    A token that one of two lists lacks is less likely there than the last of that list: it counts by how far it stands
    above that one in the other list, which is least, and at most by 1.
    """
    differences = [
        _difference(token, was.likeliest, now.likeliest)
        for was, now in zip(before, after, strict=False)
        if was.likeliest and now.likeliest
        for token in sorted(was.likeliest.keys() | now.likeliest.keys())
    ]
    return sum(differences) / len(differences) if differences else None


def _difference(token: str, was: Mapping[str, float], now: Mapping[str, float]) -> float:
    if token in was and token in now:
        return abs(was[token] - now[token])
    has, lacks = (was, now) if token in was else (now, was)
    return min(_UNNAMED, max(0.0, has[token] - min(lacks.values())))


def _by_texts(before: ServerIdentity, after: ServerIdentity) -> Change | None:
    pairs = list(zip(before.answers, after.answers, strict=False))
    num_other = sum(was.text != now.text for was, now in pairs)
    if num_other <= len(pairs) * _OTHER_TEXTS:
        return None
    return Change(True, f"it answers as another model does: {num_other} of {len(pairs)} short texts are others")
