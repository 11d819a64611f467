"""What a target's answer consists of: reasoning, content and calls of tools, separated while the text comes.

How a model writes them is its `ReplyForm`: the response template that its tokenizer brings (transformers'
`response_template`), or one of four forms that people's models have, named in the settings or found in the chat
template. A call is reported when it is whole. What begins like a call and is none stays text, and is counted. Text that
could still turn out to be the beginning of a tag waits.
"""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from transformers.utils.chat_parsing import ResponseParser

from alphaloop.engine import AnswerPiece, PreparedJob
from alphaloop.errors import reason_of
from alphaloop.messages import Body, Constraint
from alphaloop.messages.fields import as_json, encodable
from alphaloop.messages.result import ToolCall, ToolCallFunction
from alphaloop.messages.stream import Part, ToolCallHead
from alphaloop.settings.models import ToolParser
from engine.grammars import JSON_STYLE, refuse_unkept
from engine.sampling import key_of

log = logging.getLogger(__name__)

#: Tags around reasoning, of DeepSeek and Qwen and of Mistral: those whose end stands in the chat template are meant.
_REASONING_TAGS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
#: Fields of response templates, by the part of an answer that they are.
_PARTS: Final[Mapping[str, Part]] = {
    "content": "content",
    "thinking": "reasoning",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
}
_BEGIN_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MISTRAL: Final = "[TOOL_CALLS]"
_LLAMA: Final = "<|python_tag|>"
_KEYS_OF_CALLS, _ARGUMENTS = frozenset({"name", "id", "type", "function"}), frozenset({"arguments", "parameters"})
#: Tokens of a prompt's end in which an opened tag is looked for.
PROMPT_END: Final = 16


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How a target writes what is no content."""

    parser: ToolParser
    reasoning: tuple[str, str] | None = None  #: the tags around it; None where it writes none
    template: Mapping[str, Any] | None = None  #: its tokenizer's response template

    @property
    def call_tags(self) -> tuple[str, str] | None:
        """What a call begins with, and what ends it, if anything does; None where a whole answer is a call or none."""
        return {"hermes": (_BEGIN_CALL, _END_CALL), "mistral": (_MISTRAL, "")}.get(self.parser)


def reply_form(tokenizer: Any, parser: ToolParser | None = None) -> ReplyForm:
    """The form of a tokenizer's model; `parser` names it where it is not to be found."""
    template = tokenizer.chat_template
    text = "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
    reasoning = next((tags for tags in _REASONING_TAGS if tags[1] in text), None)
    response = getattr(tokenizer, "response_template", None) if parser is None else None
    if parser is None:
        is_llama = _LLAMA in text or "dictionary of argument name" in text
        parser = (
            "hermes" if _BEGIN_CALL in text else "mistral" if _MISTRAL in text else "llama3" if is_llama else "json"
        )
    return ReplyForm(parser, reasoning, response)


class AnswerReader(ABC):
    """Reads one answer. What it found so far are `content`, `reasoning` and `calls`, however its text was cut."""

    markers: Container[str]  #: special tokens whose strings it has to see

    def __init__(self, calls: _Calls) -> None:
        self.content = self.reasoning = ""
        self.num_unparsed = 0  #: pieces that begin like a call and are none
        self._calls = calls
        self._last_part: Part | None = None  # that a piece was of

    @property
    def calls(self) -> list[ToolCall]:
        """Those that are whole."""
        return self._calls.found

    def take(self, text: str, *, is_last: bool) -> list[AnswerPiece]:
        """The pieces that this text makes certain; at the last one all that waits."""
        pieces = []
        for piece in self._read(text, is_last):
            pieces.append(piece)
            self._last_part = piece.part
            if piece.part == "content":
                self.content += piece.text
            elif piece.part == "reasoning":
                self.reasoning += piece.text
        return pieces

    @abstractmethod
    def _read(self, text: str, is_last: bool) -> Iterator[AnswerPiece]:
        """The pieces of `take`, each of which is kept before the next one is asked for."""

    @abstractmethod
    def num_reasoning_tokens(self, output: Sequence[int]) -> int | None:
        """How many of its tokens, the tag that ends them included; None where the model's form has no tags."""


