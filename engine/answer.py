"""One text of a job: what the job wants of it, and the text as readers get it, in pieces and whole.

Inside the engine each text has an id of its own, for its slot's keys, its drafters and its random numbers. With a seed,
text i is the one that a job of its own would have with seed + i.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from alphaloop.engine import AnswerPiece, PreparedJob, Sampling, TokenDelta
from alphaloop.messages import Choice, Purpose
from alphaloop.messages.result import AnswerMessage, ChosenToken, FinishReason, RankedToken
from engine.models import Target
from engine.replies import reader_of
from engine.text import TextStream, token_bytes
from engine.verdict import TokenLogprob


class Scope(NamedTuple):
    """Whose jobs share prefixes with each other."""

    task: str
    segment: str  #: empty: the task's jobs without one


@dataclass(frozen=True, slots=True)
class TextSpec:
    """What a job wants of one of its texts."""

    prepared: PreparedJob
    number: int  #: from 0
    sampling: Sampling  #: with the seed of this text
    owner: str  #: the job's id
    job_id: str  #: the text's own: the job's, and after the first text the text's number too. No job's id has a space.
    task: str  #: whose earlier results drafters search; empty for a probe, which would find its own answer there
    segment: str
    scope: Scope | None  #: None for a probe, which is measured and so reads its whole prompt

    @classmethod
    def of(cls, prepared: PreparedJob, number: int) -> TextSpec:
        """Text `number` of the job."""
        job, sampling = prepared.job, prepared.sampling
        if sampling.n > 1:
            sampling = replace(sampling, n=1, seed=None if sampling.seed is None else sampling.seed + number)
        task, segment = job.task if job.purpose is Purpose.TRAFFIC else "", job.segment or ""
        return cls(
            prepared,
            number,
            sampling,
            owner=job.job_id,
            job_id=f"{job.job_id} {number}" if number else job.job_id,
            task=task,
            segment=segment,
            scope=Scope(task, segment) if task else None,
        )

    @property
    def num_texts(self) -> int:
        """Texts of the job, this one included."""
        return self.prepared.sampling.n

    @property
    def is_streamed(self) -> bool:
        """Whether the text is published while it is decoded."""
        return self.prepared.job.body.stream


class Answer:
    """A text without a token yet. The job's texts share `indices`, those of its deltas."""

    def __init__(self, spec: TextSpec, target: Target, indices: Iterator[int]) -> None:
        prepared, sampling, body = spec.prepared, spec.sampling, spec.prepared.job.body
        self._spec = spec
        self._tokenizer = target.tokenizer
        self._indices = indices
        self._reader = reader_of(target.reply_form, prepared, target.decode_all, spec.job_id)
        # An answer to messages is a text of its own, also where a template's words stand right before it.
        self._stream = TextStream(
            target.decode if sampling.skip_special_tokens else target.decode_all,
            sampling.stop,
            is_live=body.stream,
            before=prepared.token_ids if body.prompt is not None else (),
            byte_tokens=target.byte_tokens,
            special_tokens=target.special_tokens if sampling.skip_special_tokens else {},
            shown=self._reader.markers if self._reader else (),
            includes_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        self.push = self._stream.push  #: take one more token; whether it completes a stop string
        self.finish = self._stream.finish  #: take no more tokens; whether the text held back ends with a stop string
        self._logprobs: list[TokenLogprob] = []
        self._chosen: list[ChosenToken] = []  # the first of them, as a result has them
        self._num_streamed = 0  # of these

    @property
    def text(self) -> str:
        """The content up to now."""
        return self._stream.text if self._reader is None else self._reader.content

    def add_logprobs(self, logprobs: SequenceOf[TokenLogprob]) -> None:
        """Take those of the next tokens."""
        self._logprobs += logprobs

    def take_deltas(self, *, is_last: bool) -> list[TokenDelta]:
        """Text added since the last call, as far as it has become certain; one delta for each part of the answer."""
        text = self._stream.take_delta()
        if self._reader is None:
            if not text and not self._spec.is_streamed:
                return []
            pieces = [AnswerPiece(text)] if text else []
        else:
            pieces = self._reader.take(text, is_last=is_last)
        spec = self._spec
        if spec.is_streamed and (logprobs := tuple(self._chosen_tokens()[self._num_streamed :])):
            self._num_streamed += len(logprobs)
            last = pieces.pop() if pieces else AnswerPiece("")
            pieces.append(replace(last, logprobs=logprobs))
        return [
            TokenDelta(
                spec.owner,
                piece.text,
                next(self._indices),
                choice=spec.number,
                part=piece.part,
                tool_call=piece.tool_call,
                logprobs=piece.logprobs,
            )
            for piece in pieces
        ]

    def choices(self, finish_reason: FinishReason) -> tuple[Choice, ...]:
        """The whole answer, where it is more than a text; else none."""
        reader, has_logprobs = self._reader, self._spec.sampling.num_logprobs is not None
        is_text = reader is None or not (reader.reasoning or reader.calls)
        if is_text and self._spec.num_texts == 1 and not has_logprobs:
            return ()
        text, message = self.text, None
        calls = reader.calls if reader else []
        if calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        if self._spec.prepared.job.body.messages is not None:
            reasoning = reader.reasoning if reader else ""
            content = None if calls and not text else text
            message = AnswerMessage(content=content, reasoning=reasoning or None, tool_calls=tuple(calls))
        choice = Choice(
            index=self._spec.number,
            message=message,
            text=None if message else text,
            finish_reason=finish_reason,
            logprobs=tuple(self._chosen_tokens()) if has_logprobs else None,
        )
        return (choice,)

    def num_reasoning_tokens(self, output: SequenceOf[int]) -> int | None:
        """How many tokens of `output` are reasoning; None where the target's form of replies does not say."""
        return self._reader.num_reasoning_tokens(output) if self._reader else None

    @property
    def num_unparsed_calls(self) -> int:
        """Pieces of the text that begin like a call of a tool and are none."""
        return self._reader.num_unparsed if self._reader else 0

    def _chosen_tokens(self) -> list[ChosenToken]:
        """The logprobs up to now, as a result has them."""
        for token in self._logprobs[len(self._chosen) :]:
            ranked = tuple(RankedToken(**self._named(*pair)) for pair in token.ranked)
            self._chosen.append(ChosenToken(**self._named(token.token_id, token.logprob), top_logprobs=ranked))
        return self._chosen

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        content = token_bytes(self._tokenizer, token_id)
        return {"token": content.decode(errors="replace"), "logprob": logprob, "bytes": tuple(content)}
