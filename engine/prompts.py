"""A job's prompt as token ids, and whether it fits.

In a conversation, control tokens are what the chat template writes; in a message their strings are text. Otherwise
anyone who types `<|im_end|>` into a message could end it and begin another in the system's name. Why and how:
docs/decisions/0005-special-tokens.md. A prompt that cannot fit is refused before it is tokenized, by how much text one
token can stand for.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.meta
from transformers.convert_slow_tokenizer import bytes_to_unicode

from alphaloop.engine import PreparedJob, Sampling
from alphaloop.errors import InvalidField, PromptTooLong, UnsupportedModel, reason_of
from alphaloop.lookup import MAX_NGRAM
from alphaloop.messages import Body, ChatMessage, Job
from alphaloop.messages.capabilities import features_of, refusal_of, served_by
from alphaloop.messages.fields import as_json
from engine.replies import PROMPT_END, ReplyForm, calls_grammar
from engine.text import special_tokens

log = logging.getLogger(__name__)


def prepare_job(
    tokenizer: Any,
    target: str,
    context_length: int,
    job: Job,
    sampling: Sampling,
    *,
    longest_token_chars: int | None = None,
    num_rows: int | None = None,
    num_logits: int | None = None,
    end_tokens: Collection[int] = (),
    reply_form: ReplyForm | None = None,
) -> PreparedJob:
    """Tokenize and check. A chat model's template is applied to `messages`; `prompt` is continued as it stands.

    With `truncate_prompt_tokens` only the last tokens are kept, whatever stood before them; with -1 as many as
    `max_tokens` leaves room for. A call of a tool that has to be made becomes a grammar in the form of `reply_form`;
    `end_tokens` are the model's.

    Control tokens may be written in a `prompt`; in a message their strings are text
    (docs/decisions/0005-special-tokens.md). `max_tokens` is lowered to what the context leaves after the prompt; a
    prompt that leaves nothing is refused. So are token ids that the model does not have: in a prompt those from
    `num_rows`, the rows of its embeddings, and in sampling settings those from `num_logits`; None: what the tokenizer
    has. A prompt with more characters than the context's tokens could stand for, at `longest_token_chars` each, is
    refused before it is tokenized, because that takes seconds for a megabyte.
    """
    body = job.body
    if body.model not in (None, target):
        raise InvalidField(f"expected {target!r}, the model served here", field="body.model")
    if (refusal := refusal_of(body, features_of(body, sampling), [served_by("own")])) is not None:
        raise refusal
    num_logits = len(tokenizer) if num_logits is None else num_logits
    _refuse_unknown_tokens(sampling, num_logits)
    _refuse_empty_choice(tokenizer, sampling, end_tokens)
    max_chars = None if longest_token_chars is None else context_length * longest_token_chars
    token_ids = _tokenized(tokenizer, body, max_chars)
    if (most := body.truncate_prompt_tokens) is not None:
        token_ids = token_ids[-(most if most > 0 else max(1, context_length - sampling.max_tokens)) :]
    if sampling.constraint is not None and sampling.constraint.kind == "tools" and reply_form is not None:
        end = tokenizer.decode(token_ids[-PROMPT_END:], skip_special_tokens=False)
        sampling = replace(sampling, constraint=calls_grammar(reply_form, tokenizer, body, end, sampling.constraint))
    _refuse_unreadable(tokenizer, token_ids, num_rows, _prompt_field(body))
    if body.prediction is not None:
        predicted = tokenizer(body.prediction.content[:max_chars], add_special_tokens=False)["input_ids"]
        known = takewhile(lambda token: token < num_logits, predicted[:context_length])
        sampling = replace(sampling, predicted=(*token_ids[-MAX_NGRAM:], *known))
    return fit_job(job, token_ids, sampling, context_length)


def _tokenized(tokenizer: Any, body: Body, max_chars: int | None) -> tuple[int, ...]:
    """The whole prompt; raises PromptTooLong where it has more than `max_chars`, unless it is to be truncated."""
    if body.truncate_prompt_tokens is not None:
        max_chars = None
    if body.prompt is None:
        return tuple(_encode_conversation(tokenizer, _Conversation.of(tokenizer, body), max_chars))
    _refuse_longer(tokenizer, body.prompt, max_chars, field="body.prompt")
    return tuple(tokenizer(body.prompt)["input_ids"])


def _prompt_field(body: Body) -> str:
    return "body.prompt" if body.messages is None else "body.messages"


def _refuse_unreadable(tokenizer: Any, token_ids: tuple[int, ...], num_rows: int | None, field: str) -> None:
    if not token_ids:
        raise InvalidField("expected a prompt of at least one token, found none", field="body")
    if num_rows is not None and (highest := max(token_ids)) >= num_rows:
        raise InvalidField(
            f"expected text that the target can read, found token {highest} "
            f"({tokenizer.convert_ids_to_tokens(highest)!r}): its embeddings have {num_rows} rows",
            field=field,
        )


def fit_job(job: Job, token_ids: tuple[int, ...], sampling: Sampling, context_length: int) -> PreparedJob:
    """The prepared job with `max_tokens` that fit; raises PromptTooLong when not one does."""
    if (room := context_length - len(token_ids)) < 1:
        raise PromptTooLong(
            f"expected fewer than {context_length} prompt tokens, found {len(token_ids)} (max_tokens is "
            f"{sampling.max_tokens}, prompt and output share {context_length} tokens of context)",
            field=_prompt_field(job.body),
            hint="shorten the prompt, or serve a model with a longer context",
        )
    return PreparedJob(job, token_ids, replace(sampling, max_tokens=min(sampling.max_tokens, room)))


def _refuse_unknown_tokens(sampling: Sampling, num_tokens: int) -> None:
    for field, tokens in (
        ("body.logit_bias", [token for token, _ in sampling.logit_bias]),
        ("body.stop_token_ids", sampling.stop_token_ids),
        ("body.allowed_token_ids", sampling.allowed_token_ids),
    ):
        if (highest := max(tokens, default=0)) >= num_tokens:
            raise InvalidField(f"expected token ids below {num_tokens}, found {highest}", field=field)


@lru_cache(maxsize=64)  # each text of a job asks for them, and a job may have 256 words
def bad_word_tokens(tokenizer: Any, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that write a word: at the beginning of a text, after a space, and after a line break.

    vLLM leaves out the third, and a spelling after a space that has another number of tokens, which a third of the
    common words of SmolLM2's tokenizer have. Here both are barred too, because a bad word is never written. The third
    differs where a tokenizer puts a space before every text, as SentencePiece's do. Raises InvalidField for a word
    without a token.
    """

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    spellings: dict[tuple[int, ...], None] = {}
    for number, word in enumerate(word.lstrip() for word in words):
        if not (first := tokens(word)):
            raise InvalidField("expected a word that the target can write", field=f"body.bad_words.{number}")
        line, both = tokens("\n"), tokens(f"\n{word}")
        third = both[len(line) :] if both[: len(line)] == line else ()
        spellings |= dict.fromkeys(filter(None, (first, tokens(f" {word}"), third)))
    return tuple(spellings)


