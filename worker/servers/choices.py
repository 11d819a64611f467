"""One text of a reply, as it grows: content, reasoning, calls of tools, logprobs.

    ReplyChoice, ReplyChoice … → GrowingChoice.add → AnswerPiece, AnswerPiece …
                               → GrowingChoice.choice → Choice

A whole reply has one ReplyChoice a text, a stream has many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from alphaloop.errors import ReplyInvalid
from alphaloop.messages import Choice
from alphaloop.messages.result import AnswerMessage, ChosenToken, FinishReason, RankedToken, ToolCall, ToolCallFunction
from alphaloop.messages.stream import ToolCallHead
from worker.engine import AnswerPiece
from worker.servers.forms import ReplyChoice, ToldCall, ToldLogprobs, ToldMessage, ToldRank, ToldToken

_MOST_CALLS: Final = 1024  #: of one text


@dataclass(slots=True)
class GrowingChoice:
    """One text. `num_ranked` tokens are told at each place; None: no logprobs were asked for."""

    index: int
    num_ranked: int | None = None
    finish_reason: str | None = None  #: as the server told
    token_ids: list[int] = field(default_factory=list)
    num_told: int = 0  #: tokens whose logprobs were told, asked for or not
    _is_message: bool = False
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[_GrowingCall] = field(default_factory=list)
    _logprobs: list[ChosenToken] = field(default_factory=list)

    def add(self, told: ReplyChoice) -> list[AnswerPiece]:
        """Take a part of the text in: what is new, the last piece with all its logprobs. Raises ReplyInvalid."""
        said = told.message or told.delta
        pieces = [] if said is None else list(self._add_said(said, is_whole=told.message is not None))
        if told.text:
            self._content.append(told.text)
            pieces.append(AnswerPiece(told.text, choice=self.index))
        if told.logprobs is not None:
            self.num_told += len(told.logprobs.content or told.logprobs.tokens or ())
            if self.num_ranked is not None and (new := tuple(_chosen(told.logprobs, self.num_ranked))):
                self._logprobs += new
                last = pieces.pop() if pieces else AnswerPiece("", choice=self.index)
                pieces.append(replace(last, logprobs=new))
        self.token_ids += told.token_ids or ()
        self.finish_reason = told.finish_reason or self.finish_reason
        return pieces

    @property
    def text(self) -> str:
        """Its content."""
        return "".join(self._content)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said."""
        return not (self._content or self._reasoning or self._calls)

    @property
    def is_plain(self) -> bool:
        """Whether its content and its end are all that it says."""
        return not (self._reasoning or self._calls) and self.num_ranked is None

    @property
    def has_thought(self) -> bool:
        """Whether it has reasoning."""
        return bool(self._reasoning)

    @property
    def has_calls(self) -> bool:
        """Whether it calls tools."""
        return bool(self._calls)

    @property
    def ends_without_calls(self) -> bool:
        """Whether it came to an end of its own and calls no tool."""
        return self.finish_reason == "stop" and not self._calls

    @property
    def lacks_logprobs(self) -> bool:
        """Whether logprobs were asked for and not told."""
        return self.num_ranked is not None and not self._logprobs and not self.is_empty

    def choice(self, finish_reason: FinishReason) -> Choice:
        """All of it."""
        logprobs = None if self.num_ranked is None else tuple(self._logprobs)
        if not self._is_message:
            return Choice(index=self.index, text=self.text, finish_reason=finish_reason, logprobs=logprobs)
        calls = tuple(call.whole(self.index) for call in self._calls)
        message = AnswerMessage(
            content=self.text if self._content or not calls else None,
            reasoning="".join(self._reasoning) or None,
            tool_calls=calls,
        )
        return Choice(index=self.index, message=message, finish_reason=finish_reason, logprobs=logprobs)

    def _add_said(self, said: ToldMessage, *, is_whole: bool) -> Iterator[AnswerPiece]:
        self._is_message = True
        if thought := said.reasoning or said.reasoning_content:
            self._reasoning.append(thought)
            yield AnswerPiece(thought, "reasoning", choice=self.index)
        if said.content:
            self._content.append(said.content)
            yield AnswerPiece(said.content, choice=self.index)
        for told in said.tool_calls or ():
            call = self._call_of(told, is_whole=is_whole)
            head, added = call.add(told, self.index)
            if head.name is not None or added:
                yield AnswerPiece(added, "tool_calls", head, self.index)

    def _call_of(self, told: ToldCall, *, is_whole: bool) -> _GrowingCall:
        """The call that it begins or goes on with. Calls come one behind the other, and some servers number none."""
        last = self._calls[-1] if self._calls else None
        if is_whole or last is None:
            is_new = True
        elif told.index is not None:
            if told.index < last.told_index:
                raise ReplyInvalid("expected calls of tools one behind the other, found a piece of an earlier one")
            is_new = told.index > last.told_index
        else:
            is_new = bool(told.id) and told.id != last.id
        if last is not None and not is_new:
            return last
        if last is not None and not last.name:
            raise ReplyInvalid("expected the name of a function in each call of a tool, found none")
        if len(self._calls) == _MOST_CALLS:
            raise ReplyInvalid(f"expected at most {_MOST_CALLS} calls of tools, found more")
        place = len(self._calls)
        self._calls.append(_GrowingCall(place, told.index if told.index is not None else place))
        return self._calls[-1]


