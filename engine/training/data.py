"""What a draft learns from: prompts, the target's answers to them, and lessons, each of them kept on disk.

The prompts are the user's own, or ones that the target writes itself. An instruct model that reads only the opening of
a user's turn continues with a typical request from its training (Magpie, arXiv 2406.08464). A system message that names
a kind of request steers half of the prompts to the configured tasks. The answer is then written without this message,
as in serving.

A lesson is the target's last hidden state and likeliest tokens at every position of a text. Lessons are computed once,
so that training needs neither the target's memory nor its time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from alphaloop.deciding.decision import Decision, Reason
from alphaloop.engine import Engine, Generation, PreparedJob, Sampling
from alphaloop.errors import ConfigError, InvalidField
from alphaloop.messages import Job, Mode
from engine.prompts import apply_template
from engine.training.recipe import Recipe

#: Label of texts whose prompt the target chose freely.
FREE: Final = "any"
_MARK: Final = "@@the user's turn@@"
LONGEST_PROMPT: Final = 4096  #: tokens of a prompt that a text to train on may have
_VANILLA: Final = Decision(Mode.VANILLA, None, None, 0, Reason.FORCED, "training texts of a draft")
_PASS_TOKENS: Final = 1024  # logits of a pass over a large vocabulary must stay small


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text to be written."""

    number: int
    task: str
    prompt: tuple[int, ...] | None = None  #: None: the target writes it, behind `opening`
    opening: tuple[int, ...] = ()


