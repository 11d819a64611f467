"""The engine over transformers models: rounds in which every sequence reads what its slot lacks.

A round: drafters propose for the sequences that use them; one pass of the target reads the pending token and the drafts
of every running sequence, each as wide as its own proposal, and beside them the next piece of a prompt; each sequence
keeps its accepted drafts and the target's next token. Vanilla decoding is a round one token wide.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from alphaloop.deciding.decision import Decision
from alphaloop.deciding.goodput import DrafterState
from alphaloop.engine import (
    CacheMemory,
    DeviceMemory,
    Engine,
    EngineIdentity,
    FailedRequest,
    Generation,
    Load,
    LoadedModels,
    PreparedJob,
    ProposalShape,
    Sampling,
    SamplingDefaults,
    Step,
    TokenDelta,
    target_limit,
)
from alphaloop.errors import (
    AlphaloopError,
    DecodeFailed,
    IncompatiblePair,
    InvalidField,
    JobTooLarge,
    ModelError,
    reason_of,
)
from alphaloop.logs import START_PROGRESS
from alphaloop.lookup import ViewOf
from alphaloop.messages import Constraint, Job
from alphaloop.messages.capabilities import Feature, served_by
from alphaloop.settings.models import DrafterSettings, ModelSettings
from engine.admission import AdmittedSequences, UnfinishedJobs, num_positions
from engine.constraint import compute_masks
from engine.device import Placement, available_bytes, is_out_of_memory, pass_bytes
from engine.drafters.methods import METHODS, Opening, open_drafters
from engine.measuring import measure_draft_ms, measure_draft_prefill_ms, measure_pass_ms, measure_prefill_ms
from engine.models import Target, load_target
from engine.network.kv_layout import BLOCK
from engine.network.language_model import PREFILL_CHUNK
from engine.network.passes import Read
from engine.network.slots import copy_prefixes, who_waits
from engine.open_drafters import OpenDrafters
from engine.pairing import loaded_models
from engine.prefix_cache import PREFIX_CACHE_SHARE, PrefixCache
from engine.prompts import prepare_job
from engine.proposal import NOTHING, Ask, Drafter, Proposal
from engine.scoring import Shadows, with_scores
from engine.sequence import Sequence, sequences_of
from engine.states import SAID, PassStates
from engine.verdict import DraftVerdict
from engine.verification import verify

log = logging.getLogger(__name__)

#: Prompt tokens that a pass reads while another text is streamed: enough to keep the processor busy, few enough that
#: the stream does not wait long.
SHARED_CHUNK: Final = 128

#: Most tokens of a text that a drafted round reads before its drafts: the pending one and forced ones.
MOST_FRESH: Final = 16


def load_engine(
    models: ModelSettings, *, num_slots: int, extra_drafters: Mapping[str, Drafter] | None = None
) -> TransformersEngine:
    """Load the target and its drafters. Takes seconds, 14 for a GGUF that is loaded the first time.

    `extra_drafters`: beside those of the settings.

    Raises ConfigError for a device or a layer that is not there, ModelNotFound, UnsupportedModel, or IncompatiblePair
    for a draft model or heads that cannot draft for this target.
    """
    placement = Placement.of(models)
    free_before = {gpu: available_bytes(gpu) for gpu in placement.devices if gpu.type != "cpu"}
    log.info("loading the target %s", models.target.name, extra={"action": START_PROGRESS})
    target = load_target(models.target, placement)
    drafters = open_drafters(models, target, placement, num_slots=num_slots) | dict(extra_drafters or {})
    own = target.model.kv_shape.bytes_per_token
    drafted = sum(
        drafter.bytes_per_token
        for drafter in drafters.values()
        if drafter.device == target.device and not drafter.source_names
    )
    max_cache_bytes = models.target.max_cache_bytes or target_limit(available_bytes(target.device), own, drafted)
    log.info(
        "keys and values: %d bytes a token, at most %d MiB for %d slots, on %s",
        own,
        max_cache_bytes >> 20,
        num_slots,
        placement.name,
        extra={"action": "cache_sized"},
    )
    if (max_prefix_cache_bytes := models.target.max_prefix_cache_bytes) is None:
        max_prefix_cache_bytes = int(PREFIX_CACHE_SHARE * max_cache_bytes)
    return TransformersEngine(
        target,
        drafters,
        models=models,
        free_before=free_before,
        num_slots=num_slots,
        max_cache_bytes=max_cache_bytes,
        max_prefix_cache_bytes=max_prefix_cache_bytes,
    )


class TransformersEngine(Engine):
    """`alphaloop.engine.Engine` over a transformers model. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        *,
        models: ModelSettings,
        free_before: Mapping[torch.device, int],
        num_slots: int,
        max_cache_bytes: int,
        max_prefix_cache_bytes: int,
    ) -> None:
        self._target = target
        self._drafters = dict(drafters)
        self._models, self._placement = models, Placement.of(models)
        self._free_before = free_before  # by GPU, before the models were loaded
        self._num_slots = num_slots
        self._max_cache_bytes = max_cache_bytes
        self._cache = target.model.new_cache(num_slots, max_bytes=max_cache_bytes)
        self._admitted = AdmittedSequences(self._cache, num_slots, max_cache_bytes)
        self._prefix_cache = PrefixCache(self._cache, max_prefix_cache_bytes)
        self._unfinished = UnfinishedJobs()
        self._open_drafters = OpenDrafters(
            self._drafters, lambda: self._admitted.everyone, give_back=self._prefix_cache.give_back
        )
        self._shadows = Shadows(self._drafters, failed=self._open_drafters.failed, ended=self._open_drafters.ended)

    @property
    def identity(self) -> EngineIdentity:
        """What decodes."""
        return self._target.identity

    @property
    def drafters(self) -> tuple[DrafterState, ...]:
        """The drafters loaded here."""
        return tuple(drafter.state for drafter in self._drafters.values())

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """What the model's generation config says."""
        return self._target.sampling_defaults

    @property
    def features(self) -> frozenset[Feature]:
        """What a job may ask for."""
        return served_by("own").features

    @property
    def can_redraft(self) -> bool:
        """Whether a running sequence can change how it drafts."""
        return True

    def prepare(self, job: Job, sampling: Sampling) -> PreparedJob:
        """Tokenize; raises PromptTooLong, JobTooLarge or InvalidField when the job cannot be decoded here."""
        target, identity = self._target, self._target.identity
        prepared = prepare_job(
            target.tokenizer,
            identity.target,
            identity.context_length,
            job,
            sampling,
            longest_token_chars=target.longest_token_chars,
            num_rows=target.model.num_rows,
            num_logits=target.model.vocabulary_size,
            end_tokens=target.end_tokens,
            reply_form=target.reply_form,
        )
        if prepared.sampling.constraint is not None:
            self._compile(job, prepared.sampling.constraint)
        needed = self._cache.num_bytes_with(1, [num_positions(prepared)])
        if needed > self._max_cache_bytes:
            raise JobTooLarge(
                f"expected at most {self._max_cache_bytes} bytes of keys and values, found {needed}: "
                f"({len(prepared.token_ids)} prompt tokens + {prepared.sampling.max_tokens} max_tokens) "
                f"in blocks, times {self._cache.shape.bytes_per_token} bytes a token",
                field="body.max_tokens",
                hint="lower max_tokens, or raise models.target.max_cache_bytes",
            )
        return prepared

    def _compile(self, job: Job, constraint: Constraint) -> None:
        """Raise InvalidField for a constraint that does not compile, of tools with the path of the schema at fault."""
        compiled = self._target.grammars.compiled
        try:
            compiled(constraint)
        except InvalidField:
            if job.body.must_call:
                for number, tool in enumerate(job.body.tools or ()):
                    schema = json.dumps({**(tool["function"].get("parameters") or {}), "type": "object"})
                    compiled(Constraint("json_schema", schema, f"body.tools.{number}.function.parameters"))
            raise

    def has_room(self, prepared: PreparedJob) -> bool:
        """Whether a slot and the memory for a text of this job are free beside what runs.

        Sequences that memory had no room for, and texts of jobs admitted before that wait for a slot, go first.
        """
        return not (self._admitted.preempted or self._admitted.waiting) and self._admitted.fits(prepared)

    def admit(self, prepared: PreparedJob, decision: Decision) -> None:
        """Take a job in; the next steps read its prompt. Its texts after the first may wait for a slot."""
        if not self._admitted.fits(prepared):
            raise DecodeFailed(
                f"no free slot or memory ({self._num_slots} slots)", hint="ask has_room() before admit()"
            )
        drafter = self._open_drafters.state(decision.drafter)
        for sequence in sequences_of(prepared, self._target):
            sequence.drafting.change(drafter, decision.num_draft_tokens)
            self._shadows.begin(sequence)
            self._admitted.waiting.append(sequence)
            self._prefix_cache.note(sequence)
        self._admitted.start_waiting()

    def add_drafter(self, name: str, settings: DrafterSettings, revision: str | None = None) -> DrafterState:
        """Load a drafter beside the others, between two steps.

        Raises AlphaloopError where it is not of that `revision`, None: of any; where it cannot draft for this target;
        where the device has no memory for it.
        """
        models = self._models.model_copy(update={"drafters": {**self._models.drafters, name: settings}})
        opening = Opening(models, self._target, self._placement, self._num_slots, opened=self._drafters)
        try:
            drafter = METHODS[settings.method](name, settings, opening)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ModelError(f"no memory for the drafter {name} on {self._placement.name}") from None
        if revision not in (None, drafter.state.revision):
            raise IncompatiblePair(
                f"expected {name} to be the draft {revision}, found {drafter.state.revision}",
                hint="its files are others, or its settings differ from those that it was registered with",
            )
        self._drafters[name], self._models = drafter, models
        return drafter.state

    def use_memory(self, view_of: ViewOf) -> None:
        """Let look-up with `memory` search earlier results, from the next job on."""
        for drafter in self._drafters.values():
            drafter.use_memory(view_of)

    def redraft(self, job_id: str, drafter: str | None, num_draft_tokens: int) -> None:
        """From its next round on a job drafts with `drafter`, at most `num_draft_tokens` tokens a round.

        None closes its drafter, k = 0 pauses it, another drafter closes the one before. Where memory is short for
        opening a drafter, the sequence decodes vanilla until the next call. Nothing happens if the job is not here.
        Raises DecodeFailed for a drafter that is not loaded.
        """
        wanted = self._open_drafters.state(drafter)
        for sequence in self._admitted.of_job(job_id):
            self._open_drafters.redraft(sequence, wanted, num_draft_tokens)

    def step(self) -> Step:
        """One round for every admitted sequence. Raises DecodeFailed, after which `abandon` empties the engine.

        No job is lost where memory runs out: the prefix cache is dropped first. If a drafter took the last of it,
        that drafter's sequences decode vanilla until the next `redraft`. Otherwise half of the sequences leave their
        slots and go on later. Nor is a job lost where a drafter raises: see `open_drafters`.
        """
        began = time.perf_counter()
        batch = self._schedule()
        round_ = _Round(tokens_by_job={sequence.job_id: 0 for sequence in batch})
        self._run_in_memory(round_, batch)
        deltas = _deltas(batch)
        failed = self._drop_failed(batch)
        finished = self._drop_finished(batch, failed)
        wall_s = time.perf_counter() - began
        for sequence in batch:
            sequence.charge(wall_s / len(batch), len(batch))
        # Scoring comes after the clocks of all texts: neither they nor the cost of the round include it.
        texts = self._texts_of(finished)
        self._shadows.advance()
        round_.sum_by_job(batch)
        round_.count_cached(self._prefix_cache)
        return Step(
            finished=texts,
            deltas=deltas,
            batch=len(batch),
            wall_s=wall_s,
            overhead_s=wall_s - round_.draft_s - round_.verify_s,
            shadow_s=time.perf_counter() - began - wall_s,
            drafter_failures=self._open_drafters.take_failures(),
            failed=tuple(FailedRequest(job_id, error, is_final=True) for job_id, error in failed.items()),
            **vars(round_),
        )

    def _texts_of(self, finished: list[Sequence]) -> tuple[Generation, ...]:
        """The scored texts of jobs all of whose sequences have ended; their drafters let go of them."""
        generations = [self._scored(sequence, sequence.generation()) for sequence in finished]
        whole = [self._unfinished.take(*ended) for ended in zip(finished, generations, strict=True)]
        for sequence in finished:
            self._open_drafters.finished(sequence)
        return tuple(generation for generation in whole if generation is not None)

    def _schedule(self) -> list[Sequence]:
        """Give free slots to waiting sequences, fit memory and drafters to what runs; returns the running ones."""
        self._admitted.resume()
        self._admitted.start_waiting()
        # The prefix cache has what the running sequences leave, and the cache grows no further than they leave.
        self._prefix_cache.fit(self._max_cache_bytes - self._admitted.num_bytes)
        self._cache.max_bytes = self._max_cache_bytes - self._prefix_cache.num_bytes
        self._open_drafters.open_due(self._admitted.running, self.memory)
        return list(self._admitted.running)

    def _run_in_memory(self, round_: _Round, batch: list[Sequence]) -> None:
        """Run the round; where memory runs out, the round is lost and there is room for the next."""
        if not batch:
            return
        try:
            with torch.inference_mode():
                self._run(round_, batch)
        except Exception as error:
            has_prefixes, has_taps = self._prefix_cache.num_bytes, any(map(self._open_drafters.taps_of, batch))
            if not (is_out_of_memory(error) and (len(batch) > 1 or has_prefixes or has_taps)):
                raise DecodeFailed(f"a step over {len(batch)} sequences failed: {reason_of(error)}") from error
            self._make_room(batch)

    def _drop_failed(self, batch: list[Sequence]) -> dict[str, AlphaloopError]:
        """Cancel the jobs with a text that cannot go on; returns why, by job."""
        failed = {sequence.spec.owner: sequence.failure for sequence in batch if sequence.failure is not None}
        for job_id in failed:
            self.cancel(job_id)
        return failed

    def _drop_finished(self, batch: list[Sequence], failed: Container[str]) -> list[Sequence]:
        """Release the slots of finished sequences; returns them."""
        finished = [sequence for sequence in batch if sequence.finish_reason and sequence.spec.owner not in failed]
        left = self._max_cache_bytes - self._admitted.num_bytes
        for sequence in finished:
            self._prefix_cache.keep(sequence, left)
            self._drop(sequence)
        if self._cache.num_bytes + self._prefix_cache.num_bytes > self._max_cache_bytes:
            self._trim()
        self._admitted.close_gaps()
        return finished

    def _run(self, round_: _Round, batch: list[Sequence]) -> None:
        """Propose, read, verify, keep: one pass of the target over `batch`.

        Raises whatever torch raises; then no sequence has taken anything, and slots hold what their lengths say.
        """
        if unread := self._unread(batch):
            self._copy_prefixes(unread, batch)
            unread = self._unread(batch)
        began = time.perf_counter()
        pending = [sequence for sequence in batch if sequence not in unread] if unread else batch
        asks = {sequence.job_id: sequence.ask() for sequence in pending}
        proposals = self._propose(round_, pending, asks)
        judged = [(sequence, sequence.fit(proposals[sequence.job_id], asks[sequence.job_id])) for sequence in pending]
        round_.draft_s = time.perf_counter() - began
        prompts = self._prompts(unread, batch) if unread else []
        reads = [_verifying(sequence, proposal) for sequence, proposal in judged]
        round_.proposed_by_job = {sequence.job_id: len(draft.tokens) for sequence, draft in judged if draft.tokens}
        reads += [Read(sequence.slot, tokens, num_logits=int(is_last)) for sequence, tokens, is_last in prompts]
        judged += [(sequence, NOTHING) for sequence, _, is_last in prompts if is_last]
        self._begin_masks(judged)
        logits, states = self._read(reads, batch)
        verdicts = verify(logits, judged) if judged else []
        round_.verify_s = time.perf_counter() - began - round_.draft_s
        round_.take_widths(reads[: len(pending)], prompts)
        for number, (sequence, tokens, _) in enumerate(prompts, len(pending)):
            self._keep_states(states, number, sequence, range(len(tokens)))
            self._cache.lengths[sequence.slot] += len(tokens)
        # Texts that were read to their end come first: keeping drafts may fail, and these would not be read again.
        for number, ((sequence, proposal), verdict) in reversed(list(enumerate(zip(judged, verdicts, strict=True)))):
            if self._num_unread(sequence):
                self._keep_accepted(states, number, sequence, verdict)
            try:
                round_.tokens_by_job[sequence.job_id] = sequence.take(proposal, verdict, asks.get(sequence.job_id))
            except Exception as error:
                _fail_alone(sequence, error)
        round_.context = sum(self._cache.lengths[sequence.slot] for sequence in batch) // len(batch)

    def _begin_masks(self, judged: list[tuple[Sequence, Proposal]]) -> None:
        """Begin to compute the masks of constrained texts, while the device reads."""
        compute_masks(
            self._target.grammars,
            [
                (sequence.constrained, proposal.paths)
                for sequence, proposal in judged
                if sequence.constrained is not None and not sequence.choice.takes_likeliest
            ],
        )

    def _keep_accepted(self, states: PassStates | None, number: int, sequence: Sequence, verdict: DraftVerdict) -> None:
        """Keep keys, values and states of what read `number` has of the text, without rejected drafts."""
        sequence.drafting.is_first_drafted |= not sequence.has_begun
        fresh = sequence.num_fresh
        columns: SequenceOf[int] = range(fresh + verdict.num_accepted)
        if verdict.branch is not None:
            columns = (*range(fresh), *(index + fresh for index in verdict.branch))
        self._keep_states(states, number, sequence, columns)
        self._cache.keep(sequence.slot, columns)

    def _read(self, reads: list[Read], batch: list[Sequence]) -> tuple[Tensor, PassStates | None]:
        """The pass, with the states that drafters of `batch` want; None where none wants any."""
        taps = tuple(sorted({tap for sequence in batch for tap in self._open_drafters.taps_of(sequence)}))
        if not taps:
            return self._target.model.read(self._cache, reads), None
        logits, by_tap = self._target.model.read_tapped(self._cache, reads, [tap for tap in taps if tap != SAID])
        return logits, PassStates(reads, by_tap | {SAID: logits})

    def _keep_states(
        self, states: PassStates | None, number: int, sequence: Sequence, columns: SequenceOf[int]
    ) -> None:
        """Keep those of `columns` of read `number` for the drafter of `sequence`, before its slot's length changes."""
        if states is not None and (taps := self._open_drafters.taps_of(sequence)):
            first = self._cache.lengths[sequence.slot]
            sequence.drafting.states.add(first, len(columns), states.of(number, columns, taps))

    def _copy_prefixes(self, unread: list[Sequence], batch: list[Sequence]) -> None:
        """Give slots what they need not read: from the prefix cache, and then from what other slots hold."""
        self._prefix_cache.copy_into(unread)
        copy_prefixes(self._cache, unread, batch)

    def _propose(self, round_: _Round, pending: list[Sequence], asks: dict[str, Ask | None]) -> dict[str, Proposal]:
        """A proposal for each sequence whose slot lacks the last token only; `asks` by job_id.

        The round is vanilla for sequences whose drafter fails: it is taken from them, and so is their ask.
        """
        proposals = {sequence.job_id: NOTHING for sequence in pending}
        by_drafter: defaultdict[str, list[Ask]] = defaultdict(list)
        for sequence in pending:
            ask = asks[sequence.job_id]
            if ask is not None and ask.num_tokens > 0 and (drafter := sequence.drafting.of_next_round) is not None:
                by_drafter[drafter.name].append(ask)
        has_failed = False
        by_job = {sequence.job_id: sequence for sequence in pending}
        for name, asking in by_drafter.items():
            # A drafter before it in this loop may have lost the memory of both.
            wanted = [ask for ask in asking if by_job[ask.job_id].drafting.of_next_round is not None]
            if not wanted:
                continue
            began = time.perf_counter()
            if (answers := self._open_drafters.propose(name, wanted, self._target)) is None:
                has_failed = True
                continue
            num_read, longest = sum(draft.num_read for draft in answers), max(len(draft.tokens) for draft in answers)
            round_.num_draft_prefill_tokens += num_read
            round_.draft_s_by_proposer[name] = time.perf_counter() - began
            round_.shape_by_proposer[name] = ProposalShape(len(wanted), 1 + longest, num_read)
            proposals |= {ask.job_id: answer for ask, answer in zip(wanted, answers, strict=True)}
            for source, (seconds, shape) in self._drafters[name].by_source().items():
                if source not in by_drafter:  # which has times of its own
                    round_.draft_s_by_proposer[source], round_.shape_by_proposer[source] = seconds, shape
        vanilla = {sequence.job_id for sequence in pending if sequence.drafting.of_next_round is None}
        proposals |= dict.fromkeys(vanilla, NOTHING)
        asks |= dict.fromkeys(vanilla)
        used = {None if sequence.job_id in vanilla else sequence.drafting.name for sequence in pending}
        # What a failure took is no drafter's time.
        round_.drafter = used.pop() if len(used) == 1 and not has_failed else None
        round_.drafting = tuple(sequence.job_id for sequence in pending if sequence.job_id not in vanilla)
        return proposals

    def _prompts(self, unread: list[Sequence], batch: list[Sequence]) -> list[tuple[Sequence, list[int], bool]]:
        """Pieces of the oldest texts that are still to be read: the sequence, the tokens, whether they are its last."""
        # If most sequences wait for their prompts, reading prompts comes first.
        is_hurried = any(sequence.spec.is_streamed for sequence in batch) and 2 * len(unread) <= len(batch)
        room = SHARED_CHUNK if is_hurried else PREFILL_CHUNK
        pieces: list[tuple[Sequence, list[int], bool]] = []
        waiting = who_waits(self._cache, unread, room)
        for sequence in unread:
            if not room:
                break
            if sequence.slot in waiting:
                continue
            length = self._cache.lengths[sequence.slot]
            tokens = sequence.text[length : length + room]
            room -= len(tokens)
            pieces.append((sequence, tokens, length + len(tokens) == len(sequence.text)))
        return pieces

    def _num_unread(self, sequence: Sequence) -> int:
        return len(sequence.text) - self._cache.lengths[sequence.slot]

    def _is_pending(self, sequence: Sequence) -> bool:
        """Whether its slot lacks only what the last round left. A long run of forced tokens is read as a prompt."""
        return self._num_unread(sequence) == sequence.num_fresh <= MOST_FRESH

    def _unread(self, batch: list[Sequence]) -> list[Sequence]:
        """Those whose slot lacks more than that."""
        return [sequence for sequence in batch if not self._is_pending(sequence)]

    def _scored(self, sequence: Sequence, generation: Generation) -> Generation:
        with_shadows = replace(generation, shadows=(*generation.shadows, *self._shadows.end(sequence)))
        if sequence.to_score is None:
            return with_shadows
        usable = {name: drafter for name, drafter in self._drafters.items() if name not in self._open_drafters.ended}
        failed, constrained = self._open_drafters.failed, sequence.constrained
        return with_scores(with_shadows, sequence.to_score, usable, failed, constrained=constrained)

    def _drop(self, sequence: Sequence) -> None:
        self._admitted.drop(sequence)
        self._open_drafters.close(sequence)

    def _make_room(self, batch: list[Sequence]) -> None:
        """Memory ran out: drop the prefix cache, or, if it is empty, preempt the younger half of the sequences."""
        for sequence in batch:
            # A drafter's state is unknown after memory ran out: it is opened again, and reads the text again. The
            # target's states that a drafter had still to read go for good.
            if self._open_drafters.taps_of(sequence):
                self._open_drafters.redraft(sequence, None, 0)
            else:
                self._open_drafters.close(sequence)
        if self._prefix_cache.give_back():
            return
        half = (len(batch) + 1) // 2
        self._admitted.preempt(batch[half:], most_running=half)
        self._trim()

    def _trim(self) -> None:
        """Release the cache's memory that no slot in use needs."""
        try:
            self._cache.trim()
        except Exception as error:  # the cache is empty then, and the texts are read again
            if not is_out_of_memory(error):
                raise

    def cancel(self, job_id: str) -> bool:
        """Drop a job between two steps; False if it is not here."""
        if not (sequences := self._admitted.of_job(job_id)):
            return False
        for sequence in sequences:
            self._drop(sequence)
            self._shadows.drop(sequence)
            self._open_drafters.finished(sequence)
        self._prefix_cache.forget(job_id)
        self._admitted.close_gaps()
        self._unfinished.drop(job_id)
        return True

    def abandon(self) -> None:
        """Drop every sequence, and the caches' memory with them."""
        self._admitted.clear()
        self._prefix_cache.clear()
        self._unfinished.clear()
        self._shadows.clear()
        self._open_drafters.clear()

    def load(self) -> Load:
        """How full the engine is."""
        return Load(len(self._admitted.everyone), self._num_slots)

    def memory(self) -> CacheMemory:
        """Memory for keys and values, as it is now. Reads each device's state: 0.3 ms for a CPU."""
        keeping, own = self._open_drafters.keeping, self._target.device
        held: Counter[torch.device] = Counter({own: self._cache.num_bytes + self._prefix_cache.num_bytes})
        for draft in keeping.values():
            held[draft.device or own] += draft.num_cache_bytes
        return CacheMemory(
            free=available_bytes(own),
            held=held.pop(own),
            target_limit=self._max_cache_bytes,
            target_per_token=self._cache.shape.bytes_per_token,
            drafts_per_token={name: draft.bytes_per_token for name, draft in keeping.items()},
            positions_at_once=BLOCK,
            per_row=pass_bytes(self._target.model.vocabulary_size, 1),
            elsewhere={str(device): DeviceMemory(available_bytes(device), of) for device, of in held.items()},
            device_of={name: str(draft.device) for name, draft in keeping.items() if draft.device not in (own, None)},
        )

    def unserved(self, jobs: SequenceOf[PreparedJob]) -> Mapping[str, str]:
        """Draft models whose context ends within what they read of every prompt, and drafters that have ended.

        Sampling settings they serve all.
        """
        shortest = min((len(job.token_ids) for job in jobs), default=0)
        short = {
            name: f"prompts of {shortest} tokens, as it reads {draft.longest_text}"
            for name, draft in self._drafters.items()
            if draft.longest_text is not None and draft.state.num_read(shortest) >= draft.longest_text
        }
        return {**short, **self._open_drafters.ended}

    def loaded_models(self) -> LoadedModels:
        """Sizes of the models, and how each draft model fits; read from their files again."""
        return loaded_models(self._models, context_length=self.identity.context_length, num_slots=self._num_slots)

    def gpu_bytes(self) -> Mapping[str, int]:
        """By GPU, bytes taken since before the models were loaded."""
        return {str(gpu): free - available_bytes(gpu) for gpu, free in self._free_before.items()}

    def measure_round_ms(self, drafter: str | None, batch: int, width: int, context: int, num_samples: int) -> float:
        """Median milliseconds of one target pass of that shape, or of that drafter's proposal for it."""
        if drafter is None:
            return measure_pass_ms(self._target.model, batch, width, context, num_samples)
        return measure_draft_ms(self._drafters[drafter], batch, width, context, num_samples)

    def measure_prefill_ms(self, drafter: str | None, num_tokens: int, num_samples: int) -> float:
        """Median milliseconds in which the target, or that drafter, reads a prompt it has never seen."""
        if drafter is None:
            return measure_prefill_ms(self._target.model, num_tokens, num_samples)
        return measure_draft_prefill_ms(self._drafters[drafter], num_tokens, num_samples)


