"""What each request of a vLLM server is drafted: how many tokens, and from which drafter. Without vLLM's own classes.

A request says what it wants in `extra_args` (over HTTP: `vllm_xargs`):

    "alphaloop_num_draft_tokens": 2    most draft tokens a round; 0: it decodes vanilla. Left out: the server's own k
    "alphaloop_drafter": "lookup"      alphaloop's look-up drafts, and not the model or heads that the server has. On a
                                       server with n-grams and look-up, look-up drafts for every request
    "alphaloop_task": "sql"            look-up also searches earlier results of this task, where these are remembered

    "alphaloop_reports": 1             the reply brings what was measured of the server's steps (measuring.py)
    "alphaloop_control_share": 0.02    share of the rounds' time in which all on trial decode vanilla
    "alphaloop_subject": "sql greedy"  the request is on trial, with requests of the same subject
    "alphaloop_treatment": "draft"     and drafts with what alphaloop has under this name
    "alphaloop_expected": [1.3, …]     five numbers: the speed-up that is expected of it (`Expected`)

    "alphaloop_drafter": "filler"      drafts of one token again and again, to time passes of a chosen width

Look-up's settings are `--additional-config '{"alphaloop_lookup": {"remember_tasks": ["sql"]}}'`. They are read without
pydantic, because vLLM's environment has the version that vLLM wants.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

from alphaloop.errors import ConfigError
from alphaloop.experiment.observe import Expected
from alphaloop.lookup import MAX_NGRAM, MAX_REMEMBERED_BYTES, MIN_NGRAM, EarlierResults, Rule, SearchedText, SuffixIndex

NUM_DRAFT_TOKENS: Final = "alphaloop_num_draft_tokens"
DRAFTER: Final = "alphaloop_drafter"
TASK: Final = "alphaloop_task"
#: The value of `alphaloop_drafter` that means alphaloop's look-up.
LOOKUP: Final = "lookup"
FILLER: Final = "filler"
REPORTS: Final = "alphaloop_reports"
CONTROL_SHARE: Final = "alphaloop_control_share"
SUBJECT: Final = "alphaloop_subject"
TREATMENT: Final = "alphaloop_treatment"
EXPECTED: Final = "alphaloop_expected"
#: The section of `additional_config`.
KEY: Final = "alphaloop_lookup"
#: Below it vLLM decodes greedily (`vllm/sampling_params.py`, _SAMPLING_EPS).
_SAMPLED_FROM: Final = 1e-5


class SamplingParams(Protocol):
    """The part of vLLM's `SamplingParams` that is read here."""

    extra_args: dict[str, Any] | None
    temperature: float


class Request(Protocol):
    """The part of vLLM's `Request` (`vllm/v1/request.py`) that is read and written here."""

    request_id: str
    sampling_params: SamplingParams | None
    num_prompt_tokens: int
    num_computed_tokens: int  #: whose keys and values are in the cache, or will be after the step in hand
    spec_token_ids: list[int]  #: drafts that the next step verifies; placeholders with asynchronous scheduling

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output so far."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What one request asks for."""

    num_draft_tokens: int | None = None  #: most draft tokens a round; None: as many as the server drafts
    is_lookup: bool = False  #: for alphaloop's look-up; a server without it drafts nothing then
    is_filler: bool = False  #: drafts that say nothing, each as long as asked for
    task: str = ""  #: empty: its text is remembered for no task
    trial: Trial | None = None  #: None: it takes no part in the experiment
    reports: bool = False  #: whether the reply brings what was measured
    control_share: float | None = None  #: of the server's time, from now on; None: as before

    @classmethod
    def of(cls, params: SamplingParams | None) -> Wish:
        """Read `SamplingParams.extra_args`.

        A value of another type counts as left out: an error here would end the server for all its requests.
        """
        extra = (params.extra_args if params is not None else None) or {}
        task, share = extra.get(TASK), _number(extra.get(CONTROL_SHARE))
        return cls(
            num_draft_tokens=_count(extra.get(NUM_DRAFT_TOKENS)),
            is_lookup=extra.get(DRAFTER) == LOOKUP,
            is_filler=extra.get(DRAFTER) == FILLER,
            task=task if isinstance(task, str) else "",
            trial=Trial.of(extra),
            reports=extra.get(REPORTS) == 1,
            control_share=share if share is not None and 0 <= share < 1 else None,
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """What a request on trial is compared as."""

    subject: str
    drafter: str  #: alphaloop's name
    expected: Expected | None = None

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Trial | None:
        """From a request's `extra_args`; None where subject or drafter is missing."""
        subject, drafter, expected = extra.get(SUBJECT), extra.get(TREATMENT), extra.get(EXPECTED)
        if not (isinstance(subject, str) and isinstance(drafter, str) and subject and drafter):
            return None
        numbers = [_number(value) for value in expected] if isinstance(expected, list) else []
        is_whole = len(numbers) == len(Expected._fields) and None not in numbers
        return cls(subject, drafter, Expected(*numbers) if is_whole else None)  # type: ignore[arg-type]


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]


