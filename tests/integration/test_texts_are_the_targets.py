"""A text is the target's, whatever drafts: every way of drafting × every field of a body × how tokens are chosen.

A greedy or seeded job has one right text, which plain passes without a cache say; a job without a seed has a
distribution, which they say too. A field that is missing here is a field that drafting may break: add a line. Targets
are tiny models in float64, of every family: so a text that differs is no matter of rounding.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import torch
import transformers

from alphaloop.acceptance import AcceptanceCounts
from alphaloop.deciding.decision import Decision
from alphaloop.engine import Generation, Sampling
from alphaloop.messages import Constraint, Job, Purpose
from alphaloop.settings.models import HybridDrafterSettings, ModelSettings, TargetSettings
from engine import verification
from engine.constraint import GRAMMAR, ConstrainedText
from engine.drafters.draft_vocabulary import write_draft_vocabulary
from engine.drafters.hybrid import HybridDrafter
from engine.drafters.methods import METHODS
from engine.network.language_model import PREFILL_CHUNK
from engine.own import TransformersEngine, load_engine
from engine.prompts import bad_word_tokens
from engine.proposal import Proposal
from engine.sampling import Barred
from engine.scoring import Shadows
from engine.verdict import DraftVerdict
from tests.fixtures import heads
from tests.fixtures.distributions import KINDS, Distribution, GuessingDrafter, chi_square_excess, exact_distribution
from tests.fixtures.drafting import ScriptedDrafter, draft_model
from tests.fixtures.memory import ScopedMemory
from tests.fixtures.models import (
    FAMILIES,
    NUM_TOKENS,
    VANILLA,
    Reference,
    Wanted,
    byte_fallback,
    decision,
    finish,
    make_job,
    other_tokenizer,
    small_llama,
    steps,
)

NUM_SLOTS: Final = 16
#: More than a pass reads of a prompt, alone or beside others.
CONTEXT: Final = PREFILL_CHUNK + 48

#: Every way of drafting, as its section of the settings says it; `source` is a folder of `sources`.
DRAFTERS: Final[dict[str, dict[str, Any]]] = {
    "lookup": {},
    "lookup_tree": {"num_branches": 3, "min_probability": 0.0, "max_draft_tokens": 8},
    "lookup_memory": {"memory": True},
    "draft_model": {"method": "draft_model", "source": "small"},
    "draft_model_branches": {"method": "draft_model", "source": "small", "num_branches": 3, "max_draft_tokens": 8},
    "draft_model_gate": {"method": "draft_model", "source": "small", "min_probability": 0.02},
    "draft_model_excerpt": {"method": "draft_model", "source": "small", "max_prompt_tokens": 16},
    "draft_model_cut": {"method": "draft_model", "source": "cut", "num_branches": 2},
    "other_tokenizer": {"method": "draft_model", "source": "other"},
    "byte_fallback": {"method": "draft_model", "source": "bytes", "num_branches": 2, "min_probability": 0.01},
    "heads": {"method": "heads", "source": "sequential"},
    "heads_branches": {"method": "heads", "source": "sequential", "num_branches": 3, "max_draft_tokens": 6},
    "medusa": {"method": "heads", "source": "medusa", "max_draft_tokens": 3},
    "eagle3": {"method": "eagle3", "source": "eagle3"},
    "eagle3_branches": {"method": "eagle3", "source": "eagle3", "num_branches": 3, "max_draft_tokens": 6},
    "layer_skip": {"method": "layer_skip", "skip_layers": (1,)},
    "layer_skip_branches": {"method": "layer_skip", "skip_layers": (1,), "num_branches": 2},
    "recycling": {"method": "recycling"},
    "hybrid": {"method": "hybrid", "sources": ("lookup", "draft_model")},
    "hybrid_tree": {"method": "hybrid", "sources": ("lookup", "recycling", "layer_skip"), "rule": "tree"},
}
#: Made by fixtures: they know the right text, or are right at times because they are the target or nearly.
FIXTURES: Final = ("chain", "tree", "target_itself", "distorted")
#: The drafters of a family.
ROWS_OF: Final = dict.fromkeys(FAMILIES, ("chain", "tree", "target_itself")) | {
    "llama": (*DRAFTERS, *FIXTURES),
    "gpt_neox": ("draft_model", "heads", "medusa", "eagle3", "recycling", "tree"),
}
ROWS: Final = [(family, name) for family, names in ROWS_OF.items() for name in names]

PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
TAGS: Final = {"type": "array", "items": {"type": "string", "pattern": "^[a-d]{1,6}$"}, "minItems": 2, "maxItems": 6}
THING: Final = "(the |other )*thing[0-9]{2,20}!"
LIST: Final = 'start: "(" item ("," item)* ")"\nitem: /[a-z]{1,5}/'
ANSWERS: Final = ["yes", "no, never", "yes, perhaps"]
PROMPT: Final = "one two a one two the two an one"
Fields = dict[str, Any]


def constrained(kind: Any, source: Any, **more: Any) -> Callable[[Generation], Fields]:
    text = source if isinstance(source, str) else json.dumps(source)
    return lambda plain: {"constraint": Constraint(kind, text, f"body.{kind}"), "max_tokens": 28, **more}


def liked_words(text: str) -> tuple[str, ...]:
    """Letters and pairs of letters of a text, one token or two each."""
    pieces = (text[place : place + 1 + place % 2] for place in range(2, len(text), 3))
    return tuple(dict.fromkeys(piece for piece in pieces if piece.isalpha()))


#: What a job asks for, given what it writes when it asks for nothing: fields of Sampling, and of the body.
FIELDS: Final[dict[str, Callable[[Generation], Fields]]] = {
    "nothing": lambda plain: {},
    "one token": lambda plain: {"max_tokens": 1},
    "two tokens": lambda plain: {"max_tokens": 2},
    "the end of the context": lambda plain: {"prompt": "ab cd" * 109},
    "a repeating prompt": lambda plain: {"prompt": "long " * 12},
    "stop": lambda plain: {"stop": (plain.text[len(plain.text) // 2 :][:3], "never in there")},
    "stop_token_ids": lambda plain: {"stop_token_ids": (plain.token_ids[6],)},
    "min_tokens": lambda plain: {"min_tokens": 9, "stop_token_ids": (plain.token_ids[1], plain.token_ids[5])},
    "ignore_eos": lambda plain: {"ignore_eos": True, "logit_bias": ((0, 6.0),)},
    "bad_words": lambda plain: {"bad_words": liked_words(plain.text)},
    "allowed_token_ids": lambda plain: {"allowed_token_ids": tuple(range(3, NUM_TOKENS, 5))},
    "bars together": lambda plain: {
        "bad_words": ("t", "e"),
        "allowed_token_ids": tuple(range(3, NUM_TOKENS, 4)),
        "min_tokens": 5,
        "ignore_eos": True,
    },
    "logit_bias": lambda plain: {"logit_bias": tuple((token, 5.0) for token in range(1, NUM_TOKENS, 48))},
    "repetition_penalty": lambda plain: {"repetition_penalty": 1.3},
    "a penalty that rewards": lambda plain: {"repetition_penalty": 0.8},
    "frequency and presence": lambda plain: {"frequency_penalty": 0.9, "presence_penalty": -0.4},
    "top_k": lambda plain: {"top_k": 20, "repetition_penalty": 1.2},
    "top_p and min_p": lambda plain: {"top_p": 0.9, "min_p": 0.02},
    "logprobs": lambda plain: {"num_logprobs": 3, "frequency_penalty": 0.4, "logit_bias": ((9, 3.0),)},
    "n": lambda plain: {"n": 3},
    "stream": lambda plain: {"stream": True},
    "prediction": lambda plain: {"prediction": {"type": "content", "content": plain.text[:12] + "#" + plain.text[14:]}},
    "json_schema": constrained("json_schema", PERSON),
    "json_schema, a list": constrained("json_schema", TAGS),
    "regex": constrained("regex", THING),
    "choice": constrained("choice", ANSWERS),
    "grammar": constrained("grammar", LIST),
    "a constraint that is adjusted": constrained("json_schema", PERSON, repetition_penalty=1.2, top_p=0.9),
    "a constraint and logprobs": constrained("regex", THING, num_logprobs=1),
}
GREEDY_ONLY: Final = ("the end of the context", "one token", "two tokens", "a repeating prompt", "stream")
CHOICES: Final[dict[str, Fields]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.9, "seed": 7}}
OF_BODY: Final = ("prompt", "stream", "prediction")


@dataclass(slots=True)
class Bench:
    """An engine with every drafter, the job of every cell of FIELDS × CHOICES, and its right text."""

    engine: TransformersEngine
    work: dict[tuple[str, str], tuple[Job, Sampling]]
    right: dict[str, Generation]  #: by job_id: vanilla, with no token taken because it is the only one allowed

    def scripts(self) -> list[ScriptedDrafter]:
        return [drafter for drafter in self.engine._drafters.values() if isinstance(drafter, ScriptedDrafter)]


@pytest.fixture(scope="module")
def sources(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Any:
    """Folders of draft models and heads by name, for a target of a family."""
    where = tmp_path_factory.mktemp("drafts")
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    tiny |= {"max_position_embeddings": 2048, "initializer_range": 1.0}

    def small(name: str, tokenizer: Any) -> Path:
        sizes = {**tiny, "vocab_size": max(len(tokenizer), NUM_TOKENS), "eos_token_id": tokenizer.eos_token_id}
        return small_llama(tiny_models["llama"], tokenizer, where / name, dtype=torch.float64, **sizes)

    write_draft_vocabulary(small("cut", tiny_tokenizer), torch.arange(0, NUM_TOKENS, 3))
    folders = {name: small(name, made) for name, made in (("small", tiny_tokenizer), ("other", other_tokenizer()))}
    folders |= {"bytes": small("bytes", byte_fallback()), "cut": where / "cut"}

    def of(family: str) -> dict[str, Path]:
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_models[family], dtype=torch.float64)
        head, into = model.get_output_embeddings().weight.detach(), where / family
        made = {
            "sequential": heads.sequential(into / "sequential", head),
            "medusa": heads.medusa(into / "medusa", head),
        }
        return folders | made | {"eagle3": heads.eagle3(into / "eagle3", len(head))}

    return of


@pytest.fixture(scope="module")
def distorted(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights: right at times, and second-best right at others."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_models["llama"], dtype=torch.float64)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder := tmp_path_factory.mktemp("distorted"))
    return folder


def sampling_of(fields: Mapping[str, Any], chosen: Mapping[str, Any]) -> Sampling:
    return Sampling(**({"max_tokens": 12} | {k: v for k, v in fields.items() if k not in OF_BODY} | dict(chosen)))


@pytest.fixture(scope="module")
def bench(
    tiny_models: dict[str, Path], sources: Callable[[str], dict[str, Path]], distorted: Path, seed: int
) -> Callable[[str], Bench]:
    @functools.cache
    def of(family: str) -> Bench:
        folders = sources(family)
        sections = {name: dict(DRAFTERS[name]) for name in ROWS_OF[family] if name in DRAFTERS}
        for section in sections.values():
            if "source" in section:
                section["source"] = str(folders[section["source"]])
        target = TargetSettings(
            name="tiny",
            source=str(tiny_models[family]),
            dtype="float64",
            device="cpu",
            num_threads=1,
            context_length=CONTEXT,
        )
        settings = ModelSettings.model_validate({"target": target, "drafters": sections})
        engine = load_engine(settings, num_slots=NUM_SLOTS)
        for name in ("chain", "tree"):
            engine._drafters[name] = ScriptedDrafter(name, random.Random(seed), is_tree=name == "tree")
        for name, folder in {"target_itself": tiny_models[family], "distorted": distorted}.items():
            engine._drafters[name] = made = draft_model(name, folder, num_slots=NUM_SLOTS)
            made.num_branches = 3 if name == "distorted" else 1
        return with_work(engine)

    return of


def with_work(engine: TransformersEngine) -> Bench:
    bench = Bench(engine, {}, {})
    for number, (how, chosen) in enumerate(CHOICES.items()):
        (plain,) = finish(engine, [(make_job(PROMPT, 900 + number), sampling_of({}, chosen), VANILLA)]).values()
        for field, ask in FIELDS.items():
            if how == "seeded" and field in GREEDY_ONLY:
                continue
            fields = ask(plain)
            body = {name: fields[name] for name in OF_BODY if name in fields}
            job = make_job(body.pop("prompt", PROMPT), len(bench.work), **body)
            bench.work[field, how] = (job, sampling_of(fields, chosen))
    engine._target.grammars.takes_forced = False
    bench.right = finish(engine, ((*cell, VANILLA) for cell in bench.work.values()))
    engine._target.grammars.takes_forced = True
    memory = ScopedMemory()
    for text in [*bench.right.values()][::5]:
        memory.remember("code", text.token_ids)
    for drafter in engine._drafters.values():
        drafter.use_memory(memory.view)
    for script in bench.scripts():
        for job, sampling in bench.work.values():
            prompt = engine.prepare(job, sampling).token_ids
            script.truths[job.job_id] = [*prompt, *bench.right[job.job_id].token_ids]
    return bench


def test_every_way_of_drafting_has_a_row() -> None:
    assert {section.get("method", "lookup") for section in DRAFTERS.values()} == METHODS.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vanilla_text_is_what_plain_passes_say(
    bench: Callable[[str], Bench], references: Callable[[str], Reference], family: str
) -> None:
    engine, reference = bench(family).engine, references(family)
    target, plain = engine._target, list[tuple[str, Generation, Sampling, Wanted]]()
    for (field, _), (job, sampling) in bench(family).work.items():
        prepared, text = engine.prepare(job, sampling), bench(family).right[job.job_id]
        ends = target.end_tokens | set(sampling.stop_token_ids) if sampling.min_tokens else frozenset[int]()
        barred = Barred(bad_word_tokens(target.tokenizer, sampling.bad_words), frozenset(ends))
        if sampling.constraint is None and sampling.n == 1:
            plain.append((field, text, sampling, Wanted(prepared.token_ids, prepared.sampling, barred)))
        if sampling.num_logprobs is not None:
            check_logprobs(engine, reference, prepared.token_ids, text)
    outputs = reference.outputs([wanted for *_, wanted in plain])
    for (field, text, sampling, _), output in zip(plain, outputs, strict=True):
        whole = output[: len(text.token_ids)] if sampling.stop else output
        assert list(text.token_ids) == whole, field
    changed = {field for field, text, *_ in plain if text.token_ids != plain[0][1].token_ids}
    same = {"nothing", "top_p and min_p", "prediction", "stream", "ignore_eos"}
    assert changed >= {field for field, *_ in plain} - same, "a field that changes nothing here proves nothing"


def check_logprobs(engine: TransformersEngine, reference: Reference, prompt: tuple[int, ...], text: Generation) -> None:
    """Before bias, bars, penalties and temperature, of every token that a round emits."""
    (choice,) = text.choices
    rows = reference.logits([*prompt, *text.token_ids])[len(prompt) - 1 : -1].log_softmax(-1)
    for token, row, stated in zip(text.token_ids, rows, choice.logprobs or (), strict=True):
        assert stated.logprob == pytest.approx(float(row[token]), abs=1e-9)
        values = row.topk(len(stated.top_logprobs)).values.tolist()
        assert [likely.logprob for likely in stated.top_logprobs] == pytest.approx(values, abs=1e-9)
        assert bytes(stated.bytes or ()).decode(errors="replace") == stated.token
        if "\N{REPLACEMENT CHARACTER}" not in stated.token:
            tokenizer = engine._target.tokenizer
            assert stated.token in (tokenizer.decode([token]), tokenizer.convert_ids_to_tokens(token))


@pytest.mark.parametrize(("family", "drafter"), ROWS, ids=lambda row: str(row))
def test_a_drafted_text_is_the_vanilla_one(
    bench: Callable[[str], Bench], family: str, drafter: str, rng: random.Random
) -> None:
    """All cells side by side; half of the jobs pause, or change their k, between any two rounds."""
    made = bench(family)
    script = next((script for script in made.scripts() if script.state.name == drafter), None)
    # A script knows a job's text, not which of several.
    work = {cell: asked for cell, asked in made.work.items() if script is None or cell[0] != "n"}
    named = {job.job_id: cell for cell, (job, _) in work.items()}
    changing = [job_id for number, job_id in enumerate(named) if number % 4 > 1]

    def change() -> None:
        for job_id in changing:
            if rng.random() < 0.15:
                made.engine.redraft(job_id, rng.choice((drafter, drafter, None)), rng.choice((0, 1, 3, 6)))

    done = list(steps(made.engine, ((*asked, decision(drafter, 5)) for asked in work.values()), change))
    texts = {text.job_id: text for step in done for text in step.finished}
    assert texts.keys() == named.keys()
    assert not any(step.drafter_failures for step in done)
    for job_id, text in texts.items():
        right, cell = made.right[job_id], named[job_id]
        assert (text.token_ids, text.text, text.finish_reason) == (right.token_ids, right.text, right.finish_reason), (
            cell
        )
        assert [choice.text for choice in text.choices] == [choice.text for choice in right.choices], cell
        for one, other in zip(text.choices, right.choices, strict=True):
            assert [said.logprob for said in one.logprobs or ()] == pytest.approx(
                [said.logprob for said in other.logprobs or ()], abs=1e-9
            ), cell
        assert text.counts.num_tokens == len(text.token_ids), cell
        assert not text.counts.num_forced or not text.choices or not text.choices[0].logprobs, "each token has logprobs"
        if script is not None and work[cell][1].constraint is None and not work[cell][1].stop:
            assert text.counts.num_accepted == script.num_right[job_id], cell
    assert script is None or not script.running, "every sequence is closed"
    if drafter == "lookup":
        assert {counts.proposer for text in texts.values() for counts in text.proposers} == {"lookup", GRAMMAR}
    counts = [text.counts for text in texts.values()]
    assert sum(one.num_forced for one in counts) > 0
    assert sum(one.num_accepted for one in counts) > 0
    is_always_right = sum(one.num_accepted for one in counts) == sum(one.num_trials for one in counts)
    assert is_always_right == (drafter == "target_itself")


#: Look-up reads along with what others decode; the others are scored by one pass over a control's greedy text.
READ_ALONG: Final = ("lookup", "lookup_tree", "lookup_memory")
SCORED: Final = ("lookup", "draft_model", "draft_model_gate", "target_itself")
#: A prediction is of look-up alone, bars are adjustments, and a draft model reads a long prompt in several rounds.
NOT_SCORED: Final = ("prediction", "min_tokens", "the end of the context")


@pytest.mark.parametrize("drafter", dict.fromkeys((*READ_ALONG, *SCORED)))
def test_a_text_is_credited_to_a_drafter_with_the_counts_of_decoding_it(
    bench: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Also where a job's own limit forbade a draft, and with the tokens that a constraint forces."""
    made = bench("llama")
    engine, state = made.engine, made.engine._drafters[drafter].state
    # Nothing is copied from a job beside, so that every first round is the prefill's, as in a score.
    monkeypatch.setattr("engine.network.slots.SHORTEST", 10**9)
    monkeypatch.setattr(engine, "_shadows", Shadows(engine._drafters, clock=lambda: 0.0))
    # A job's several texts are no text of one decoding.
    work = {cell: asked for cell, asked in made.work.items() if cell[0] != "n"}
    greedy = [
        (job, sampling)
        for (field, how), (job, sampling) in work.items()
        if how == "greedy" and field not in NOT_SCORED and not sampling.is_adjusted
    ]

    def decode(jobs: Iterable[tuple[Job, Sampling]], decided: Decision) -> dict[str, Generation]:
        return finish(engine, ((*asked, decided) for asked in jobs))

    total = AcceptanceCounts()
    if drafter in READ_ALONG:
        real = decode(work.values(), decision(drafter, state.max_draft_tokens))
        for others in (VANILLA, decision("draft_model", 3), decision(drafter, 1)):
            for job_id, text in decode(work.values(), others).items():
                (shadow,) = (shadow for shadow in text.shadows if shadow.drafter == drafter)
                assert shadow.counts == real[job_id].counts
        total += sum((text.counts for text in real.values()), AcceptanceCounts())
    for k in (1, 4, 64) if drafter in SCORED else ():
        scoring = {
            "purpose": Purpose.CONTROL,
            "scored_drafters": (drafter, "unheard-of"),
            "probe_num_draft_tokens": k,
        }
        scored = decode(((job.model_copy(update=scoring), sampling) for job, sampling in greedy), VANILLA)
        most = min(k, state.max_draft_tokens)
        for job_id, text in decode(greedy, decision(drafter, most)).items():
            (score,) = scored[job_id].shadows
            assert (score.drafter, score.num_draft_tokens, score.draft_revision) == (drafter, most, state.revision)
            assert trials_of(score.counts) == trials_of(text.counts)
            assert drafter != "target_itself" or score.counts == text.counts, "proposed too"
            assert without_zeros(score.chances) == without_zeros(text.chances)
            assert score.counts.num_tokens == len(text.token_ids) == len(scored[job_id].second_choices)
            total += score.counts
    assert total.num_accepted > 0
    assert (total.num_accepted < total.num_trials) == (drafter != "target_itself")


