"""vLLM's drafter: `--speculative-config '{"model": "alphaloop.inside_vllm.proposer.LookupProposer", ...}'`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

from alphaloop.errors import ConfigError
from alphaloop.inside_vllm.asked import Asked
from alphaloop.inside_vllm.running_texts import RunningText, RunningTexts, Tokens
from alphaloop.inside_vllm.settings import KEY, ProposerSettings
from alphaloop.lookup.continuations import Rule
from alphaloop.lookup.earlier_results import EarlierResults
from alphaloop.lookup.searched_text import SearchedText
from alphaloop.lookup.suffixes import SuffixIndex

WORKER: Final = "alphaloop.inside_vllm.worker.LookupWorker"


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
                "nothing else tells a drafter the task of a request"
            )
        self._settings = settings
        self._rule = Rule(settings.min_probability, num_branches=1)
        self._num_draft_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self._max_tokens: int = vllm_config.model_config.max_model_len
        self._texts = RunningTexts(self._search)
        self._earlier = {
            task: EarlierResults(settings.min_ngram, settings.max_ngram, settings.max_remembered_bytes)
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

    def _draft(self, text: RunningText) -> list[int]:
        most = self._num_draft_tokens
        if text.asked.num_draft_tokens is not None:
            most = min(most, text.asked.num_draft_tokens)
        # A pass yields one token beyond its drafts, and that one must fit too.
        tokens, _ = text.searched.propose(min(most, self._max_tokens - len(text.tokens) - 1), self._rule)
        return tokens

    def _search(self, tokens: array[int], asked: Asked) -> SearchedText:
        index = SuffixIndex(tokens, self._settings.min_ngram, self._settings.max_ngram)
        return SearchedText(tokens, index, self._earlier.get(asked.task))