def _count(value: object) -> int | None:
    """A number of tokens; None for what is no whole number. A negative one asks for none."""
    return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """Look-up's settings; the longest draft is vLLM's `num_speculative_tokens`."""

    min_probability: float = 0.1  #: the draft ends before a token that is less likely to be accepted
    remember_tasks: tuple[str, ...] = ()  #: tasks whose requests also draft from earlier results of that task

    @classmethod
    def read(cls, additional_config: Any) -> LookupSettings | None:
        """From vLLM's `additional_config`; None where it has no such section. Raises ConfigError."""
        section = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if section is None:
            return None
        if not isinstance(section, Mapping):
            raise ConfigError(f"expected an object at additional_config.{KEY}, found {type(section).__name__}")
        known = {setting.name: setting.default for setting in fields(cls)}
        if unknown := sorted(set(section) - set(known)):
            raise ConfigError(f"expected settings of {sorted(known)} at additional_config.{KEY}, found {unknown}")
        return cls(**{name: _checked(name, value, known[name]) for name, value in section.items()})


def _checked(name: str, value: Any, default: object) -> Any:
    place = f"additional_config.{KEY}.{name}"
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(task, str) and task for task in value):
            raise ConfigError(f"expected a list of task names at {place}, found {value!r}")
        return tuple(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"expected a number of at least 0 and below 1 at {place}, found {value!r}")
    return value


@dataclass(slots=True, eq=False)
class _Text:
    """Prompt and output of a request that look-up drafts for, as far as they were taken in."""

    tokens: array[int]
    task: str
    searched: SearchedText  #: over `tokens`