def _refuse_empty_choice(tokenizer: Any, sampling: Sampling, end_tokens: Collection[int]) -> None:
    """Raise InvalidField where settings may leave no token to be written.

    Somewhere in a text the last token of each bad word may be barred. If then an allowed one is left, one is left
    everywhere.
    """
    last = {spelling[-1] for spelling in bad_word_tokens(tokenizer, sampling.bad_words)}
    if not sampling.allowed_token_ids:
        return
    ends = {*end_tokens, *sampling.stop_token_ids} if sampling.min_tokens else set()
    if not set(sampling.allowed_token_ids) - last - ends:
        beside = " and ".join(name for name, tokens in (("bad_words", last), ("min_tokens", ends)) if tokens)
        raise InvalidField(
            f"expected a token that may be written everywhere, found none beside {beside}",
            field="body.allowed_token_ids",
        )


@dataclass(frozen=True, slots=True)
class _Conversation:
    """What a chat template is given. Its strings are those of the job; `changed` gives it others."""

    turns: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    arguments: Mapping[str, Any]  #: of the template's own
    asks_for_answer: bool
    continues: bool

    @classmethod
    def of(cls, tokenizer: Any, body: Body) -> _Conversation:
        """Raises InvalidField for what the target's template would not use."""
        tools, arguments = tuple(body.callable_tools), dict(body.chat_template_kwargs or {})
        if tools or arguments or body.reasoning_effort is not None:
            names = _names_in_template(tokenizer, bool(tools))
            if tools and "tools" not in names:
                raise InvalidField(
                    "expected no tools, because the target's chat template tells the model of none", field="body.tools"
                )
            for name in arguments:
                if name not in names:
                    raise InvalidField(
                        f"expected an argument of the target's chat template, found {name!r}, which it does not read",
                        field=f"body.chat_template_kwargs.{name}",
                    )
            if body.reasoning_effort is not None:
                arguments |= _effort(body.reasoning_effort, names)
        wants_parts = _wants_parts(tokenizer)
        turns = tuple(_turn(message, wants_parts) for message in body.messages or ())
        return cls(
            turns,
            tools,
            arguments,
            asks_for_answer=body.add_generation_prompt and not body.continue_final_message,
            continues=body.continue_final_message,
        )

    @property
    def texts(self) -> list[str]:
        """Every string that its sender wrote."""
        texts: list[str] = []
        self.changed(*[lambda text: texts.append(text) or text] * 2)  # type: ignore[func-returns-value]
        return texts

    def changed(self, change: Callable[[str], str], rename: Callable[[str], str]) -> _Conversation:
        """The same with other strings, and with other names: of objects, tools, calls and senders."""
        of_turns = tuple({**_changed(turn, change, rename), "role": turn["role"]} for turn in self.turns)
        tools = tuple(_changed(tool, change, rename) for tool in self.tools)
        return replace(self, turns=of_turns, tools=tools, arguments=_changed(self.arguments, change, rename))