@dataclass
class _Round:
    """What a round did, by the names of `Step`: of one that memory ran out in, as far as it came."""

    tokens_by_job: dict[str, int]
    proposed_by_job: dict[str, int] = field(default_factory=dict)
    drafting: tuple[str, ...] = ()
    drafter: str | None = None
    draft_s_by_proposer: dict[str, float] = field(default_factory=dict)
    shape_by_proposer: dict[str, ProposalShape] = field(default_factory=dict)
    width: int = 1
    num_positions: int = 0
    num_prefill_tokens: int = 0
    num_draft_prefill_tokens: int = 0
    context: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    sequences_by_job: dict[str, int] = field(default_factory=dict)
    num_prefix_cache_hits: int = 0
    num_prefix_cache_tokens: int = 0
    prefix_cache_bytes: int = 0

    def count_cached(self, cache: PrefixCache) -> None:
        """Take what the prefix cache has spared since the round before, and its size."""
        spared = cache.take_spared()
        self.num_prefix_cache_hits, self.num_prefix_cache_tokens = spared.num_hits, spared.num_tokens
        self.prefix_cache_bytes = cache.num_bytes

    def take_widths(self, reads: SequenceOf[Read], prompts: SequenceOf[tuple[Sequence, list[int], bool]]) -> None:
        """Take what a pass has read: what verifies proposals, and pieces of prompts."""
        widths = [len(read.token_ids) for read in reads]
        self.width, self.num_positions = max(widths, default=1), sum(widths)
        self.num_prefill_tokens = sum(len(tokens) for _, tokens, _ in prompts)

    def sum_by_job(self, batch: SequenceOf[Sequence]) -> None:
        """Make numbers of a job's several sequences their sum, under the job's id."""
        owners = {sequence.job_id: sequence.spec.owner for sequence in batch}
        if all(job_id == owner for job_id, owner in owners.items()):
            return
        self.sequences_by_job = dict(Counter(sequence.spec.owner for sequence in batch if sequence.spec.num_texts > 1))
        self.tokens_by_job = _by_owner(self.tokens_by_job, owners)
        self.proposed_by_job = _by_owner(self.proposed_by_job, owners)
        self.drafting = tuple(dict.fromkeys(owners[job_id] for job_id in self.drafting))