@dataclass(eq=False)
class LookupDrafts:
    """Look-up over each request's own text, and over earlier results of its task where these are remembered."""

    settings: LookupSettings

    def __post_init__(self) -> None:
        self._rule = Rule(self.settings.min_probability, num_branches=1)
        self._texts: dict[str, _Text] = {}
        self._earlier = {
            task: EarlierResults(MIN_NGRAM, MAX_NGRAM, MAX_REMEMBERED_BYTES) for task in self.settings.remember_tasks
        }

    def __len__(self) -> int:
        """Texts that are held."""
        return len(self._texts)

    def propose(self, request: Request, task: str, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that are likely to follow the request's text, as a chain."""
        tokens = request.all_token_ids
        text = self._texts.get(request.request_id)
        if text is None:
            held = array("i", tokens)
            index = SuffixIndex(held, MIN_NGRAM, MAX_NGRAM)
            text = _Text(held, task, SearchedText(held, index, self._earlier.get(task)))
            self._texts[request.request_id] = text
        else:
            text.tokens.extend(tokens[len(text.tokens) :])
        return text.searched.propose(num_tokens, self._rule).tokens

    def ended(self, request: Request, task: str) -> None:
        """Let go of the request's text, and remember its output for its task where that is remembered."""
        self._texts.pop(request.request_id, None)
        if (earlier := self._earlier.get(task)) is not None:
            earlier.remember(list(request.all_token_ids[request.num_prompt_tokens :]))


@dataclass(eq=False)
class RequestDrafts:
    """The drafts of all requests of one server. One thread owns it, the scheduler's."""

    num_draft_tokens: int  #: k with which the server was started
    max_tokens: int  #: of prompt and output together
    lookup: LookupDrafts | None = None
    is_lookup_alone: bool = False  #: look-up drafts for every request, whatever it names
    spoils_beside_sampled: bool = False  #: a greedy text that is drafted beside a sampled one is wrong there
    takes_fewer: bool = True  #: whether the server's drafter can be asked for fewer tokens than its k
    drafter_max_tokens: int | None = None  #: of a text that it reads with k more; None: it reads every text
    is_control: Callable[[str], bool] = lambda request_id: False  #: whether it decodes vanilla for the experiment

    def __post_init__(self) -> None:
        self._wishes: dict[str, Wish] = {}
        self._undrafted: set[str] = set()
        self._was_left_out = False

    def wish(self, request: Request) -> Wish:
        """What the request asks for, read once."""
        wish = self._wishes.get(request.request_id)
        if wish is None:
            wish = self._wishes[request.request_id] = Wish.of(request.sampling_params)
        return wish

    def ended(self, request: Request) -> None:
        """The request has ended, however it did."""
        wish = self.wish(request)
        del self._wishes[request.request_id]
        self._undrafted.discard(request.request_id)
        if self.lookup is not None:
            self.lookup.ended(request, wish.task)

    def misses_cache(self, request: Request) -> None:
        """The server's drafter has not read all that the request begins with: it drafts nothing for it to its end.

        The text would be right, but its drafts would be worse than those that evidence of this drafter is about.
        """
        self._undrafted.add(request.request_id)

    def choose(self, running: Iterable[Request], *, present: Iterable[Request] = ()) -> list[Request]:
        """Cut what the server's drafter proposed to what each request wants; these are left for look-up to draft for.

        `running` wait for their next step with their text read to its end, or still read it; `present` are all that
        may decode in it.
        """
        is_spoiled = self.spoils_beside_sampled and any(map(_is_sampled, present))
        wanting: list[Request] = []
        for request in running:
            most = 0 if is_spoiled else self._most(request)
            if self._is_ours(request):
                request.spec_token_ids = []
                if most and (self.lookup is not None or self.wish(request).is_filler):
                    wanting.append(request)
            elif self._was_left_out:
                request.spec_token_ids = []
            elif len(request.spec_token_ids) > most:
                # A new list: with asynchronous scheduling all requests share theirs.
                request.spec_token_ids = request.spec_token_ids[:most]
        return wanting

    def look_up(self, request: Request) -> list[int]:
        """Look-up's draft, or a filler, for a request whose text was read to its last token."""
        # A pass yields one token beyond its drafts, and that one must fit too.
        room = self.max_tokens - len(request.all_token_ids) - 1
        if self.wish(request).is_filler:
            return [request.all_token_ids[-1]] * max(0, min(self._most(request), room))
        if self.lookup is None:
            return []
        return self.lookup.propose(request, self.wish(request).task, min(self._most(request), room))

    def leaves_out(self, longest: int) -> bool:
        """Whether the server's drafter is not run after a step whose longest text has this many tokens then.

        vLLM then has k zeros as the draft of every request, also of those with room (`v1/worker/gpu_model_runner.py`,
        _input_fits_in_drafter). `choose` drops them: verified, they would count as drafts that were rejected.
        """
        most = self.drafter_max_tokens
        self._was_left_out = most is not None and longest > most - self.num_draft_tokens
        return self._was_left_out

    def num_to_draft(self, decoding: Iterable[Request]) -> int:
        """Tokens that the server's drafter proposes after a step with these requests: the most that any of them wants.

        0 lets it rest. For control it proposes one, so that its cache stays whole (`runs_for_cache_only`).
        """
        if not self.takes_fewer:
            return self.num_draft_tokens
        own = [request for request in decoding if not self._is_ours(request)]
        if not any(map(self._wanted, own)):
            return 0
        return max(1, *map(self._most, own))

    def runs_for_cache_only(self, decoding: Iterable[Request]) -> bool:
        """Whether the server's drafter is run after a step with these requests, and all that want it are control."""
        own = [request for request in decoding if not self._is_ours(request)]
        return any(map(self._wanted, own)) and not any(map(self._most, own))

    def treatment(self, request: Request) -> int:
        """Draft tokens that it has a round outside control."""
        return self._wanted(request)

    def _is_ours(self, request: Request) -> bool:
        """Whether its drafts are written by the scheduler, and not by the server's drafter."""
        wish = self.wish(request)
        return self.is_lookup_alone or wish.is_lookup or wish.is_filler

    def _most(self, request: Request) -> int:
        return 0 if self.is_control(request.request_id) else self._wanted(request)

    def _wanted(self, request: Request) -> int:
        wish = self.wish(request)
        if request.request_id in self._undrafted and not self._is_ours(request):
            return 0
        wanted = self.num_draft_tokens if wish.num_draft_tokens is None else wish.num_draft_tokens
        return min(wanted, self.num_draft_tokens)


def _is_sampled(request: Request) -> bool:
    params = request.sampling_params
    return params is not None and params.temperature >= _SAMPLED_FROM


@dataclass(eq=False)
class UnreadBlocks:
    """Blocks of the key-value cache some of whose tokens the server's drafter has not read, because it rested then.

    Requests with the same beginning share blocks, so a request may get some that were written while it rested.
    """

    block_size: int  #: tokens

    def __post_init__(self) -> None:
        self._unread: set[int] = set()

    def holds_any(self, blocks: Iterable[int]) -> bool:
        """Whether one of these blocks is among them."""
        return not self._unread.isdisjoint(blocks)

    def written(self, block_of: Callable[[int], int], start: int, num_tokens: int, *, rested: bool) -> None:
        """A step wrote `num_tokens` tokens of a request from place `start` on; `block_of` numbers its blocks.

        A block that is written from its first token on is a new one, whatever it held before.
        """
        for place in range(start // self.block_size, (start + num_tokens - 1) // self.block_size + 1):
            if rested:
                self._unread.add(block_of(place))
            elif place * self.block_size >= start:
                self._unread.discard(block_of(place))