def reader_of(
    form: ReplyForm, prepared: PreparedJob, decode: Callable[[Sequence[int]], str], sequence_id: str
) -> AnswerReader | None:
    """For an answer to messages that may have parts; None where it is content alone.

    `decode`: with the strings of special tokens. A prompt that ends with the tag of reasoning has begun it, and so has
    a last message that is to be continued.
    """
    body = prepared.job.body
    if body.messages is None:
        return None
    tools = body.callable_tools
    calls = _Calls(
        {tool["function"]["name"] for tool in tools},
        is_single=body.parallel_tool_calls is False,
        owner=sequence_id,
        short_ids=form.parser == "mistral",
    )
    if form.template is not None:
        return _TemplateReader(form.template, decode(prepared.token_ids), tools, calls)
    if form.reasoning is None and not tools:
        return None
    begins = has_begun_reasoning(form, body, decode(prepared.token_ids[-PROMPT_END:]))
    constraint = prepared.sampling.constraint
    # A text that has to match something from its first token on does not think; a call that has to be made may.
    is_free = constraint is None or constraint.field == "body.tool_choice"
    return _TagReader(form, calls, decode, is_reasoning=begins is True and is_free)


def has_begun_reasoning(form: ReplyForm, body: Body, prompt: str) -> bool | None:
    """Whether an answer begins within reasoning: `prompt` ends with the tag, or the message to be continued has it.

    None where the prompt's end leaves it open.
    """
    if form.reasoning is None:
        return None
    opening, closing = form.reasoning
    end = prompt.rstrip()
    if body.continue_final_message and body.messages:
        end = body.messages[-1].text.rstrip()
        return end.rfind(opening) > end.rfind(closing)
    return True if end.endswith(opening) else False if end.endswith(closing) else None


