"""From the pieces of a reply to the text, its token counts and what the server told about drafts.

Text, token counts and the reason of the end are checked against each other, because released servers have cut texts
silently.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from alphaloop.errors import ModelNotServed, ReplyCut, ReplyInvalid, ServerFailed
from alphaloop.server_kind import ServerKind
from worker.servers.added import Added, ServerTimes, times_of, told_of
from worker.servers.forms import Choice, Piece, Usage
from worker.servers.told import Told


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished text."""

    text: str
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_tokens: int  #: of the text, the token that ended it included where the server counts it
    token_ids: tuple[int, ...]  #: empty where the server does not tell
    told: Told
    times: ServerTimes
    first_text_s: float | None  #: from the request to the first piece with text; None of a reply in one piece
    wall_s: float  #: from the request to the end of the reply


@dataclass(slots=True)
class ReplyReader:
    """Gathers the pieces of one reply."""

    kind: ServerKind
    model: str
    max_tokens: int
    context_length: int | None = None  #: where known, a text that ends there may be shorter than `max_tokens`
    num_draft_tokens: int | None = None  #: k that was asked for, or that of the server's start; None: not known
    finish_reason: str | None = None
    first_text_s: float | None = None
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _usage: Usage | None = None
    _added: Added = field(default_factory=Added)

    def add(self, piece: Piece) -> str:
        """Take a piece in, and return its text. Raises ReplyInvalid, or ModelNotServed where another model answers."""
        if self.kind != "openai" and piece.model is not None and piece.model != self.model:
            # llama.cpp serves its one model whatever name is asked for; OpenAI answers with a name that has a date.
            raise ModelNotServed(
                "expected a text of the model that was asked for, found one of another",
                hint="ask for the name that the server lists at /v1/models",
            )
        self._usage = piece.usage or self._usage
        if len(piece.choices) > 1 or any(choice.index for choice in piece.choices):
            raise ReplyInvalid(f"expected one text, found {len(piece.choices)}")
        self._added.take(piece)
        return self._choose(piece.choices[0]) if piece.choices else ""

    def _choose(self, choice: Choice) -> str:
        if choice.lacks_reasoning:
            raise ReplyInvalid(
                "expected the whole text, found a part of it set apart as reasoning",
                hint="start the server without a reasoning parser",
            )
        self._texts.append(choice.words)
        self._token_ids += choice.token_ids or ()
        self.finish_reason = choice.finish_reason or self.finish_reason
        return choice.words

    def reply(self, wall_s: float) -> Reply:
        """The whole reply. Raises ReplyCut, ReplyInvalid or ServerFailed."""
        if self.finish_reason is None:
            raise ReplyCut("the reply ended without the reason of its end")
        usage, text = self._usage, "".join(self._texts)
        if usage is None:
            raise ReplyInvalid("expected usage in the reply, found none", hint="a proxy between may take it out")
        reason = self._reason(usage)
        if self._token_ids and len(self._token_ids) != usage.completion_tokens:
            raise ReplyInvalid(f"expected {usage.completion_tokens} token ids, found {len(self._token_ids)}")
        if text and not usage.completion_tokens:
            raise ReplyInvalid("expected no text of 0 tokens, found some")
        return Reply(
            text,
            reason,
            usage.prompt_tokens,
            usage.completion_tokens,
            tuple(self._token_ids),
            told_of(self.kind, self._added, usage.completion_tokens, self.num_draft_tokens),
            times_of(self._added),
            self.first_text_s,
            wall_s,
        )

    def _reason(self, usage: Usage) -> Literal["stop", "length"]:
        found, num = self.finish_reason, usage.completion_tokens
        if found in ("abort", "error"):
            raise ServerFailed("the server gave the request up before its text was finished")
        if num > self.max_tokens:
            raise ReplyInvalid(f"expected at most {self.max_tokens} tokens, found {num}")
        if found == "stop":
            return "stop"
        if found != "length":
            raise ReplyInvalid("expected the reason stop or length for the end of the text, found another")
        at_context = self.context_length is not None and usage.prompt_tokens + num >= self.context_length
        if num < self.max_tokens and not at_context:
            raise ReplyInvalid(f"expected {self.max_tokens} tokens of a text cut at its limit, found {num}")
        return "length"