@dataclass(slots=True)
class _GrowingCall:
    """A call of a tool. It begins once the name of its function is known."""

    place: int
    told_index: int
    id: str = ""
    name: str = ""
    _arguments: list[str] = field(default_factory=list)

    def add(self, told: ToldCall, choice: int) -> tuple[ToolCallHead, str]:
        """Take a piece in: the call, with its name where it begins, and the arguments that are new to a reader."""
        self.id = self.id or told.id or ""
        function = told.function
        added = (function.arguments if function else None) or ""
        if added:
            self._arguments.append(added)
        if self.name or not (function and function.name):
            return ToolCallHead(self.place), added if self.name else ""
        self.name = function.name
        return ToolCallHead(self.place, self._id(choice), self.name), "".join(self._arguments)

    def whole(self, choice: int) -> ToolCall:
        """All of it. Raises ReplyInvalid where no name came."""
        if not self.name:
            raise ReplyInvalid("expected the name of a function in each call of a tool, found none")
        return ToolCall(
            id=self._id(choice), function=ToolCallFunction(name=self.name, arguments="".join(self._arguments))
        )

    def _id(self, choice: int) -> str:
        """The server's; where it gives none, one that no other call of the reply has."""
        return self.id or f"call_{choice}_{self.place}"


def _chosen(told: ToldLogprobs, num_ranked: int) -> Iterator[ChosenToken]:
    """The tokens of the text, with the likeliest `num_ranked` at each place. Raises ReplyInvalid."""
    if told.content is not None:
        yield from (_chosen_token(one, one.top_logprobs or (), num_ranked) for one in told.content)
        return
    tokens, logprobs, ranked = told.tokens or (), told.token_logprobs or (), told.top_logprobs or ()
    if len(tokens) != len(logprobs):
        raise ReplyInvalid(f"expected a logprob for each of {len(tokens)} tokens, found {len(logprobs)}")
    for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        found = (ranked[place] if place < len(ranked) else None) or {}
        others = tuple(ToldRank(token=other, logprob=at) for other, at in found.items())
        yield _chosen_token(ToldToken(token=token, logprob=logprob), others, num_ranked)


def _chosen_token(told: ToldToken, ranked: tuple[ToldRank, ...], num_ranked: int) -> ChosenToken:
    """Servers may add the chosen token to the ranked ones, or tell one where none was asked for."""
    likeliest = sorted(ranked, key=lambda one: -one.logprob)[:num_ranked]
    # Validated already, as what was told; a text of 1,000 tokens may have 20,000 of them.
    top = tuple(RankedToken.model_construct(token=one.token, logprob=one.logprob, bytes=one.bytes) for one in likeliest)
    return ChosenToken.model_construct(token=told.token, logprob=told.logprob, bytes=told.bytes, top_logprobs=top)