def calls_grammar(form: ReplyForm, tokenizer: Any, body: Body, prompt: str, wanted: Constraint) -> Constraint:
    """What an answer has to match that must call tools: `wanted` is of the kind `tools`.

    A grammar in the form of the target, in llguidance's dialect of Lark: reasoning where the target writes it and the
    prompt has not ended it, then a call, or several. Each tool's parameters are a schema of their own, so that their
    references hold.
    """
    source = json.loads(wanted.source)
    rules, names = [], []
    numbers = {tool["function"]["name"]: number for number, tool in enumerate(body.tools or ())}
    key = "parameters" if form.parser == "llama3" else "arguments"
    for number, function in enumerate(source["functions"]):
        head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
        field = f"body.tools.{numbers[function['name']]}.function.parameters"
        parameters = function.get("parameters") or {}
        refuse_unkept(parameters, field)
        asked = parameters.get("x-guidance")
        style = {**JSON_STYLE, **asked} if isinstance(asked, dict) else JSON_STYLE
        schema = {**parameters, "x-guidance": style, "type": "object"}
        rules.append(f'call_{number}: {json.dumps(head)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps(schema, ensure_ascii=False)}")
        names.append(f"call_{number}")
    begin, end, many = (_in_grammar(tokenizer, tag) for tag in (_BEGIN_CALL, _END_CALL, _MISTRAL))
    before, between, after = {
        "hermes": (f'{begin} "\\n"', f'"\\n" {end} "\\n" {begin} "\\n"', f'"\\n" {end}'),
        "mistral": (f'{many} "["', '", "', '"]"'),
        "llama3": ("", '"; "', ""),
        "json": ('"["', '", "', '"]"'),
    }[form.parser]
    several = f"({between} call)*" if source["parallel"] else ""
    thought = ""
    begins = has_begun_reasoning(form, body, prompt)
    if form.reasoning is not None and begins is not False:
        opening, closing = form.reasoning
        thought = "thought" if begins else f"({_in_grammar(tokenizer, opening)} thought)?"
        if closing in tokenizer.get_added_vocab():
            rules.append(f"thought: /(?s:.*)/ {_in_grammar(tokenizer, closing)} /\\n*/")
        else:
            rules.append(f"thought: thinking /\\n*/\nthinking[suffix={json.dumps(closing)}]: /(?s:.*)/")
    lines = [f"start: {thought} {before} call {several} {after}", f"call: {' | '.join(names)}", *rules]
    return Constraint("grammar", "\n".join(lines), wanted.field)


def _in_grammar(tokenizer: Any, tag: str) -> str:
    """A tag as the model writes it: by its token where there is one, which is no text to the library."""
    token_id = tokenizer.get_added_vocab().get(tag)
    return json.dumps(tag) if token_id is None else f"<[{token_id}]>"


class _Calls:
    """The calls of one answer."""

    def __init__(self, names: set[str], *, is_single: bool, owner: str, short_ids: bool) -> None:
        self.names = names
        self.found: list[ToolCall] = []
        self._is_single = is_single
        self._owner = owner
        self._short_ids = short_ids

    def add(self, calls: Sequence[tuple[str, str]]) -> list[AnswerPiece]:
        """Names and arguments; of a job without parallel calls only the first one counts, as in vLLM."""
        pieces = []
        for name, arguments in calls[: 1 - len(self.found)] if self._is_single else calls:
            index = len(self.found)
            digits = f"{key_of('call', self._owner, index) & (1 << 64) - 1:016x}"
            # Mistral's chat template takes ids of nine letters and digits alone.
            call_id = digits[:9] if self._short_ids else f"call_{digits}"
            self.found.append(ToolCall(id=call_id, function=ToolCallFunction(name=name, arguments=arguments)))
            pieces.append(AnswerPiece(arguments, "tool_calls", ToolCallHead(index, call_id, name)))
        return pieces


class _TagReader(AnswerReader):
    """Reasoning between tags at the beginning, and calls in one of the four named forms."""

    def __init__(
        self, form: ReplyForm, calls: _Calls, decode: Callable[[Sequence[int]], str], *, is_reasoning: bool
    ) -> None:
        super().__init__(calls)
        self._form = form
        self._decode = decode
        self._tags = form.call_tags if calls.names else None
        of_calls = (*(self._tags or ()), _LLAMA) if calls.names else ()
        self.markers: Container[str] = frozenset((*(form.reasoning or ()), *of_calls))
        self._rest = ""  # what is not yet certain
        self._is_behind = False  # a tag that line ends follow
        self._opened = ""  # of the call that is being read: its tag, with the white space before it
        self._looked_until = 0  # in that call: no closing tag begins before it but in arguments
        self._state = "reasoning" if is_reasoning else "beginning" if form.reasoning else "content"

    def _read(self, text: str, is_last: bool) -> Iterator[AnswerPiece]:
        self._rest += text
        before = None
        while before != (now := (self._state, self._rest, self._opened)):
            before = now
            yield from self._advance(is_last)

    def _advance(self, is_last: bool) -> list[AnswerPiece]:
        if self._state == "beginning":
            self._begin(is_last)
            return []
        if self._state == "reasoning":
            return self._reason(is_last)
        if self._is_behind:
            self._rest = self._rest.lstrip("\n")
            self._is_behind = not self._rest
        if not self._calls.names:
            return self._tell(len(self._rest))
        return self._read_tagged(is_last) if self._tags else self._read_whole(is_last)

    def _begin(self, is_last: bool) -> None:
        """Whether the answer begins with the tag of reasoning."""
        opening = self._form.reasoning[0] if self._form.reasoning else ""
        shown = self._rest.lstrip()
        if shown.startswith(opening):
            self._state, self._rest = "reasoning", shown[len(opening) :]
        elif is_last or not opening.startswith(shown):
            self._state = "content"

    def _reason(self, is_last: bool) -> list[AnswerPiece]:
        closing = self._form.reasoning[1] if self._form.reasoning else ""
        # White space inside the tags, at both ends, is the form's.
        text = self._rest if self.reasoning else self._rest.lstrip()
        place = text.find(closing)
        if place >= 0:
            self._state, self._rest, self._is_behind = "content", text[place + len(closing) :], True
            text = text[:place].rstrip()
        elif is_last:
            text, self._rest = text.rstrip(), ""
        else:
            num = len(text) - _num_held(text, closing)
            text, self._rest = text[:num], text[num:]
        return [AnswerPiece(text, "reasoning")] if text else []

    def _read_tagged(self, is_last: bool) -> list[AnswerPiece]:
        opening, closing = self._tags or ("", "")
        if self._opened:
            return self._read_call(closing, is_last)
        place = self._rest.find(opening)
        if place < 0 and is_last and self._last_part == "tool_calls" and not self._rest.strip():
            self._rest = ""
        if place < 0:
            return self._tell(len(self._rest) if is_last else len(self._rest) - _num_held(self._rest, opening))
        # White space before a call and after it is the form's.
        shown, end = self._rest[:place].rstrip(), place + len(opening)
        self._rest, self._opened = self._rest[end:], self._rest[len(shown) : end]
        return [AnswerPiece(shown)] if shown else []

    def _read_call(self, closing: str, is_last: bool) -> list[AnswerPiece]:
        if closing:
            place = self._rest.find(closing, self._looked_until)
            while place >= 0 and _is_open_text(self._rest[:place]):
                self._looked_until = place + 1  # the tag stands in an argument
                place = self._rest.find(closing, self._looked_until)
        else:
            place = -1
        if place < 0 and not is_last:
            return []
        end = place if place >= 0 else len(self._rest)
        calls = _calls_in(self._rest[:end], self._form.parser)
        end += len(closing) if place >= 0 else 0
        written, self._rest = self._opened + self._rest[:end], self._rest[end:]
        self._opened, self._looked_until, self._is_behind = "", 0, bool(calls)
        if calls:
            return self._calls.add(calls)
        self.num_unparsed += 1
        return [AnswerPiece(written)]

    def _read_whole(self, is_last: bool) -> list[AnswerPiece]:
        """Forms in which an answer is calls from its beginning to its end, or has none."""
        shown = self._rest.lstrip()
        has_tag = shown.startswith(_LLAMA)
        may_call = not self.content and (has_tag or shown[:1] in ("", "{", "[") or _LLAMA.startswith(shown))
        if not may_call:
            return self._tell(len(self._rest))
        if not is_last:
            return []
        calls = _calls_in(shown.removeprefix(_LLAMA), self._form.parser, is_whole=not has_tag)
        if calls and (has_tag or all(name in self._calls.names for name, _ in calls)):
            self._rest = ""
            return self._calls.add(calls)
        self.num_unparsed += has_tag or re.match(r'[\[{\s]*"(name|arguments|parameters|function)"', shown) is not None
        return self._tell(len(self._rest))

    def _tell(self, num: int) -> list[AnswerPiece]:
        text, self._rest = self._rest[:num], self._rest[num:]
        return [AnswerPiece(text)] if text else []

    def num_reasoning_tokens(self, output: Sequence[int]) -> int | None:
        """How many of its tokens, the tag that ends them included; None where the model's form has no tags."""
        if self._form.reasoning is None:
            return None
        if self._state == "reasoning":
            return len(output)
        if not self.reasoning:
            return 0
        closing = self._form.reasoning[1]
        return bisect_left(range(len(output)), True, key=lambda num: closing in self._decode(output[:num]))


class _TemplateReader(AnswerReader):
    """By the response template of the tokenizer, with transformers' own parser."""

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: Sequence[dict[str, Any]], calls: _Calls
    ) -> None:
        super().__init__(calls)
        self.markers: Container[str] = _Everything()
        self._unread = ""  # what was given to it and is no piece yet
        self._parser: Any = None
        try:
            self._parser = ResponseParser(dict(template), prefix=prompt, tools=list(tools) or None)
        except Exception as error:  # a template is data from elsewhere
            self._failed(error)

    def _read(self, text: str, is_last: bool) -> Iterator[AnswerPiece]:
        # Character by character, because an error takes with it what the parser found in the same text.
        fed = [piece for char in text for piece in self._fed(char)]
        fed += self._fed("", is_last=True) if is_last else []
        for part, alike in groupby(fed, key=lambda piece: piece.part):
            pieces = list(alike)
            yield from pieces if part == "tool_calls" else [AnswerPiece("".join(piece.text for piece in pieces), part)]

    def _fed(self, text: str, *, is_last: bool = False) -> list[AnswerPiece]:
        self._unread += text
        pieces: list[AnswerPiece] = []
        if self._parser is not None:
            try:
                events = self._parser.feed(text) + (self._parser.finalize()[1] if is_last else [])
                num_after = len(self._parser._buffer) - self._parser._pos  # of what may still be a tag
                num_after += sum(len(event.get("text", "")) for event in events)
                for event in events:
                    num_after -= len(event.get("text", ""))
                    pieces += self._pieces(event, num_after)
                return pieces
            except Exception as error:  # as above
                self._failed(error)
        return pieces + self._as_text()

    def _failed(self, error: Exception) -> None:
        """What it cannot read stays text."""
        self._parser = None
        self.num_unparsed += 1
        log.warning(
            "the tokenizer's response template cannot read an answer: %s",
            reason_of(error),
            extra={"action": "response_template_failed"},
        )

    def _pieces(self, event: Mapping[str, Any], num_after: int) -> list[AnswerPiece]:
        """The pieces of an event after which the last `num_after` characters come."""
        part = _PARTS.get(event["field"])
        is_call = event["type"] == "region_close" and event["field"] == "tool_calls"
        if not is_call and (event["type"] != "region_chunk" or part is None):
            return []
        end = len(self._unread) - num_after
        written, self._unread = self._unread[:end], self._unread[end:]
        if not is_call:
            return [AnswerPiece(event["text"], part or "content")]
        if calls := _as_calls(event["value"]):
            return self._calls.add(calls)
        self.num_unparsed += 1
        return [AnswerPiece(written)]

    def _as_text(self) -> list[AnswerPiece]:
        text, self._unread = self._unread, ""
        return [AnswerPiece(text)] if text else []

    def num_reasoning_tokens(self, output: Sequence[int]) -> int | None:
        """None: a template does not say which tokens they are."""
        return None


