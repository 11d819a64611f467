"""A training run from beginning to end: write, teach, train, save, judge; and the registration of what comes of it.

Every stage is kept in the run's folder and continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from alphaloop.draft_card import DraftCard, DraftJudgement, DraftMethod, MeasuredDraft, draft_name
from alphaloop.errors import ConfigError, StartFailed
from alphaloop.files import FolderLock, replace_file
from alphaloop.settings.models import HeadsDrafterSettings, ModelSettings, TargetSettings
from engine.device import find_device
from engine.drafters.draft_vocabulary import restrict_head, write_draft_vocabulary
from engine.drafters.head_files import check_heads
from engine.measuring import measure_pass_ms
from engine.models import end_tokens, find_weights, load_weights
from engine.network.language_model import LanguageModel
from engine.own import load_engine
from engine.pairing import refuse_or_warn
from engine.prompts import check_template
from engine.text_facts import text_config
from engine.training.data import (
    Lesson,
    TeacherNotes,
    TextRequest,
    WrittenText,
    plain_lesson,
    plan_requests,
    read_tensors,
    write_tensors,
)
from engine.training.distil import (
    Distillation,
    choose_vocabulary,
    columns_of,
    cut_draft,
    draft_training,
    fit_map,
    judge,
    make_schedule,
    num_layers,
    turn_head,
)
from engine.training.heads import HeadsInTraining
from engine.training.parents import ParentHeads, new_heads, read_parent
from engine.training.recipe import Recipe
from engine.training.recording import StateRecorder
from engine.training.writing import TrainingProgress, stage, written_texts

_JUDGED_LENGTH: Final = 4  #: k of the judge's rounds
_PASS_CONTEXT: Final = 128  #: tokens before the one whose pass is timed
_NUM_PASSES: Final = 25
_FORMAT: Final = 3  #: of a run's folder


@dataclass(frozen=True, slots=True)
class WantedDraft:
    """The draft that a run makes, and the files that it reads."""

    folder: Path
    method: DraftMethod
    name: str | None = None  #: None: the folder's
    prompts: Path | None = None  #: JSONL to train on; None: the target writes prompts
    held_out: Path | None = None  #: JSONL to judge with; None: a part of those
    begun_from: str | None = None  #: heads whose weights training begins with, a folder or a hub name; None: anew


class TrainingRun:
    """One run, in its folder."""

    def __init__(
        self,
        wanted: WantedDraft,
        target: TargetSettings,
        recipe: Recipe,
        *,
        descriptions: Mapping[str, str],
        read_prompts: Callable[[Path, Any], list[TextRequest]],
        progress: TrainingProgress,
        should_stop: Callable[[], bool],
    ) -> None:
        """Open the folder. Raises ConfigError, ModelNotFound or UnsupportedModel.

        `descriptions` says by task what its prompts are, for those that the target writes itself. `read_prompts` reads
        a file's prompts with the target's tokenizer.
        """
        self._folder, self._method = wanted.folder, wanted.method
        self._name = draft_name(wanted.name or wanted.folder.absolute().name)
        self._prompts, self._held_out = wanted.prompts, wanted.held_out
        self._descriptions = descriptions
        self._read_prompts = read_prompts
        self._recipe = recipe
        self._progress = progress
        self._should_stop = should_stop
        self._served = served = target
        if served.num_threads is not None:
            torch.set_num_threads(served.num_threads)
        self._device = find_device(served.device)
        loaded = load_weights(served.source, served.revision, served.dtype, self._device)
        check_template(loaded.tokenizer)
        self._target, self._tokenizer, self._revision = loaded.model, loaded.tokenizer, loaded.revision
        self._vocabulary: int = text_config(self._target.config).vocab_size
        self._parent = None if wanted.begun_from is None else read_parent(wanted.begun_from, self._method)
        if self._parent is not None:
            self._refuse_parent(self._parent)
        if recipe.num_layers > (most := num_layers(self._target)):
            raise ConfigError(f"num_layers: the target has {most}, found {recipe.num_layers}")
        self._state = self._folder / ".training"  #: what a stopped run continues from
        plan = self._plan()
        self._lock = _locked(self._folder, self._state)
        try:
            self._agree(plan)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Release the folder for other processes."""
        self._lock.close()

    def make(self) -> DraftCard | None:
        """Train, save and judge. None if stopped before the end: the same run continues from there."""
        if (written := self._write()) is None:
            return None
        try:
            card = self._make_model(*written) if self._method == "draft_model" else self._make_heads(*written)
            if card is not None:
                card.write(self._folder)
        except (SafetensorError, OSError) as error:
            message = f"{self._folder} cannot be written: {error}"
            raise ConfigError(message, hint="is the disk full?") from error
        return card

    def _make_model(self, trained: list[WrittenText], held_out: list[WrittenText]) -> DraftCard | None:
        """A draft model of the target's first layers."""
        recipe = self._recipe
        taught, exam = self._teach("lessons", trained[: recipe.num_taught]), self._teach("exam", held_out)
        if taught is None or exam is None:
            return None
        lessons = taught + [
            plain_lesson(text, max_length=recipe.max_length, num_kept=taught[0].top_ids.shape[-1])
            for text in trained[recipe.num_taught :]
        ]
        token_ids = choose_vocabulary(
            lessons, recipe.num_draft_tokens_known, self._vocabulary, end_tokens(self._target, self._tokenizer)
        )
        mapping = self._align(taught)
        if (weights := self._train(lessons, mapping, token_ids)) is None:
            return None
        self._save(mapping, weights, token_ids)
        judgement = self._judge(exam, token_ids)
        return self._card(len(lessons), sum(len(lesson) for lesson in lessons), judgement)

    def _make_heads(self, trained: list[WrittenText], held_out: list[WrittenText]) -> DraftCard | None:
        """Heads over the target's states: small sequential ones, or EAGLE-3's layer."""
        recipe, target = self._recipe, self._target
        plain = [plain_lesson(text, max_length=recipe.max_length, num_kept=1) for text in trained]
        ends = end_tokens(target, self._tokenizer)
        token_ids = choose_vocabulary(plain, recipe.num_draft_tokens_known, self._vocabulary, ends)
        recorder = self._recorder()
        recorded, exam = (
            [states for text in texts if (states := recorder.read(text)) is not None] for texts in (trained, held_out)
        )
        if not recorded or not exam:
            raise ConfigError("expected answers of more than one token to train on and to judge with, found none")
        heads = self._heads(token_ids)
        if self._parent is not None:
            heads.begin_with(self._parent.tensors())
        _, before = heads.judge(exam)
        lessons = heads.lessons(recorded)
        training = Distillation(
            heads, make_schedule(lessons, recipe), heads.loss, recipe, self._state / "state.safetensors"
        )
        if not self._is_trained(training):
            return None
        named = {"target": self._served.name, "target_revision": self._revision}
        heads.save(self._folder, getattr(torch, self._served.dtype), named | {"num_target_layers": num_layers(target)})
        with stage(self._progress, "held-out texts judged", len(exam)) as advance:
            by_task, total = heads.judge(exam)
            advance(len(exam))
        judgement = _judgement(recipe.num_unrolled, by_task, total, before, self._times())
        return self._card(len(lessons), sum(len(lesson) for lesson in lessons), judgement)

    def _heads(self, token_ids: Tensor | None) -> HeadsInTraining[Any]:
        """New heads that draft these tokens, with the target's head."""
        return new_heads(self._method, self._target, token_ids, self._recipe, self._taps())

    def _refuse_parent(self, parent: ParentHeads) -> None:
        """Raise UnsupportedModel or IncompatiblePair before a text is written where they do not fit the target."""
        target, text = self._target, text_config(self._target.config)
        sizes = {"hidden_size": text.hidden_size, "num_layers": num_layers(target), "vocabulary": self._vocabulary}
        refuse_or_warn(self._name, parent.facts.source, check_heads(parent.facts, **sizes, target_revision=None))
        self._heads(torch.zeros(1, dtype=torch.long)).begin_with(parent.tensors())

    def _times(self) -> tuple[float, float]:
        """Milliseconds of a pass of the target, and of the heads by token that they draft."""
        k = 4
        method: Literal["heads", "eagle3"] = "eagle3" if self._method == "eagle3" else "heads"
        heads = HeadsDrafterSettings(method=method, source=str(self._folder), max_draft_tokens=k)
        engine = load_engine(ModelSettings(target=self._served, drafters={self._name: heads}), num_slots=1)
        target_ms = engine.measure_round_ms(None, 1, 1, _PASS_CONTEXT, _NUM_PASSES)
        return target_ms, engine.measure_round_ms(self._name, 1, 1 + k, _PASS_CONTEXT, _NUM_PASSES) / k

    def _card(self, num_texts: int, num_tokens: int, judgement: DraftJudgement) -> DraftCard:
        source = "written by the target itself" if self._prompts is None else f"of prompts {_digest_of(self._prompts)}"
        return DraftCard(
            name=self._name,
            draft_revision=find_weights(str(self._folder)).revision,
            target=self._served.name,
            target_revision=self._revision,
            method=self._method,
            trained_on=f"{num_texts} texts, {num_tokens} tokens, {source}, {self._recipe.num_epochs} epochs",
            parent_revision=None if self._parent is None else self._parent.revision,
            recipe=self._recipe.model_dump(mode="json"),
            judgement=judgement,
        )

    def _recorder(self) -> StateRecorder:
        """Keeps the states that heads read, beside the texts."""
        return StateRecorder(self._taps(), self._state / "states")

    def _taps(self) -> tuple[int, ...]:
        """The layers that EAGLE-3 reads, the parent's or those of vLLM; none for sequential heads."""
        if self._method != "eagle3":
            return ()
        num = num_layers(self._target)
        taken = (min(2, num - 1), num // 2, max(num - 3, 0))
        return tuple(sorted(set(taken))) if self._parent is None else self._parent.facts.taps_in(num)

    def _write(self) -> tuple[list[WrittenText], list[WrittenText]] | None:
        """Texts to train on and held-out ones; None when stopped."""
        prompts, held_out_prompts = (
            None if file is None else self._read_prompts(file, self._tokenizer)
            for file in (self._prompts, self._held_out)
        )
        requests, num_held_out = plan_requests(
            self._tokenizer, self._descriptions, self._recipe, prompts, held_out_prompts
        )
        texts = self._texts(requests)
        if texts is None:
            return None
        trained = [text for text in texts if text.number >= num_held_out]
        held_out = [text for text in texts if text.number < num_held_out]
        if not trained or not held_out:
            raise ConfigError(
                f"expected texts to train on and to judge with, found {len(trained)} and {len(held_out)}",
                hint="the target wrote nothing, or no prompt fits its context",
            )
        return trained, held_out

    def _texts(self, requests: Sequence[TextRequest]) -> list[WrittenText] | None:
        """The texts of the run's folder, after what is missing was written; None when stopped."""
        recorder = None if self._method == "draft_model" else self._recorder()
        return written_texts(
            self._served,
            self._tokenizer,
            requests,
            self._recipe,
            recorder,
            state=self._state,
            progress=self._progress,
            should_stop=self._should_stop,
        )

    def _teach(self, name: str, texts: Sequence[WrittenText]) -> list[Lesson] | None:
        recipe = self._recipe
        notes = TeacherNotes(
            self._state / name, texts, max_length=recipe.max_length, num_kept=recipe.num_teacher_tokens
        )
        if notes.num_missing:
            what = "held-out texts read" if name == "exam" else "texts read"
            with stage(self._progress, f"{what} by the target", len(texts), len(texts) - notes.num_missing) as advance:
                if not notes.write(self._target, self._should_stop, advance):
                    return None
        return notes.lessons()

    def _align(self, lessons: Sequence[Lesson]) -> Tensor:
        file = self._state / "mapping.safetensors"
        if not file.exists():
            draft = cut_draft(self._target, self._recipe.num_layers).to(self._target.device, self._target.dtype)
            with stage(self._progress, "head aligned on texts", len(lessons)) as advance:
                write_tensors(file, {"mapping": fit_map(draft, lessons, advance)})
        return read_tensors(file)[0]["mapping"]

    def _train(self, lessons: Sequence[Lesson], mapping: Tensor, token_ids: Tensor | None) -> dict[str, Tensor] | None:
        """The trained weights; None when stopped."""
        draft = self._draft(mapping, None, token_ids).train()
        columns = columns_of(token_ids, self._vocabulary)
        training = draft_training(draft, lessons, columns, self._recipe, self._state / "state.safetensors")
        return training.trained() if self._is_trained(training) else None

    def _is_trained(self, training: Distillation[Any]) -> bool:
        """Train to the end; False when stopped before."""
        if training.step == training.num_steps:
            return True
        with stage(self._progress, "training steps", training.num_steps, training.step) as advance:
            return training.run(self._should_stop, lambda: advance(1, f"loss {training.loss:.3f}"))

    def _save(self, mapping: Tensor, weights: dict[str, Tensor], token_ids: Tensor | None) -> None:
        dtype: torch.dtype = getattr(torch, self._served.dtype)
        self._draft(mapping, weights, None).to(dtype).save_pretrained(self._folder)
        self._tokenizer.save_pretrained(self._folder)
        if token_ids is not None:
            write_draft_vocabulary(self._folder, token_ids)

    def _judge(self, exam: Sequence[Lesson], token_ids: Tensor | None) -> DraftJudgement:
        columns = columns_of(token_ids, self._vocabulary)
        untrained = self._draft(None, None, token_ids).to(self._target.dtype)
        # As it will be served: read back from the folder, in its dtype.
        draft = load_weights(str(self._folder), None, self._served.dtype, self._device).model
        if token_ids is not None:
            restrict_head(draft, token_ids)
        with stage(self._progress, "held-out texts judged", 2 * len(exam)) as advance:
            _, before = judge(untrained, exam, columns, _JUDGED_LENGTH)
            advance(len(exam))
            by_task, total = judge(draft, exam, columns, _JUDGED_LENGTH)
            advance(len(exam))
        # The last use of both, because measuring takes over the models.
        models = (LanguageModel(model, _PASS_CONTEXT + 1) for model in (self._target, draft))
        target_ms, draft_ms = (measure_pass_ms(model, 1, 1, _PASS_CONTEXT, _NUM_PASSES) for model in models)
        return _judgement(_JUDGED_LENGTH, by_task, total, before, (target_ms, draft_ms))

    def _draft(self, mapping: Tensor | None, weights: dict[str, Tensor] | None, token_ids: Tensor | None) -> Any:
        draft = cut_draft(self._target, self._recipe.num_layers)
        if mapping is not None:
            turn_head(draft, mapping)
        if weights is not None:
            draft.load_state_dict(weights, strict=False)
        if token_ids is not None:
            restrict_head(draft, token_ids)
        return draft.to(self._target.device)

    def _plan(self) -> dict[str, Any]:
        """The facts that a run in the folder must share with this one."""
        tasks = dict(sorted(self._descriptions.items()))
        return {
            "format": _FORMAT,
            "name": self._name,
            "method": self._method,
            "target_revision": self._revision,
            "dtype": self._served.dtype,
            "recipe": self._recipe.model_dump(mode="json"),
            "prompts": _digest_of(self._prompts),
            "held_out": _digest_of(self._held_out),
            "from": None if self._parent is None else self._parent.revision,
            "tasks": hashlib.sha256(json.dumps(tasks).encode()).hexdigest()[:12] if self._prompts is None else None,
        }

    def _agree(self, plan: dict[str, Any]) -> None:
        file = self._state / "run.json"
        if not file.exists():
            replace_file(file, json.dumps(plan, indent=2) + "\n")
            return
        try:
            earlier = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: {error}", hint="delete the folder to begin again") from None
        for name in sorted({*plan, *earlier}):
            if plan.get(name) != earlier.get(name):
                raise ConfigError(
                    f"{self._folder} holds a run with another {name}: {_short(earlier.get(name))}, now "
                    f"{_short(plan.get(name))}",
                    hint="give a new folder, or delete this one to begin again",
                )


def _locked(folder: Path, state: Path) -> FolderLock:
    """One run's folder, locked while it is open: the draft, and under `state` what a stopped run continues from.

    Raises ConfigError if it holds something else, or another run is at work there.
    """
    if not state.is_dir() and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"expected a new folder or one of an earlier run, found something else at {folder}")
    try:
        state.mkdir(parents=True, exist_ok=True)
        return FolderLock(state / "lock", what="a training run", wait_s=0.0)
    except StartFailed as error:
        raise ConfigError(error.message, hint="let it end, or give another folder") from None
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from error


def _judgement(
    k: int, by_task: dict[str, MeasuredDraft], total: MeasuredDraft, untrained: MeasuredDraft, ms: tuple[float, float]
) -> DraftJudgement:
    """`ms`: of a pass of the target, and of one of the draft."""
    target_ms, draft_ms = (round(value, 3) for value in ms)
    return DraftJudgement(
        num_draft_tokens=k,
        by_task=by_task,
        total=total,
        untrained=untrained,
        target_pass_ms=target_ms,
        draft_pass_ms=draft_ms,
    )


def _digest_of(file: Path | None) -> str | None:
    """The first 12 digits of a file's SHA-256. Raises ConfigError."""
    if file is None:
        return None
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}", hint="expected a JSONL file") from None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