#: Fields whose texts are names, as those of objects are.
_NAMING: Final = frozenset({"name", "id", "tool_call_id"})


def _changed(value: Any, change: Callable[[str], str], rename: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            rename(name): rename(item) if isinstance(item, str) and name in _NAMING else _changed(item, change, rename)
            for name, item in value.items()
        }
    return [_changed(item, change, rename) for item in value] if isinstance(value, list | tuple) else value


@lru_cache(maxsize=4)
def _wants_parts(tokenizer: Any) -> bool:
    """Whether the template reads contents only as lists of parts, as templates of models with images may do."""
    if not tokenizer.chat_template:
        return False
    for content in ("hello", [{"type": "text", "text": "hello"}]):
        try:
            if "hello" in apply_template(tokenizer, [{"role": "user", "content": content}]):
                return not isinstance(content, str)
        except InvalidField:
            continue
    return False


def _turn(message: ChatMessage, wants_parts: bool) -> dict[str, Any]:
    """A message as templates know it. Arguments of calls become objects, as transformers' templates expect them."""
    # `developer` is OpenAI's newer word for `system`, which is what templates know.
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    turn["content"] = [{"type": "text", "text": message.text}] if wants_parts else message.text
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.reasoning is not None:
        # Templates of Qwen and DeepSeek read the one name, newer ones the other.
        turn |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    return turn


def _arguments(text: str) -> Any:
    """As an object; text that is no JSON, or none that can be written again, stays what it is."""
    try:
        value = json.loads(text)
        as_json(value)
    except (ValueError, RecursionError):
        return text
    return value