class _Everything:
    """Contains every string."""

    def __contains__(self, string: object) -> bool:
        return True


def _num_held(text: str, tag: str) -> int:
    """Characters at the end of a text that are not certain: white space, and what may be the beginning of a tag."""
    num_tag = next((num for num in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:num])), 0)
    shown = text[: len(text) - num_tag]
    return num_tag + len(shown) - len(shown.rstrip())


def _is_open_text(written: str) -> bool:
    """Whether JSON ends within a string."""
    try:
        json.loads(written)
    except (ValueError, RecursionError) as error:
        return str(error).startswith("Unterminated string")
    return False


def _calls_in(written: str, parser: ToolParser, *, is_whole: bool = False) -> list[tuple[str, str]] | None:
    """Names and arguments of the calls that a text consists of; None where it is anything else."""
    if parser == "mistral":
        pieces = [piece for piece in written.split(_MISTRAL) if piece.strip()]
        by_piece = [_mistral_calls(piece.strip()) for piece in pieces]
        return None if not by_piece or None in by_piece else [call for calls in by_piece for call in calls or ()]
    values, rest, decoder = [], written.strip(), json.JSONDecoder()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        rest = rest[end:].lstrip(" \t\r\n;,")
    items = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return _as_calls(items, is_whole=is_whole)