def trials_of(counts: AcceptanceCounts) -> tuple[object, ...]:
    """All but what was proposed after the first wrong token, which a score does not know."""
    tries = without_zeros(counts.trials), without_zeros(counts.accepts)
    return counts.rounds, counts.num_cropped, counts.num_forced, *tries


def without_zeros(numbers: Sequence[int]) -> Sequence[int]:
    """Up to the last position that has any."""
    return numbers[: max((place for place, number in enumerate(numbers, 1) if number), default=0)]


def test_a_constrained_text_ends_where_its_grammar_accepts_it(bench: Callable[[str], Bench]) -> None:
    made, has_ended = bench("llama"), Counter[bool]()
    for job, sampling in made.work.values():
        if sampling.constraint is not None:
            right = made.right[job.job_id]
            text = ConstrainedText.of(made.engine._target.grammars, sampling.constraint)
            for token in right.token_ids:
                text.take(token)
            assert text._settled().is_accepting() == (right.finish_reason == "stop")
            has_ended[right.finish_reason == "stop"] += 1
            if right.finish_reason == "stop" and sampling.constraint.kind == "json_schema":
                jsonschema.validate(json.loads(right.text), json.loads(sampling.constraint.source))
    assert has_ended[True] > 2 < has_ended[False]


#: Jobs without a seed: at most 243 texts, and a few dozen under a constraint, whose probabilities are known exactly.
SAMPLED: Final = {
    "top_k": Sampling(max_tokens=5, temperature=1.0, top_k=3),
    "regex": Sampling(
        max_tokens=12, temperature=1.8, constraint=Constraint("regex", "(an|the|a) ?[ot](ne|wo)", "body")
    ),
}
NUM_TEXTS: Final = 320
GUESSING: Final = (*KINDS, "guessing_hybrid")
#: Branches that follow from the text beside a drawn chain.
HYBRID: Final = HybridDrafterSettings(
    sources=("chain", "drawn-chain"), rule="tree", max_draft_tokens=6, most_tokens={"chain": 1}
)
DRAWN: Final = [
    *(("top_k", name) for name in ("vanilla", *GUESSING, "target_itself", "layer_skip_branches")),
    *(("top_k", name) for name in ("draft_model_cut", "other_tokenizer", "heads", "eagle3")),
    *(("regex", name) for name in ("vanilla", "lookup_tree", "draft_model", "medusa", "hybrid_tree")),
]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Decodes many texts of one prompt, whose distribution is known."""

    engine: TransformersEngine
    expected: dict[str, Distribution]

    def texts(
        self, field: str, drafter: str, k: int, seed: int, schedule: random.Random | None = None
    ) -> tuple[Counter[tuple[int, ...]], int, int]:
        """NUM_TEXTS texts, and how many drafts were tested and accepted for them.

        With a `schedule`, half of the sequences change their drafter and k before each round.
        """
        # A job's randomness follows from its job_id.
        jobs = [make_job(PROMPT, seed % 2**40 * NUM_TEXTS + number) for number in range(NUM_TEXTS)]
        names = [None, "target_itself", "layer_skip", *GUESSING]

        def change() -> None:
            for job in jobs if schedule is not None else ():
                if schedule.random() < 0.5:
                    self.engine.redraft(job.job_id, schedule.choice(names), schedule.randint(0, 3))

        decided = VANILLA if drafter == "vanilla" else decision(drafter, k)
        texts = finish(self.engine, ((job, SAMPLED[field], decided) for job in jobs), change).values()
        num_trials, num_accepted = (
            sum(getattr(text.counts, name) for text in texts) for name in ("num_trials", "num_accepted")
        )
        return Counter(text.token_ids for text in texts), num_trials, num_accepted


@pytest.fixture(scope="module")
def sampler(bench: Callable[[str], Bench], references: Callable[[str], Reference]) -> Sampler:
    engine = bench("llama").engine
    prompt = engine.prepare(make_job(PROMPT), SAMPLED["top_k"]).token_ids
    expected = {field: exact_distribution(engine, references("llama"), prompt, how) for field, how in SAMPLED.items()}
    for texts in expected.values():
        assert sum(texts.values()) == pytest.approx(1.0, abs=1e-9)
        assert len([p for p in texts.values() if p * NUM_TEXTS >= 5]) >= 4, "the test needs a spread of texts"
    guessing = {kind: GuessingDrafter(kind, len(prompt), expected["top_k"]) for kind in KINDS}
    mixed = HybridDrafter("guessing_hybrid", HYBRID, {kind: guessing[kind] for kind in HYBRID.sources})
    drafters = {**engine._drafters, **guessing, "guessing_hybrid": mixed}
    both = TransformersEngine(
        engine._target,
        drafters,
        models=engine._models,
        free_before={},
        num_slots=NUM_SLOTS,
        max_cache_bytes=2**30,
        max_prefix_cache_bytes=0,
    )
    return Sampler(both, expected)


@pytest.mark.parametrize(("field", "drafter"), DRAWN)
def test_sampled_texts_have_the_targets_distribution_whatever_is_drafted(
    sampler: Sampler, field: str, drafter: str, seed: int
) -> None:
    texts, num_trials, num_accepted = sampler.texts(field, drafter, 3, seed)
    assert (num_trials > 0) == (drafter != "vanilla")
    if drafter in GUESSING:
        assert 0 < num_accepted < num_trials, "both rules are exercised"
    excess = chi_square_excess(texts, sampler.expected[field])
    assert excess < 1, f"seed {seed}: {excess:.2f} of the critical value"


def test_sampled_texts_have_the_targets_distribution_when_drafting_changes_between_rounds(
    sampler: Sampler, seed: int
) -> None:
    """From vanilla to any drafter and back at random, with any k: drawn apart from the tokens, as load and lot are."""
    texts, num_trials, num_accepted = sampler.texts("top_k", "vanilla", 0, seed, random.Random(seed))
    assert 0 < num_accepted < num_trials
    excess = chi_square_excess(texts, sampler.expected["top_k"])
    assert excess < 1, f"seed {seed}: {excess:.2f} of the critical value"


@pytest.mark.parametrize(("kind", "power"), [("chain", 3), ("tree", 3), *((kind, math.inf) for kind in GUESSING)])
def test_a_rule_that_is_too_generous_is_caught(
    sampler: Sampler, seed: int, kind: str, power: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above must see a lossy rule: a draft is accepted with the cube root of its probability, or always where
    it is among the target's likely tokens ("typical acceptance")."""
    judge, draw, draws = verification.verify_drawn, verification.drawn_tokens, random.Random(seed)

    def generous(p: Any, proposals: Sequence[Proposal], uniforms: Any) -> list[DraftVerdict]:
        spoiled = uniforms**power
        ends = list(itertools.accumulate(1 + len(proposal.tokens) for proposal in proposals))
        for end in ends:
            spoiled[end - 1] = uniforms[end - 1]
        return judge(p, proposals, spoiled)

    def generously_drawn(scores: Any, piece: Any) -> list[DraftVerdict]:
        tokens = draw(scores, [(one.sequence.choice, len(one.rows)) for one in piece])
        p, verdicts = piece[0].sequence.choice.probabilities(scores), []
        for proposal in (one.proposal for one in piece):
            num = 1 + len(proposal.tokens)
            for row in range(num):
                for token in (proposal.tokens[place] for place in proposal.children(row - 1)):
                    if draws.random() ** power < p[row, token]:
                        tokens[row] = token
            verdicts.append(verification.verify_against_draws(tokens[:num], proposal))
            p, tokens = p[num:], tokens[num:]
        return verdicts

    monkeypatch.setattr(verification, "verify_drawn", generous)
    monkeypatch.setattr(verification, "_drawn", generously_drawn)
    texts, num_trials, _ = sampler.texts("top_k", kind, 3, seed)
    assert num_trials > 0
    excess = chi_square_excess(texts, sampler.expected["top_k"])
    assert excess > 1, f"seed {seed}, {kind}: {excess:.1f} times the critical value"
