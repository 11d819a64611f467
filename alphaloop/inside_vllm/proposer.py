"""vLLM's drafter: `--speculative-config '{"model": "alphaloop.inside_vllm.proposer.LookupProposer", ...}'`.

Its settings are `--additional-config '{"alphaloop_lookup": {"remember_tasks": ["sql"]}}'`. `max_ngram`, `min_ngram` and
`min_probability` are those of `[models.drafters.<name>]` with `method = "lookup"`. They are read without pydantic,
because vLLM's environment has the version that vLLM wants. What a request asks for is in OpenAI's form:
`"vllm_xargs": {"alphaloop_task": "sql"}`.

vLLM hands over rows of tokens, without names: rows change places, and a row may hold another request than a step
before. An index over a text depends on nothing but the text, so a row goes on with the index whose text it begins with.
Which request it is matters for what is remembered alone, and there the worker names it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from alphaloop.errors import ConfigError
from alphaloop.inside_vllm.asked import Asked
from alphaloop.lookup import MAX_NGRAM, MAX_REMEMBERED_BYTES, EarlierResults, Rule, SearchedText, SuffixIndex

WORKER: Final = "alphaloop.inside_vllm.worker.LookupWorker"
KEY: Final = "alphaloop_lookup"
_RANGES: Final = {
    "min_ngram": (1, 16),
    "min_probability": (0, 0.999999),
}

Tokens = NDArray[np.int32]


class LookupProposer:
    """Look-up over each request's own text, and over earlier results of its task where these are remembered.

    vLLM calls `propose` after each step, between two passes, from one thread. It proposes chains, because vLLM takes
    nothing else, of any length up to `num_speculative_tokens`; vLLM verifies and counts what is proposed.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises ConfigError for settings that it cannot follow."""
        settings = ProposerSettings.read(vllm_config.additional_config)
        if settings.remember_tasks and vllm_config.parallel_config.worker_cls != WORKER:
            raise ConfigError(
                f"expected --worker-cls {WORKER} where additional_config.{KEY} names remember_tasks: "
                "nothing else gives a drafter the task of a request"
            )
        self._settings = settings
        self._rule = Rule(settings.min_probability, num_branches=1)
        self._num_draft_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_tokens: int = vllm_config.model_config.max_model_len
        self._texts = FollowedTexts(self._search)
        self._earlier = {
            task: EarlierResults(settings.min_ngram, MAX_NGRAM, MAX_REMEMBERED_BYTES)
            for task in settings.remember_tasks
        }
        self._asked: Callable[[], Sequence[Asked]] | None = None

    def load_model(self, *_: object, **__: object) -> None:
        """vLLM calls it once with the target: there is nothing to load."""

    def ask(self, asked: Callable[[], Sequence[Asked]]) -> None:
        """Before each proposal call `asked` for what the requests asked for, row by row."""
        self._asked = asked

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: Tokens,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A draft a row. Row i's text is `token_ids_cpu[i, :num_tokens_no_spec[i]]`; `sampled_token_ids[i]` ends it.

        A row without sampled tokens, whose prompt is still being read, gets none.
        """
        del slot_mappings
        num_tokens = [int(num_tokens_no_spec[i]) for i in range(len(sampled_token_ids))]
        asked = self._asked() if self._asked is not None else None
        running, ended = self._texts.follow(sampled_token_ids, num_tokens, token_ids_cpu, asked)
        for text in ended:
            if (earlier := self._earlier.get(text.asked.task)) is not None:
                earlier.remember(text.output)
        return [self._draft(text) if text is not None else [] for text in running]

    def _draft(self, text: FollowedText) -> list[int]:
        most = self._num_draft_tokens
        if text.asked.num_draft_tokens is not None:
            most = min(most, text.asked.num_draft_tokens)
        # A pass yields one token beyond its drafts, and that one must fit too.
        return text.searched.propose(min(most, self._max_tokens - len(text.tokens) - 1), self._rule).tokens

    def _search(self, tokens: array[int], asked: Asked) -> SearchedText:
        index = SuffixIndex(tokens, self._settings.min_ngram, MAX_NGRAM)
        return SearchedText(tokens, index, self._earlier.get(asked.task))


