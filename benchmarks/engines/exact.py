"""Whether texts from one vLLM server whose requests each have their own k are vanilla's, token by token, in float32.

    python -m benchmarks.engines.exact --prompts FOLDER --num 4
    python -m benchmarks.engines.exact --prompts FOLDER --model TARGET --draft DRAFT --heads EAGLE3 --drafters heads

`--num` prompts of every task are decoded by a vLLM without drafts, and then for each drafter by one with our scheduler
class, eight at a time, in one stream, each with a k that is drawn from 0 to `--k`. Texts may part where the target's
two best tokens are as good as equal: each such place is listed with its gap, from a plain pass of transformers'
modules. What the replies say was drafted and accepted is set beside vLLM's own counters. Last line: JSON. Exit status 1
where a text parts elsewhere, or a counter differs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from alphaloop.embedded.process import free_ports
from alphaloop.engine import Sampling
from alphaloop.settings.endpoints import EndpointSettings
from benchmarks.engines.serve import (
    FOLDER,
    MODEL_NAME,
    NGRAM,
    Server,
    add_pair,
    add_prompts,
    add_run,
    add_vllm,
    dense_folder,
    draft_model,
    following,
    running,
    vllm,
    vllm_lookup,
)
from benchmarks.engines.setting_up import conditions_of, prompts_for
from benchmarks.exactness import Difference, first_difference
from benchmarks.jobs import PromptJob
from benchmarks.reporting import console, parser_of, print_found
from engine.models import load_weights
from worker.servers.client import ServerClient
from worker.servers.counters import Counters
from worker.servers.replies import Reply
from worker.servers.request_body import AskedDrafts

LOAD = 8


@dataclass(frozen=True, slots=True)
class Decoded:
    """All jobs, by one server."""

    replies: Mapping[str, Reply]  #: by job
    before: Counters | None
    after: Counters | None

    def miscounted(self) -> str | None:
        """How vLLM's counters differ from what the replies say, in words; None where they do not, or there are none."""
        if self.before is None or self.after is None:
            return None
        drafts = [reply.drafts for reply in self.replies.values()]
        reported = sum(each.num_proposed for each in drafts), sum(each.num_accepted for each in drafts)
        counted = (
            self.after.num_draft_tokens - self.before.num_draft_tokens,
            sum(self.after.accepts) - sum(self.before.accepts),
        )
        return None if reported == counted else f"replies: {reported} drafted and accepted, counters: {counted}"


async def decode(server: Server, jobs: Sequence[PromptJob], k_of: Mapping[str, int]) -> Decoded:
    """The replies of all jobs, `LOAD` at a time."""
    drafts = (
        {"drafter": server.drafter, "num_draft_tokens": server.num_draft_tokens, "switches_drafts": True}
        if server.drafter
        else {}
    )
    settings = EndpointSettings.model_validate({"kind": "vllm", "url": server.url, "model": MODEL_NAME, **drafts})
    waiting, replies = [*jobs], dict[str, Reply]()

    async def send(client: ServerClient) -> None:
        while waiting:
            job = waiting.pop()
            sampling = Sampling(max_tokens=job.max_tokens, temperature=0.0)
            asked = AskedDrafts(k_of[job.job_id]) if server.drafter else None
            replies[job.job_id] = await client.complete(job.as_job(), sampling, asked=asked)

    async with ServerClient(settings) as client:
        before = await _counters(client) if server.drafter else None
        await asyncio.gather(*(send(client) for _ in range(LOAD)))
        after = await _counters(client) if server.drafter else None
    return Decoded(replies, before, after)


async def _counters(client: ServerClient) -> Counters:
    return Counters.of_page((await client.page(f"{client.endpoint.root}/metrics")).decode())