def _effort(effort: str, names: Collection[str]) -> dict[str, Any]:
    """How hard to think, as the template takes it. Raises InvalidField where it takes nothing of the kind."""
    if "reasoning_effort" in names:
        return {"reasoning_effort": effort}
    if effort == "none" and "enable_thinking" in names:
        return {"enable_thinking": False}
    raise InvalidField(
        "expected none, because the target's chat template takes no reasoning effort"
        if "enable_thinking" in names
        else "expected no reasoning effort, because the target's chat template takes none",
        field="body.reasoning_effort",
    )


def _names_in_template(tokenizer: Any, has_tools: bool) -> frozenset[str]:
    """What the template reads; nothing without one."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template["tool_use" if has_tools and "tool_use" in template else "default"]
    return _names_in(template) if template else frozenset()


@lru_cache(maxsize=8)
def _names_in(template: str) -> frozenset[str]:
    # Only read, never run.
    environment = jinja2.Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])  # noqa: S701
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))


class _Generation(jinja2.ext.Extension):
    """The tag that transformers adds to Jinja; what stands inside is read as if it were not there."""

    tags: Final = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Any) -> Any:
        """The statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _encode_conversation(tokenizer: Any, said: _Conversation, max_chars: int | None) -> list[int]:
    """The prompt that the target answers to: its template's, or the contents one below the other without a template.

    Raises InvalidField where the template fails on the conversation, or where a control token would come from a
    message in a way that cannot be undone; PromptTooLong where the whole text has more than `max_chars`.
    """
    text = _render(tokenizer, said)
    _refuse_longer(tokenizer, text, max_chars, field="body.messages")
    # A template writes the token that begins a text itself.
    options = {"add_special_tokens": not tokenizer.chat_template}
    control = _control_of(tokenizer)
    harmless = said.changed(control.defused, control.defused_name)
    if harmless.texts == said.texts:
        return list(tokenizer(text, **options)["input_ids"])
    plain = _render(tokenizer, harmless)
    is_typed = any(any(control.found(content)) for content in said.texts)
    if not is_typed and control.found(text) == control.found(plain):
        return list(tokenizer(text, **options)["input_ids"])
    token_ids = _with_typed_as_text(tokenizer, control, said, text, options)
    wanted = [token_id for token_id in tokenizer(plain, **options)["input_ids"] if token_id in control.token_ids]
    if token_ids is None or [token_id for token_id in token_ids if token_id in control.token_ids] != wanted:
        raise InvalidField(
            "expected messages without the strings of the target's control tokens, found some that the target's "
            "tokenizer or chat template cannot take as text",
            field="body.messages",
        )
    return token_ids


