"""SGLang's own `/generate`: prompts to versions before 0.5.19, whose answers in OpenAI's form tell nothing of drafts.

Read in November 2026 from SGLang 0.5.9, 0.5.14 and 0.5.23; not run. Its pieces are brought into OpenAI's form, so that
everything behind is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from alphaloop.errors import ReplyInvalid
from worker.engine import Sampling
from worker.servers.forms import Choice, Count, Failure, Form, Piece, SglangMeta, Usage, read_form
from worker.servers.refusals import of_piece

PATH: Final = "/generate"
#: Each event repeats the text and its tokens so far. This many tokens apart, 7,000 tokens are about 64 MB of events.
_TOKENS_BETWEEN_EVENTS: Final = 4
_INCOMPLETE: Final = "\ufffd"  #: stands for bytes that may become a letter with the next token


class _End(Form):
    """`finish_reason`; `status_code` where the server gave the request up for a reason."""

    type: str
    message: str | None = None
    status_code: int | None = None


class _Meta(SglangMeta):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    finish_reason: _End | None = None


class _Generated(Form):
    """A whole reply, or an event."""

    text: str | None = None
    output_ids: tuple[Count, ...] = ()
    meta_info: _Meta | None = None
    error: Failure | str | None = None


def generate_body(prompt: str, sampling: Sampling, *, stream: bool) -> dict[str, Any]:
    """The JSON of a request. Every setting is sent, because gaps are filled from the model's files."""
    settings: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "n": 1,
    }
    if sampling.seed is not None:
        settings["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        settings["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if stream:
        settings["stream_interval"] = _TOKENS_BETWEEN_EVENTS
    return {"text": prompt, "sampling_params": settings, "stream": stream}


@dataclass(slots=True)
class GeneratedPieces:
    """Makes pieces of OpenAI's form from the events of one text, in their order."""

    #: What the server says of `incremental_streaming_output`: whether an event has only what is new, text and tokens
    #: alike. None: it does not know the option, and every event has the text so far.
    is_incremental: bool | None
    _text: str = ""  #: so far
    _num_out: int = 0  #: characters of it that were handed over
    _token_ids: list[int] = field(default_factory=list)

    def piece(self, content: bytes) -> Piece:
        """The next one. Raises what it reports in place of a text, and ReplyInvalid."""
        found = read_form(_Generated, content)
        if found.error is not None:
            raise of_piece(found.error)
        meta, end = found.meta_info, found.meta_info.finish_reason if found.meta_info else None
        if meta is None:
            raise ReplyInvalid("expected meta_info, found none", hint="is the server of the kind that was named?")
        if end is not None and end.type == "abort" and end.status_code is not None:
            raise of_piece(Failure(message=end.message, code=end.status_code))
        self._gather(found, meta)
        choice = Choice(
            text=self._next(is_end=end is not None),
            finish_reason=end.type if end else None,
            token_ids=self._ids(meta) if end else (),
            meta_info=meta,
        )
        usage = None
        if end is not None and meta.prompt_tokens is not None and meta.completion_tokens is not None:
            usage = Usage(prompt_tokens=meta.prompt_tokens, completion_tokens=meta.completion_tokens)
        return Piece(choices=(choice,), usage=usage)

    def _gather(self, found: _Generated, meta: _Meta) -> None:
        text = found.text or ""
        if self.is_incremental:
            self._text += text
            self._token_ids += found.output_ids
            return
        is_whole = self.is_incremental is None or len(found.output_ids) >= (meta.completion_tokens or 0)
        if not is_whole or not text.startswith(self._text[: self._num_out]):
            raise ReplyInvalid("expected the whole text so far in each event, found another")
        self._text = text
        self._token_ids = list(found.output_ids)

    def _next(self, *, is_end: bool) -> str:
        """What is new and will stay: a letter whose bytes are not all here is kept back."""
        until = len(self._text) if is_end else len(self._text.rstrip(_INCOMPLETE))
        text = self._text[self._num_out : until]
        self._num_out = max(self._num_out, until)
        return text

    def _ids(self, meta: _Meta) -> tuple[int, ...]:
        """Of the whole text. A server without `incremental_streaming_output` may end with the last ones alone."""
        if self.is_incremental is None and len(self._token_ids) != meta.completion_tokens:
            return ()
        return tuple(self._token_ids)