def _mistral_calls(written: str) -> list[tuple[str, str]] | None:
    """`[{"name": …, "arguments": …}]`, or as newer models write one: `name{…}`, `name[ARGS]{…}`."""
    if not written.startswith(("[", "{")):
        name, brace, arguments = written.partition("{")
        name = re.sub(r"\[(CALL_ID|ARGS)\].*", "", name, flags=re.DOTALL).strip()
        written = f'{{"name": {json.dumps(name)}, "arguments": {brace}{arguments}}}'
    return _calls_in(written, "json")


def _as_calls(value: object, *, is_whole: bool = False) -> list[tuple[str, str]] | None:
    """Each `{"name": …, "arguments" or "parameters": {…}}`, or one in OpenAI's form around it; None for all else.

    None too where arguments are no JSON that every reader takes. `is_whole`: no tag says that these are calls, so what
    has other keys is none.
    """
    calls: list[tuple[str, str]] = []
    for call in value if isinstance(value, list) else [value]:
        outer = call if isinstance(call, dict) else {}
        item = outer["function"] if isinstance(outer.get("function"), dict) else outer
        name, keys = item.get("name"), {*outer, *item} - _KEYS_OF_CALLS
        if not isinstance(name, str) or not name or (keys - _ARGUMENTS and (is_whole or not keys & _ARGUMENTS)):
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(arguments, dict):
                return None
            calls.append((encodable(name), as_json(arguments, separators=(", ", ": "))))
        except (ValueError, RecursionError):
            return None
    return calls or None