def apply_template(
    tokenizer: Any,
    turns: Sequence[Mapping[str, Any]],
    *,
    asks_for_answer: bool = True,
    continues: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The text of a conversation. Raises InvalidField where the template refuses it, or fails on it.

    The template runs in transformers' sandbox. `continues`: the text ends where the last turn's content does.
    """
    try:
        text = str(
            tokenizer.apply_chat_template(
                turns,
                tools=list(tools) or None,
                add_generation_prompt=asks_for_answer,
                continue_final_message=continues,
                tokenize=False,
                **arguments,
            )
        )
        text.encode()  # a half of a surrogate pair is no text
    except jinja2.TemplateError as error:
        raise InvalidField(
            f"the target's chat template refuses this conversation: {error}", field="body.messages"
        ) from error
    except Exception as error:  # a template is a program, and may raise whatever Python does
        raise InvalidField(
            f"the target's chat template fails on this conversation: {reason_of(error)}",
            field="body.messages",
            hint="send other roles or contents, mend the template, or write the whole text as body.prompt",
        ) from error
    return text


def check_template(tokenizer: Any) -> None:
    """Raise UnsupportedModel for a chat template that can write no conversation at all."""
    if not (template := tokenizer.chat_template):
        return
    if isinstance(template, Mapping) and "default" not in template:
        raise UnsupportedModel(
            f"expected one chat template, or one that is named default, found {', '.join(sorted(template))}",
            hint="name one of them default in the model's chat templates, in a copy of its folder",
        )
    try:
        apply_template(tokenizer, [{"role": "user", "content": "hello"}])
    except InvalidField as error:
        if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
            wrong = error.__cause__
            raise UnsupportedModel(
                f"its chat template is no Jinja template: line {wrong.lineno}: {wrong.message}",
                hint="mend the template in a copy of the model's folder, or delete it there",
            ) from error
        log.warning(
            "the target's chat template fails on one plain user message, so jobs with messages may be refused: %s",
            error.message,
            extra={"action": "chat_template_failed"},
        )


#: What is neither a letter, a digit nor white space.
_SIGN: Final = re.compile(r"[^\w\s]")


@dataclass(frozen=True, slots=True)
class _Control:
    """The control tokens of a tokenizer, and how they are found in a text: as it stands, and after the normalizer."""

    token_ids: frozenset[int]  #: but that of unknown words, which stands for ordinary text
    strings: tuple[str, ...]
    pattern: re.Pattern[str]
    normalized: re.Pattern[str]
    letters: frozenset[str]  #: every control token has one of them
    normalize: Callable[[str], str]
    is_rewritten: bool  #: whether the chat template replaces something by such letters
    words: frozenset[str]  #: what is left of control tokens without signs, but what the chat template reads by name

    def found(self, text: str) -> tuple[list[str], list[str]]:
        """The control tokens in a text, in their order."""
        return self.pattern.findall(text), self.normalized.findall(self.normalize(text))

    def defused(self, content: str) -> str:
        """The content with an x for each character from which the normalizer may make one of `letters`.

        For all that are no letters, where it or the template may make one of several.
        """
        unsafe = [char for char in set(content) if not self.letters.isdisjoint(char + self.normalize(char))]
        safe = content.translate({ord(char): "x" for char in unsafe}) if unsafe else content
        is_safe = not self.is_rewritten and self.letters.isdisjoint(self.normalize(safe))
        return safe if is_safe else _SIGN.sub("x", safe)

    def defused_name(self, name: str) -> str:
        """With an x for each sign, and before a word of a control token: templates may write `<{{ name }}>`."""
        plain = _SIGN.sub("x", name)
        return f"x{plain}" if plain in self.words else plain


@lru_cache(maxsize=4)
def _control_of(tokenizer: Any) -> _Control:
    special = special_tokens(tokenizer)
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    normalize = normalizer.normalize_str if normalizer else str
    backend_unknown = getattr(tokenizer.backend_tokenizer.model, "unk_token", None) if tokenizer.is_fast else None
    unknown = {token_id for token_id, string in special.items() if string in (tokenizer.unk_token, backend_unknown)}
    strings = tuple(special.values())
    normalized = tuple(map(normalize, strings))
    letters = frozenset(map(_telling_letter, filter(None, (*strings, *normalized))))
    return _Control(
        token_ids=frozenset(special) - unknown,
        strings=strings,
        pattern=_any_of(strings),
        normalized=_any_of(normalized),
        letters=letters,
        normalize=normalize,
        is_rewritten=any(
            not letters.isdisjoint(new) for new in re.findall(r"replace\([^),]*,([^)]*)", str(tokenizer.chat_template))
        ),
        words=frozenset(_SIGN.sub("", string) for string in (*strings, *normalized))
        - set(re.findall(r"[.'\"](\w+)", str(tokenizer.chat_template))),
    )


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Longest first, as the tokenizer finds them."""
    return re.compile("|".join(map(re.escape, sorted(filter(None, strings), key=len, reverse=True))) or "(?!)")


def _telling_letter(string: str) -> str:
    """A character that few other texts have: `<` of `<|im_end|>`. SentencePiece writes ▁ for each space."""
    return next((char for char in string if not (char.isalnum() or char.isspace() or char == "▁")), string[0])


def _with_typed_as_text(
    tokenizer: Any, control: _Control, said: _Conversation, text: str, options: Mapping[str, bool]
) -> list[int] | None:
    """Token ids in which control tokens that stand in a message are ordinary tokens; None where they are not known."""
    if not tokenizer.is_fast:
        return None
    encoded = tokenizer(text, return_offsets_mapping=True, **options)
    tokens = list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))
    # What the normalizer makes a control token of is known only from the tokens.
    written = {text[begin:end].strip() for token_id, (begin, end) in tokens if token_id in control.token_ids}
    typed = _any_of(written.union(control.strings))
    mark = next(mark for number in itertools.count() if (mark := f"\ue000{number}\ue000") not in text)
    marking = partial(typed.sub, lambda found: mark + found[0])
    pieces = _render(tokenizer, said.changed(marking, marking)).split(mark)
    if "".join(pieces) != text:
        return None
    places = set(itertools.accumulate(map(len, pieces[:-1])))
    token_ids: list[int] = []
    for token_id, (begin, end) in tokens:
        # A token that takes the white space before it begins there.
        if end > begin and begin + len(text[begin:end]) - len(text[begin:end].lstrip()) in places:
            literal = tokenizer(text[begin:end], add_special_tokens=False, split_special_tokens=True)
            token_ids += literal["input_ids"]
        else:
            token_ids.append(token_id)
    return token_ids


