"""Writes texts with the target in its own engine, with all slots in use. Stores finished texts a few at a time."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from alphaloop.deciding.policy import Decision, Reason
from alphaloop.messages import Job, Mode
from worker.decoding.training.prompts import Request, answer_prompt
from worker.decoding.training.recipe import Recipe
from worker.decoding.training.texts import TextStore, WrittenText
from worker.engine import Engine, Generation, PreparedJob, Sampling

_VANILLA: Final = Decision(Mode.VANILLA, None, None, 0, Reason.FORCED, "training texts of a draft")
_SHARD: Final = 16
_ATTEMPTS: Final = 3  # attempts at a prompt that is empty


class TextWriter:
    """Turns requests into texts. A missing prompt is sampled at temperature 1; the answer is greedy."""

    def __init__(self, engine: Engine, tokenizer: Any, recipe: Recipe, store: TextStore) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._store = store
        self._context = engine.identity.context_length
        self._prepared: deque[PreparedJob] = deque()
        self._requests: dict[int, Request] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._finished: list[WrittenText] = []

    def write(self, requests: Iterable[Request], should_stop: Callable[[], bool], on_text: Callable[[], None]) -> bool:
        """Write all texts; False if stopped before. In both cases finished texts are on disk."""
        waiting = iter(requests)
        is_more = True
        while not should_stop():
            while self._prepared or is_more:
                prepared = self._prepared.popleft() if self._prepared else self._next(waiting)
                if prepared is None:
                    is_more = False
                elif self._engine.has_room(prepared):
                    self._engine.admit(prepared, _VANILLA)
                elif self._engine.load().num_running:
                    self._prepared.appendleft(prepared)
                    break
            if not self._engine.load().num_running:
                self._flush()
                return True
            for generation in self._engine.step().finished:
                if self._take(generation):
                    on_text()
            if len(self._finished) >= _SHARD:
                self._flush()
        self._flush()
        self._engine.abandon()
        return False

    def _next(self, waiting: Iterable[Request]) -> PreparedJob | None:
        for request in waiting:
            self._requests[request.number] = request
            if request.prompt is None:
                return self._question(request, 0)
            if answer := self._answer(request.number, request.prompt):
                return answer
        return None

    def _take(self, generation: Generation) -> bool:
        """Continue with what ended; True if a text is complete."""
        kind, number, attempt = generation.job_id.split("-")
        request = self._requests[int(number)]
        if kind == "answer":
            self._finished.append(
                WrittenText(request.number, request.task, self._prompts.pop(request.number), generation.token_ids)
            )
            return True
        if turn := generation.text.strip():
            if answer := self._answer(request.number, answer_prompt(self._tokenizer, turn)):
                self._prepared.append(answer)
        elif int(attempt) + 1 < _ATTEMPTS:
            self._prepared.append(self._question(request, int(attempt) + 1))
        return False

    def _question(self, request: Request, attempt: int) -> PreparedJob:
        digest = hashlib.sha256(f"{self._recipe.seed}-{request.number}-{attempt}".encode()).digest()
        seed = int.from_bytes(digest[:7], "big")
        sampling = Sampling(max_tokens=self._recipe.max_prompt_tokens, temperature=1.0, seed=seed)
        return _as_job(f"question-{request.number}-{attempt}", request.task, request.opening, sampling)

    def _answer(self, number: int, prompt: tuple[int, ...]) -> PreparedJob | None:
        room = self._context - len(prompt)
        if room < 1:
            return None
        self._prompts[number] = prompt
        sampling = Sampling(max_tokens=min(self._recipe.max_answer_tokens, room), temperature=0.0)
        return _as_job(f"answer-{number}-0", self._requests[number].task, prompt, sampling)

    def _flush(self) -> None:
        self._store.add(self._finished)
        self._finished = []


def _as_job(job_id: str, task: str, token_ids: tuple[int, ...], sampling: Sampling) -> PreparedJob:
    job = Job.model_validate({"job_id": job_id, "task": task, "body": {"prompt": job_id}})
    return PreparedJob(job, token_ids, sampling)