@dataclass(frozen=True, slots=True)
class ProposerSettings:
    """Look-up's settings; the longest draft is vLLM's `num_speculative_tokens`."""

    min_ngram: int = 1  #: a shorter match is ignored
    min_probability: float = 0.1  #: the draft ends before a token that is less likely to be accepted
    remember_tasks: tuple[str, ...] = ()  #: tasks whose requests also draft from earlier results of that task

    @classmethod
    def read(cls, additional_config: Any) -> ProposerSettings:
        """From vLLM's `additional_config`. Raises ConfigError."""
        section = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(section, Mapping):
            raise ConfigError(f"expected an object at additional_config.{KEY}, found {type(section).__name__}")
        known = {field.name: field.default for field in fields(cls)}
        if unknown := sorted(set(section) - set(known)):
            raise ConfigError(f"expected settings of {sorted(known)} at additional_config.{KEY}, found {unknown}")
        return cls(**{name: _checked(name, value, known[name]) for name, value in section.items()})


def _checked(name: str, value: Any, default: object) -> Any:
    place = f"additional_config.{KEY}.{name}"
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(task, str) and task for task in value):
            raise ConfigError(f"expected a list of task names at {place}, found {value!r}")
        return tuple(value)
    numbers = (int, float) if isinstance(default, float) else (int,)
    low, high = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, numbers) or not low <= value <= high:
        raise ConfigError(f"expected a number from {low} to {high} at {place}, found {value!r}")
    return value


NOTHING_ASKED: Final = Asked()


@dataclass(slots=True, eq=False)
class FollowedText:
    """Prompt and output of a request that is decoded."""

    tokens: array[int]
    num_prompt: int  #: tokens that were there when it was first seen
    asked: Asked
    searched: SearchedText  #: over `tokens`

    @property
    def output(self) -> array[int]:
        """What was generated since it was first seen."""
        return self.tokens[self.num_prompt :]

    def goes_on_in(self, tokens: Tokens, asked: Asked) -> bool:
        """Whether `tokens` begin with this text and go on, asked for in the same way."""
        num_before = len(self.tokens)
        return (
            num_before < len(tokens)
            and self.asked == asked
            and bool(np.array_equal(np.frombuffer(self.tokens, np.int32), tokens[:num_before]))
        )

    def go_on(self, tokens: Tokens) -> FollowedText:
        """Take in what is new, usually the tokens of one step: near the end of a context vLLM asks for no drafts."""
        self.tokens.extend(tokens[len(self.tokens) :].tolist())
        return self


class FollowedTexts:
    """At most one text a row; a text that no row goes on with has ended.

    vLLM also takes requests out of its batch that it interrupts for lack of memory. Such a text counts as ended, and
    as a new one when it comes back, with all that it has so far as its prompt.
    """

    def __init__(self, search: Callable[[array[int], Asked], SearchedText]) -> None:
        self._search = search
        self._by_row: list[FollowedText | None] = []

    def __len__(self) -> int:
        return sum(text is not None for text in self._by_row)

    def follow(
        self,
        sampled: Sequence[Sequence[int]],
        num_tokens: Sequence[int],
        rows: Tokens,
        asked: Sequence[Asked] | None,
    ) -> tuple[list[FollowedText | None], list[FollowedText]]:
        """Take in a step: the text of each row, None where nothing was sampled, and the texts that have ended.

        `sampled[i]` are the last of the `num_tokens[i]` tokens of `rows[i]`; none while a prompt is being read.
        `asked` is by row too; None: no worker gives it.
        """
        by_asked = asked if asked is not None else [NOTHING_ASKED] * len(sampled)
        left = list(self._by_row)
        now: list[FollowedText | None] = [None] * len(sampled)
        moved = []
        for i in range(len(sampled)):
            if not sampled[i]:
                continue
            text, tokens = left[i] if i < len(left) else None, rows[i, : num_tokens[i]]
            if text is not None and text.goes_on_in(tokens, by_asked[i]):
                left[i] = None
                now[i] = text.go_on(tokens)
            else:
                moved.append(i)
        ended = [text for text in left if text is not None]
        for i in moved:
            tokens = rows[i, : num_tokens[i]]
            text = next((left_over for left_over in ended if left_over.goes_on_in(tokens, by_asked[i])), None)
            if text is None:
                now[i] = self._open(tokens, num_tokens[i] - len(sampled[i]), by_asked[i])
            else:
                ended.remove(text)
                now[i] = text.go_on(tokens)
        self._by_row = now
        return list(now), ended

    def _open(self, tokens: Tokens, num_prompt: int, asked: Asked) -> FollowedText:
        held = array("i", tokens.astype(np.int32).tobytes())
        return FollowedText(held, num_prompt, asked, self._search(held, asked))