def main() -> int:
    """Decode, compare, list, print."""
    options = _options()
    return print_found(lambda: _measure(options), lambda found: bool(found["wrong"] or found["miscounted"]))


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(options.seed)
    jobs = [
        PromptJob(f"{task}-{number}", task, prompt, options.max_tokens)
        for task, prompts in sorted(prompts_for(options).items())
        for number, prompt in enumerate(rng.sample(prompts, min(options.num, len(prompts))))
    ]
    k_of = {job.job_id: rng.randrange(options.k + 1) for job in jobs}
    model = options.model or str(dense_folder("float32"))
    loaded = load_weights(model, None, "float32", torch.device("cpu"))
    folder = FOLDER / "exact"
    shutil.rmtree(folder, ignore_errors=True)
    decoded: dict[str, Decoded] = {}
    for server in _servers(options, model):
        with running([server], folder, options.cores):
            decoded[server.name] = asyncio.run(decode(server, jobs, k_of))
        console.print(f"{server.name}: {len(jobs)} texts")
    vanilla = decoded.pop("vanilla").replies
    differences: list[Difference] = []
    for name, theirs in decoded.items():
        for job in jobs:
            prompt = loaded.tokenizer(job.prompt, add_special_tokens=False).input_ids
            one, two = vanilla[job.job_id].token_ids, theirs.replies[job.job_id].token_ids
            if (found := first_difference(loaded.model, prompt, one, two, job.job_id, name)) is not None:
                differences.append(found)
                console.print(
                    f"{job.job_id}, {name}, k={k_of[job.job_id]}: differs at token {found.place}, "
                    f"{found.below_best:.1e} below the best: {'near-tie' if found.is_near_tie else 'NOT A TIE'}"
                )
    summary = {
        "conditions": conditions_of(options) | {"k": options.k, "load": LOAD},
        "texts": len(jobs),
        "tokens": sum(reply.num_tokens for reply in vanilla.values()),
        "identical": {name: len(jobs) - sum(each.drafter == name for each in differences) for name in decoded},
        "drafted": {name: sum(r.drafts.num_proposed for r in each.replies.values()) for name, each in decoded.items()},
        "accepted": {name: sum(r.drafts.num_accepted for r in each.replies.values()) for name, each in decoded.items()},
        "miscounted": {name: why for name, each in decoded.items() if (why := each.miscounted()) is not None},
        "near_ties": sum(each.is_near_tie for each in differences),
        "wrong": sum(not each.is_near_tie for each in differences),
        "differences": [asdict(each) for each in differences],
    }
    console.print({name: value for name, value in summary.items() if name not in ("conditions", "differences")})
    return summary


def _servers(options: argparse.Namespace, model: str) -> list[Server]:
    """Without drafts, and with each of the drafters."""
    speculative: dict[str, dict[str, Any]] = {
        "ngram": NGRAM | {"num_speculative_tokens": options.k},
        "draft": draft_model(options.draft or model, options.k),
        "heads": {"method": "eagle3", "model": options.heads, "num_speculative_tokens": options.k},
    }
    python = str(options.vllm_python)
    settings: dict[str, Any] = {"dtype": "float32", "max_requests": LOAD}
    names = options.drafters or [name for name in (*speculative, "lookup") if name != "heads" or options.heads]
    servers = [vllm("vanilla", python, model, free_ports(1)[0], num_threads=options.threads, **settings)]
    for name in names:
        (port,) = free_ports(1)
        if name == "lookup":
            looked_up = vllm_lookup(name, python, model, port, k=options.k, **settings)
            servers.append(looked_up)
        else:
            started = vllm(
                name, python, model, port, speculative=speculative[name], num_threads=options.threads, **settings
            )
            servers.append(following(started))
    return servers


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--num", type=int, default=4, help="prompts of each task")
    parser.add_argument("--k", type=int, default=4, help="longest draft")
    parser.add_argument("--heads", help="a folder of EAGLE-3 heads")
    parser.add_argument("--drafters", nargs="*", choices=["ngram", "draft", "heads", "lookup"], help="only these")
    parser.add_argument("--tasks", nargs="+", default=[], help="only these")
    parser.add_argument("--dtype", default="float32", choices=["float32"])
    add_prompts(parser, max_tokens=64, max_characters=3000)
    add_pair(parser)
    add_vllm(parser)
    add_run(parser, timeout_s=900.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