def _render(tokenizer: Any, said: _Conversation) -> str:
    if not tokenizer.chat_template:
        return "\n\n".join(turn["content"] for turn in said.turns)
    return apply_template(
        tokenizer,
        said.turns,
        asks_for_answer=said.asks_for_answer,
        continues=said.continues,
        tools=said.tools,
        arguments=said.arguments,
    )


def longest_token_chars(tokenizer: Any) -> int | None:
    """The most characters that one token of this tokenizer stands for; None where there is no such limit.

    There is one where every character of the text is part of a token: the vocabulary has all bytes, and no control
    token takes up the white space beside it.
    """
    if not tokenizer.is_fast:
        return None
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    is_of_bytes = "ByteLevel" in _kinds(content["pre_tokenizer"]) and vocabulary.keys() >= set(
        bytes_to_unicode().values()  # type: ignore[no-untyped-call]
    )
    has_all_bytes = is_of_bytes or content["model"].get("byte_fallback")
    takes_white_space = any(token["lstrip"] or token["rstrip"] for token in content["added_tokens"])
    if not has_all_bytes or takes_white_space:
        return None
    # A byte-level token is written with one character a byte, and a character has at least one byte.
    return max(map(len, vocabulary))


def _refuse_longer(tokenizer: Any, text: str, max_chars: int | None, *, field: str) -> None:
    """Raise PromptTooLong for a text of more characters than that; None is no limit.

    Characters count as they are tokenized, because a normalizer may shorten a text.
    """
    if max_chars is None or len(text) <= max_chars:
        return
    normalizer = tokenizer.backend_tokenizer.normalizer
    num_chars = len(normalizer.normalize_str(text)) if normalizer else len(text)
    if num_chars > max_chars:
        raise PromptTooLong(
            f"expected at most {max_chars} characters, which is the context's tokens times the longest token's "
            f"characters, found {num_chars}",
            field=field,
            hint="shorten the prompt, or serve a model with a longer context",
        )


def _kinds(part: dict[str, Any] | None) -> set[str]:
    """The types of a tokenizer's part, and of the parts that it consists of."""
    if part is None:
        return set()
    return {part["type"]}.union(*map(_kinds, part.get("pretokenizers", ())))