def plan_requests(
    tokenizer: Any,
    descriptions: Mapping[str, str],
    recipe: Recipe,
    prompts: Sequence[TextRequest] | None,
    held_out: Sequence[TextRequest] | None,
) -> tuple[list[TextRequest], int]:
    """Every text to write, the held-out ones first, and the number of held-out ones.

    Without `prompts` the target writes `recipe.num_texts` prompts itself. Without `held_out` some of the same kind are
    held out: `recipe.num_held_out` that the target writes itself, or at most a fifth of the given prompts. Raises
    ConfigError.
    """
    if prompts is None:
        num_held_out = recipe.num_held_out if held_out is None else 0
        planned = _self_written(tokenizer, descriptions, recipe.num_texts + num_held_out)
    else:
        planned = list(prompts)
        num_held_out = min(recipe.num_held_out, max(1, len(planned) // 5))
        if held_out is None and len(planned) < 2:
            raise ConfigError("expected at least two prompts, one to train on and one to judge with, found one")
        if held_out is None:
            random.Random(recipe.seed).shuffle(planned)
    if held_out is not None:
        num_held_out, planned = len(held_out), [*held_out, *planned]
    return [replace(request, number=number) for number, request in enumerate(planned)], num_held_out


def _self_written(tokenizer: Any, descriptions: Mapping[str, str], num: int) -> list[TextRequest]:
    """Requests whose prompts the target writes. Every second one is steered to a task."""
    free = _opening(tokenizer, None)
    steered = [
        (name, opening)
        for name, description in sorted(descriptions.items())
        if description and (opening := _opening(tokenizer, description)) is not None
    ]
    if free is None:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise ConfigError(
                "the target has neither a chat template nor a first token, so it cannot write prompts",
                hint="give some with --prompts FILE.jsonl",
            )
        free = (int(start),)
    openings = [opening for task in steered for opening in ((FREE, free), task)] or [(FREE, free)]
    return [
        TextRequest(number, task, opening=opening)
        for number, (task, opening) in zip(range(num), itertools.cycle(openings), strict=False)
    ]


def _opening(tokenizer: Any, kind: str | None) -> tuple[int, ...] | None:
    """The chat template up to where the user's turn begins; None if the template has no such place."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": _MARK}]
    if kind is not None:
        instruction = f"You are a helpful AI assistant. The user asks for this kind of help: {kind}. The request holds "
        turns.insert(0, {"role": "system", "content": f"{instruction}everything that is needed to answer it."})
    try:
        text = apply_template(tokenizer, turns, asks_for_answer=False)
    except InvalidField:
        return None
    before, mark, _ = text.partition(_MARK)
    return tuple(tokenizer(before, add_special_tokens=False)["input_ids"]) or None if mark else None


@dataclass(frozen=True, slots=True)
class Answering:
    """How answers are decoded, where that is not vanilla; `ended` is called with the job's id and the text of each."""

    decision: Decision
    ended: Callable[[str, WrittenText], object]


class TextWriter:
    """Turns requests into texts with the target in its own engine, with all slots in use.

    A missing prompt is sampled at temperature 1; where that is empty, there is no text. The answer is greedy.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, recipe: Recipe, store: TextStore, answering: Answering | None = None
    ) -> None:
        """`answering`: how answers are decoded, and what is told of each before it is stored; None: vanilla."""
        self._answering = answering
        self._engine = engine
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._store = store
        self._ready: deque[PreparedJob] = deque()
        #: What runs, by job_id: the request, and the prompt that is answered; None: a prompt is being written.
        self._running: dict[str, tuple[TextRequest, tuple[int, ...] | None]] = {}

    def write(
        self, requests: Iterable[TextRequest], should_stop: Callable[[], bool], on_text: Callable[[], None]
    ) -> bool:
        """Write all texts; False if stopped before. In both cases finished texts are on disk."""
        waiting = filter(None, map(self._begin, requests))
        while not should_stop():
            while (job := self._ready.popleft() if self._ready else next(waiting, None)) is not None:
                if self._engine.has_room(job):
                    self._engine.admit(job, self._decision(job))
                elif self._engine.load().num_running:
                    self._ready.appendleft(job)
                    break
            if not self._engine.load().num_running:
                return True
            for generation in self._engine.step().finished:
                if self._take(generation):
                    on_text()
        self._engine.abandon()
        return False

    def _decision(self, job: PreparedJob) -> Decision:
        is_answer = self._running[job.job.job_id][1] is not None
        return self._answering.decision if self._answering is not None and is_answer else _VANILLA

    def _begin(self, request: TextRequest) -> PreparedJob | None:
        if request.prompt is not None:
            return self._answer(request, request.prompt)
        digest = hashlib.sha256(f"{self._recipe.seed}-{request.number}-0".encode()).digest()
        seed = int.from_bytes(digest[:7], "big")
        sampling = Sampling(max_tokens=self._recipe.max_prompt_tokens, temperature=1.0, seed=seed)
        return self._prepare("question", request, request.opening, sampling)

    def _take(self, generation: Generation) -> bool:
        """Continue with what ended; True if a text is complete."""
        request, prompt = self._running.pop(generation.job_id)
        if prompt is not None:
            text = WrittenText(request.number, request.task, prompt, generation.token_ids)
            if self._answering is not None:
                self._answering.ended(generation.job_id, text)
            self._store.add(text)
            return True
        turn = generation.text.strip()
        if turn and (answer := self._answer(request, answer_prompt(self._tokenizer, turn))):
            self._ready.append(answer)
        return False

    def _answer(self, request: TextRequest, prompt: tuple[int, ...]) -> PreparedJob | None:
        if (room := self._engine.identity.context_length - len(prompt)) < 1:
            return None
        sampling = Sampling(max_tokens=min(self._recipe.max_answer_tokens, room), temperature=0.0)
        return self._prepare("answer", request, prompt, sampling)

    def _prepare(self, kind: str, request: TextRequest, token_ids: tuple[int, ...], sampling: Sampling) -> PreparedJob:
        job_id = f"{kind}-{request.number}"
        self._running[job_id] = (request, token_ids if kind == "answer" else None)
        job = Job.model_validate({"job_id": job_id, "task": request.task, "body": {"prompt": job_id}})
        return PreparedJob(job, token_ids, sampling)


def answer_prompt(tokenizer: Any, user_turn: str) -> tuple[int, ...]:
    """Token ids of a conversation that begins with this turn, up to where the answer begins."""
    if not tokenizer.chat_template:
        return tuple(tokenizer(user_turn)["input_ids"])
    text = apply_template(tokenizer, [{"role": "user", "content": user_turn}])
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A prompt and what the target answered."""

    number: int  #: its place in the run, from 0
    task: str
    prompt: tuple[int, ...]  #: token ids, the chat template's included
    output: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt + self.output


class TextStore:
    """A file with a line of JSON for each finished text."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, text: WrittenText) -> None:
        """Append a text. Raises ConfigError where the file cannot be written."""
        try:
            with self._file.open("a", encoding="utf-8") as lines:
                # The line end comes first: behind half a line of a process that was killed, too.
                lines.write("\n" + json.dumps(asdict(text)))
        except OSError as error:
            raise ConfigError(f"{self._file} cannot be written: {error}", hint="is the disk full?") from error

    def all(self) -> list[WrittenText]:
        """Every text, by number. Half a line is no text: it is written again."""
        found: dict[int, WrittenText] = {}
        for line in self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []:
            with contextlib.suppress(ValueError):
                fields = json.loads(line)
                prompt, output = tuple(fields["prompt"]), tuple(fields["output"])
                found[fields["number"]] = WrittenText(fields["number"], fields["task"], prompt, output)
        return [found[number] for number in sorted(found)]


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """One text, and the target's output behind each of its tokens except the last."""

    text: WrittenText
    token_ids: Tensor  #: [length], int64: the text's last tokens, at most `max_length`
    first_answer: int  #: index in `token_ids` of the first token of the answer
    top_ids: Tensor  #: [length - 1, kept], int64, likeliest first
    top_log_probs: Tensor  #: [length - 1, kept], float32, of the whole vocabulary's softmax
    states: Tensor | None  #: [length - 1, hidden], bfloat16: what the target's head reads; None: not read again

    def __len__(self) -> int:
        return len(self.token_ids)


def plain_lesson(text: WrittenText, *, max_length: int, num_kept: int) -> Lesson:
    """A text that the target did not read again: each of its tokens is the only one to learn at its position."""
    token_ids = torch.tensor(text.token_ids[-max_length:])
    top_ids = torch.zeros(len(token_ids) - 1, num_kept, dtype=torch.long)
    top_log_probs = torch.full(top_ids.shape, -torch.inf)
    top_ids[:, 0], top_log_probs[:, 0] = token_ids[1:], 0.0
    return Lesson(text, token_ids, max(0, len(token_ids) - len(text.output)), top_ids, top_log_probs, None)


class TeacherNotes:
    """A folder of the target's top log-probabilities for a list of texts that does not change."""

    def __init__(self, folder: Path, texts: Sequence[WrittenText], *, max_length: int, num_kept: int) -> None:
        self._folder = folder
        self._num_kept = num_kept
        self._max_length = max_length
        #: Texts of similar length share a pass and a file; shorter ones come first.
        self._shards: list[list[WrittenText]] = []
        for text in sorted(texts, key=lambda text: (len(self._tokens(text)), text.number)):
            if not self._shards or (len(self._shards[-1]) + 1) * len(self._tokens(text)) > _PASS_TOKENS:
                self._shards.append([])
            self._shards[-1].append(text)
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def num_missing(self) -> int:
        """Texts that the target has yet to read."""
        return sum(len(shard) for i, shard in enumerate(self._shards) if not self._file(i).exists())

    def write(self, target: Any, should_stop: Callable[[], bool], on_texts: Callable[[int], None]) -> bool:
        """Read what is missing with `target`; False when stopped before. `on_texts` gets the number just read."""
        for i, shard in enumerate(self._shards):
            if should_stop():
                return False
            if self._file(i).exists():
                continue
            read = list(_read_texts(target, [self._tokens(text) for text in shard], self._num_kept))
            write_tensors(self._file(i), {name: torch.cat([notes[name] for notes in read]) for name in read[0]})
            on_texts(len(shard))
        return True

    def lessons(self) -> list[Lesson]:
        """The lesson of every text, by number."""
        found = []
        for i, shard in enumerate(self._shards):
            tensors, _ = read_tensors(self._file(i))
            lengths = [len(self._tokens(text)) - 1 for text in shard]
            whole = tensors["top_ids"].long(), tensors["top_log_probs"].float(), tensors["states"]
            for text, *parts in zip(shard, *(torch.split(tensor, lengths) for tensor in whole), strict=True):
                token_ids = torch.tensor(self._tokens(text))
                found.append(Lesson(text, token_ids, max(0, len(token_ids) - len(text.output)), *parts))
        return sorted(found, key=lambda lesson: lesson.text.number)

    def _file(self, shard: int) -> Path:
        return self._folder / f"teacher-{shard:05d}.safetensors"

    def _tokens(self, text: WrittenText) -> tuple[int, ...]:
        return text.token_ids[-self._max_length :]


@torch.inference_mode()
def _read_texts(target: Any, group: Sequence[tuple[int, ...]], num_kept: int) -> Iterator[dict[str, Tensor]]:
    """The lessons of texts whose last is the longest. Padding is at the end, where no token sees it."""
    padded = torch.zeros(len(group), len(group[-1]), dtype=torch.long)
    for row, tokens in enumerate(group):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    output = target(input_ids=padded.to(target.device), use_cache=False, output_hidden_states=True)
    for row, tokens in enumerate(group):
        scores = output.logits[row, : len(tokens) - 1].float()
        top = scores.topk(min(num_kept, scores.shape[-1]), dim=-1)
        yield {
            "top_ids": top.indices.to("cpu", torch.int32),
            "top_log_probs": (top.values - scores.logsumexp(dim=-1, keepdim=True)).to("cpu", torch.float16),
            "states": output.hidden_states[-1][row, : len(tokens) - 1].to("cpu", torch.bfloat16),
        }


def write_tensors(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically: a reader sees the old file or the new one. Raises ConfigError."""
    partial = file.with_suffix(".partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        partial.replace(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be written: {error}", hint="is the disk full?") from error


def read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file. Raises ConfigError for one that is damaged."""
    try:
        with safe_open(file, framework="pt") as content:
            return {name: content.get_tensor(name) for name in content.keys()}, content.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="delete it: the run makes it again") from error