def _by_owner(by_sequence: Mapping[str, int], owners: Mapping[str, str]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for job_id, num in by_sequence.items():
        sums[owners[job_id]] += num
    return dict(sums)


def _deltas(batch: SequenceOf[Sequence]) -> tuple[TokenDelta, ...]:
    """The text that every sequence has added."""
    deltas: list[TokenDelta] = []
    for sequence in batch:
        try:
            deltas += sequence.take_deltas()
        except Exception as error:
            _fail_alone(sequence, error)
    return tuple(deltas)


def _fail_alone(sequence: Sequence, error: Exception) -> None:
    """Let a sequence fail whose own text raised `error`, while the others go on."""
    log.error("a text cannot be read", exc_info=error, extra={"action": "text_unreadable"})
    sequence.failure = DecodeFailed(f"reading the text failed: {reason_of(error)}")


def _verifying(sequence: Sequence, proposal: Proposal) -> Read:
    fresh = sequence.num_fresh
    tokens = [*sequence.text[-fresh:], *proposal.tokens]
    parents = None
    if proposal.parents is not None:
        parents = [*range(-1, fresh - 1), *(parent + fresh for parent in proposal.parents)]
    return Read(sequence.slot, tokens, num_logits=1 + len(proposal.tokens), parents=parents)
